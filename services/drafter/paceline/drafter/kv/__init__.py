"""The target's committed KV and hidden states, as drafters read them.

:class:`~paceline.drafter.kv.reader.KvReader` is the interface. Its sources: ``shared`` (POSIX
shared memory), ``cuda`` (CUDA IPC), ``remote`` (a delta cache over gRPC); ``exchange`` opens them.
``options`` and ``errors`` import neither gRPC nor torch.
"""
