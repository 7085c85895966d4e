"""The text of one sequence, which the verifier, its sources and its plug-in for vLLM share, and its
sampling parameters for the kernels."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from paceline.kernels import SamplingRules
from paceline.sampling import Sampling
from paceline.v1 import sampling_pb2

_GREEDY = SamplingRules(temperature=0.0)


def sampling_rules(sampling: Sampling) -> SamplingRules:
    """Convert sampling parameters for the kernels: verifier and drafter must sample alike."""
    bias = tuple(sorted((sampling.logit_bias or {}).items()))
    converted: dict[str, Any] = {"logit_bias": bias, "rejection": sampling.rejects}
    names = {field.name for field in fields(SamplingRules)} - converted.keys()
    return SamplingRules(**converted, **{name: getattr(sampling, name) for name in names})


class Text:
    """Token ids of one sequence, which only grow, and what chooses those that follow.

    It is the one copy of them in a process: who keeps something for each token, such as an index,
    reads them here.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        output: Iterable[int] = (),
        *,
        limit: int = 1,
        sampling: SamplingRules = _GREEDY,
        stop_ids: frozenset[int] = frozenset(),
        owner: str = "",
        message: sampling_pb2.SamplingParams | None = None,
    ) -> None:
        self.tokens = array("I", prompt)  # prompt and output
        self.tokens.extend(output)
        self.prompt_length = len(prompt)
        self.given = len(self.tokens)  # tokens of the prompt, and emitted through a cache now lost
        self.limit = limit  # maximum number of tokens
        self.sampling = sampling
        self.stop_ids = stop_ids  # tokens that end it
        # Whose text it is. No other owner's prompt reuses its KV, nor is a text drafted from it.
        self.owner = owner
        self.message = message  # the sampling parameters as they were received, for drafters

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self.limit - len(self.tokens)

    @property
    def output_length(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - self.prompt_length
