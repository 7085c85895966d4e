"""KV that a verifier shares with drafters: what both services have in common.

``segment``: sealed memfds. ``cuda``: memory of GPUs. ``wire``: the format on gRPC streams.
``policies``: the registry of selection policies; ``selection``: the interface of a policy, and the
built-in ones. ``segment`` and ``policies`` do not import torch.
"""
