"""What a method wants of the target's KV, and by which way."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.v1 import kv_pb2

POLICIES = {
    "streaming": kv_pb2.SELECTION_POLICY_STREAMING,
    "chunk_topk": kv_pb2.SELECTION_POLICY_CHUNK_TOPK,
    "verified": kv_pb2.SELECTION_POLICY_VERIFIED,
    "quest": kv_pb2.SELECTION_POLICY_QUEST,
}
"""Selection policies by name."""

WIRES = {
    "auto": kv_pb2.KV_DTYPE_UNSPECIFIED,
    "float32": kv_pb2.KV_DTYPE_FLOAT32,
    "float16": kv_pb2.KV_DTYPE_FLOAT16,
    "bfloat16": kv_pb2.KV_DTYPE_BFLOAT16,
    "int8": kv_pb2.KV_DTYPE_INT8,
    "float8": kv_pb2.KV_DTYPE_FLOAT8_E4M3,
}
"""Types on the wire by name."""

MOST_POSITIONS = 1 << 20
"""What a budget of 0, for all positions, stands for."""

TRANSPORTS = ("auto", "map", "follow")


@dataclass(frozen=True)
class KvOptions:
    """Settings of methods that read the target's KV.

    Raises:
        ValueError: There is no such name.
    """

    kv: str = "auto"
    """How: map (shared memory, no copy), follow (a copy of chosen positions, kept in step over
    gRPC), or auto: map where verifier and drafter share a machine and a user, else follow."""

    kv_policy: str = "streaming"
    """Which positions are read under a KV budget: streaming (the first and the newest),
    chunk_topk (chunks of 8 by the attention they got so far), verified (positions by the scores of
    the newest round) or quest (pages of 16 by bounds on those)."""

    kv_wire: str = "auto"
    """Type on the wire while following: auto (the cache's own), float32, float16, bfloat16, int8 or
    float8 (the last two with a scale a head and position)."""

    def __post_init__(self) -> None:
        for name, known in (("kv", TRANSPORTS), ("kv_policy", POLICIES), ("kv_wire", WIRES)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"option {name}={getattr(self, name)!r}: expected one of {', '.join(known)}"
                )
