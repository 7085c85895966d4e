"""The target's committed KV and hidden states, as drafters read them.

:class:`~paceline.drafter.kv.reader.KvReader` is the interface. Its sources: ``mapped`` (a memfd of
the verifier), ``cuda`` (memory of a GPU), ``remote`` (a delta cache over gRPC); ``exchange`` opens
them.
This module has their errors and the options of methods that read KV; it imports neither gRPC nor
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.kv.policies import STREAMING, kv_policies

TRANSPORTS = ("auto", "map", "follow")


class KvNotShared(Exception):
    """The KV of a cache cannot be read here; the message gives the reason."""


class VerifierUnreachable(KvNotShared):
    """The verifier cannot be reached, or does not answer in time."""


class KvGone(Exception):
    """The cache was released, or its verifier has ended: what was read must not be used."""


@dataclass(frozen=True)
class KvOptions:
    """Options of methods that read the target's KV. Raises ``ValueError`` if a value is not one of
    those known."""

    # Transport: map (the verifier's memory, no copy), follow (a copy of selected positions, updated
    # over gRPC), or auto: map where the drafter service can open the verifier's Unix socket, else
    # follow.
    kv: str = "auto"
    # Selection policy under a KV budget: streaming (the first positions and the newest), chunk_topk
    # (chunks of 8 by cumulative attention), verified (positions by the logits of the newest round's
    # first and deepest row), verified_all (of all rows), verified_last (of the last accepted one),
    # the same with _weights (by softmax weights), verified_pages (pages of 16 by bounds on the
    # logits), or an installed package's.
    kv_policy: str = STREAMING

    def __post_init__(self) -> None:
        known = {"kv": TRANSPORTS, "kv_policy": sorted(kv_policies())}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"option {name}={getattr(self, name)!r}: expected one of {', '.join(values)}"
                )
