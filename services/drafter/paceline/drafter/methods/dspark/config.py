"""Configuration of a DSpark drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from paceline.decoder import UnsupportedModelError
from paceline.drafter.methods.layers import LayerShape, target_fields

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DSparkConfig(LayerShape):
    """Shape of a DSpark drafter, and the target layers that it reads.

    The backbone's layers are Qwen3's: heads are normalised, and there are no biases.

    Attributes:
        layers: Layers of the backbone.
        taps: Target layers whose outputs are read, 0 for the first, strictly increasing.
        target_layers: Number of layers of the target; 0: not known.
        block: Tokens fed in one pass: the anchor and mask tokens after it.
        mask_token: Token id that is fed for each token to be drafted.
        from_anchor: Whether each position of the block predicts the next token, the anchor's the
            first one (DSpark). If false, a mask's position predicts its own token, and the anchor's
            predicts nothing (DFlash).
        window: Positions before the anchor that the backbone attends to; 0: all. Unit: tokens.
        state_input: Whether the projected hidden states of the position before the anchor are added
            to every embedding of the block, as in EAGLE. If false, they are read by attention
            alone, as in DSpark.
        markov_rank: Rank of the sequential head (equation 5); 0: there is none.
        markov_head: ``vanilla`` (equation 5), ``gated`` by the hidden state, or ``rnn``
            (equation 6).
        confidence: Whether there is a confidence head (equation 7).
        confidence_markov: Whether its input includes the previous token's Markov embedding; needs
            a ``markov_rank``.

    Raises:
        UnsupportedModelError: A field is out of range.
    """

    HF_FIELDS: ClassVar = {**LayerShape.HF_FIELDS, "layers": "num_hidden_layers"}

    layers: int
    taps: tuple[int, ...]
    target_layers: int
    block: int
    mask_token: int
    from_anchor: bool = True
    window: int = 0
    state_input: bool = False
    markov_rank: int = 0
    markov_head: str = "vanilla"
    confidence: bool = False
    confidence_markov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window", "markov_rank", "target_layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise UnsupportedModelError(f"{name} is {value!r}, expected 0 or more")
        ends = (-1, *self.taps, *((self.target_layers,) if self.target_layers else ()))
        if not self.taps or any(high <= low for low, high in pairwise(ends)):
            count = self.target_layers or "an unknown number of"
            raise UnsupportedModelError(
                f"the drafter reads target layers {list(self.taps)}, expected strictly increasing "
                f"numbers from 0: the target has {count} layers"
            )
        if not 0 <= self.mask_token < self.vocab_size:
            raise UnsupportedModelError(
                f"the mask token is {self.mask_token}, expected 0 to {self.vocab_size - 1}"
            )
        if self.levels < 1:
            raise UnsupportedModelError("a block of 1 that does not begin at the anchor is empty")
        if self.markov_head not in MARKOV_HEADS:
            raise UnsupportedModelError(
                f"markov head {self.markov_head!r} is not known, expected one of {MARKOV_HEADS}"
            )
        if self.confidence_markov and not (self.confidence and self.markov_rank):
            raise UnsupportedModelError(
                "a confidence head that reads the Markov embedding needs a markov_rank above 0"
            )

    @property
    def levels(self) -> int:
        """Tokens drafted in one pass: the depth of a draft. Unit: tokens."""
        return self.block if self.from_anchor else self.block - 1

    @classmethod
    def for_target(
        cls, folder: str | Path, *, taps: Sequence[int], confidence: bool = True, **fields: Any
    ) -> DSparkConfig:
        """Returns the configuration of a drafter for a target.

        Args:
            folder: The target's Hugging Face folder.
            taps: See the class; negative ones count from the last layer.
            confidence: See the class; the head reads the Markov embedding if there is one.
            fields: Other fields, such as ``block`` and ``mask_token``; None: the target's.

        Raises:
            UnsupportedModelError: The decoder does not support the target, or it lacks a layer.
            FileNotFoundError: The folder has no config.json.
        """
        found = target_fields(folder, {"layers": 1, **fields})
        count = found["target_layers"]
        return cls(
            **found,
            taps=tuple(tap + count if tap < 0 else tap for tap in taps),
            confidence=confidence,
            confidence_markov=confidence and bool(found.get("markov_rank")),
        )
