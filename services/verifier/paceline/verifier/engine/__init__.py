"""The engine: one thread that owns the device and runs steps.

A step of ``engine`` takes jobs from the ``queue``, packs them into a ``batch`` with the nodes that
the scheduler admits, runs the model, and has ``acceptance`` walk each tree with the tokens that the
``sampler`` chooses. The result is one ``output`` per sequence, which its job hands to the RPC.
"""
