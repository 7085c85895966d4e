"""One loaded version of a named drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.drafter.methods.base import Drafter
from paceline.drafter.spec import DrafterSpec
from paceline.v1 import drafter_pb2


@dataclass(eq=False)
class Version:
    """Changed only by the registry, on its event loop."""

    spec: DrafterSpec
    drafter: Drafter
    version: str
    check: drafter_pb2.DrafterCheck | None = None
    """How it did on the recorded texts; None: it was not checked."""

    share: float = 0.0
    """Share of new generations of its name, in [0, 1]; over the versions of a name it sums to 1."""

    credit: float = 0.0
    """Share not yet given out, in generations."""

    on_trial: bool = False
    """It may be promoted or rolled back at any time."""

    draining: bool = False
    evictions: set[Callable[[], None]] = field(default_factory=set)
    """One for each attached stream: ends it."""

    def info(self) -> drafter_pb2.DrafterInfo:
        """The version as listed."""
        fit = self.drafter.fit
        return drafter_pb2.DrafterInfo(
            name=self.spec.name,
            version=self.version,
            method=self.spec.method,
            folder=str(self.spec.folder or ""),
            traffic_share=self.share,
            active_streams=len(self.evictions),
            target_fingerprint=fit.target_fingerprint,
            tokenizer_digest=fit.tokenizer_digest,
            weight_bytes=self.drafter.weight_bytes,
            hidden_state_layers=self.drafter.needs.hidden_state_layers,
            hidden_state_window=self.drafter.needs.hidden_state_window,
            draining=self.draining,
            check=self.check,
        )
