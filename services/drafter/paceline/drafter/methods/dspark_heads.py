"""The sequential and the confidence head at work: the next level of several trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.dspark import ConfidenceHead, DSparkConfig, MarkovHead


@dataclass(frozen=True)
class Places:
    """What a level's parents, R in all, have in common with the places that they lead to.

    Attributes:
        hidden: The backbone's state of the place, ``[R, hidden]``.
        before: The parents' tokens, int64 ``[R]``.
        state: What the sequential head keeps of the path, ``[R, r]``; None at the first level.
    """

    hidden: Tensor
    before: Tensor
    state: Tensor | None


@dataclass(frozen=True)
class Verdict:
    """What the heads say of places.

    Attributes:
        bias: To be added to the logits, ``[R, V]``; None: nothing.
        state: For the next level, ``[R, r]``; None without a sequential head.
        log_confidence: Log of the chance that the place's token is accepted, float32 ``[R]``; None
            without a confidence head.
    """

    bias: Tensor | None
    state: Tensor | None
    log_confidence: Tensor | None


class DSparkHeads:
    """Both heads, as far as the drafter has them. Used on one thread."""

    def __init__(
        self,
        config: DSparkConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Build from the folder's tensors."""
        self._markov = MarkovHead(config) if config.markov_rank else None
        self._confidence = ConfidenceHead(config) if config.confidence else None
        for name, head in (("markov_head.", self._markov), ("confidence_head.", self._confidence)):
            if head is not None:
                head.to(device, dtype)
                own = {n.removeprefix(name): t for n, t in weights.items() if n.startswith(name)}
                head.load_state_dict(own)

    @torch.inference_mode()
    def judge(self, places: Places) -> Verdict:
        """Look at places of any number of trees."""
        rows = bias = state = confidence = None
        if self._markov is not None:
            rows = self._markov.markov_w1(places.before)
            begin = self._markov.begin(places.hidden) if places.state is None else places.state
            state, features = self._markov.step(begin, rows, places.hidden)
            bias = self._markov.markov_w2(features)
        if self._confidence is not None:
            confidence = torch.nn.functional.logsigmoid(
                self._confidence(places.hidden, rows).float()
            )
        return Verdict(bias, state, confidence)
