"""The parts of a generation that its verifier and drafter sessions share."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.v1 import verifier_pb2

from ._fleet import Fleet
from ._members import Verifier
from ._options import GenerationOptions
from ._stats import Stats
from ._trace import GenerationTrace


@dataclass
class GenerationContext:
    """One generation's services, model, options, tokens, statistics and trace."""

    fleet: Fleet
    facts: verifier_pb2.GetModelResponse
    options: GenerationOptions
    prompt: list[int]
    output: list[int]
    """Emitted tokens; grows during the generation."""
    stats: Stats
    trace: GenerationTrace | None
    """None if the generation is not traced."""
    deadline: float | None
    """Of `time.monotonic`; None: no deadline."""
    verifier: Verifier | None = None
    """The verifier with the cache; changes when the generation moves."""

    def begin_span(self, name: str) -> str:
        """Starts a span, one of `names.Span`; returns its traceparent, empty without a trace."""
        return "" if self.trace is None else self.trace.begin(name)
