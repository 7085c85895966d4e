"""One loaded version of a named drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.drafter.methods.base import Drafter
from paceline.drafter.spec import DrafterSpec
from paceline.v1 import drafter_pb2


@dataclass(eq=False)
class Version:
    """A loaded version. Only the registry changes it, on its event loop."""

    spec: DrafterSpec
    drafter: Drafter
    version: str
    check: drafter_pb2.DrafterCheck | None = None
    """Result of the load check; None: it was not checked."""

    share: float = 0.0
    """Share of new generations of its name, in [0, 1]; the shares of a name sum to 1."""

    credit: float = 0.0
    """Generations it is owed by its share (smooth weighted round-robin)."""

    canary: bool = False
    """It is a running canary, which may be promoted or rolled back at any time."""

    draining: bool = False
    """It was unloaded and takes no new streams."""

    streams: set[Callable[[], None]] = field(default_factory=set)
    """Attached streams, each by the callback that ends it."""

    def info(self) -> drafter_pb2.DrafterInfo:
        """The version as listed."""
        drafter = self.drafter
        return drafter_pb2.DrafterInfo(
            name=self.spec.name,
            version=self.version,
            method=self.spec.method,
            folder=str(self.spec.folder or ""),
            traffic_share=self.share,
            active_streams=len(self.streams),
            target_fingerprint=drafter.fit.target_fingerprint,
            tokenizer_digest=drafter.fit.tokenizer_digest,
            weight_bytes=drafter.weight_bytes,
            hidden_state_layers=drafter.needs.hidden_state_layers,
            hidden_state_window=drafter.needs.hidden_state_window,
            draining=self.draining,
            check=self.check,
        )
