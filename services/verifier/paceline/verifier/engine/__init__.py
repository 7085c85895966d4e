"""The engine: one thread that owns the device and runs steps.

A step of ``engine`` takes each ``job`` that is ready from the ``queue``, packs them into a
``batch`` with the nodes that the scheduler admits, runs the model, and has ``acceptance`` walk each
tree with the model's own tokens. The result is one ``StepOutput`` per sequence, which its job
reports to the RPC. ``drafting`` requests the next trees.
"""
