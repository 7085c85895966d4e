"""Shape and constants of a DSpark drafter."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from paceline.decoder import UnsupportedModelError
from paceline.drafter.methods.layers import LayerShape, target_shape

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
        markov_rank: Rank of the sequential head (equation 5); 0: there is none.
        markov_head: ``vanilla`` (equation 5), ``gated`` by the hidden state, or ``rnn``
            (equation 6).
        confidence: Whether there is a confidence head (equation 7).
        confidence_markov: Whether its input includes the previous token's Markov embedding; needs
            a ``markov_rank``.

    Raises:
        UnsupportedModelError: A field is out of range.
    """

    COUNTS: ClassVar[tuple[str, ...]] = (*LayerShape.COUNTS, "layers", "block")

    layers: int
    taps: tuple[int, ...]
    target_layers: int
    block: int
    mask_token: int
    from_anchor: bool = True
    window: int = 0
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
        cls,
        folder: str | Path,
        *,
        taps: tuple[int, ...],
        block: int,
        mask_token: int,
        layers: int = 1,
        intermediate: int | None = None,
        window: int = 0,
        markov_rank: int = 0,
        markov_head: str = "vanilla",
        confidence: bool = True,
    ) -> DSparkConfig:
        """Returns the shape of a drafter for a target, with its heads and rotary embedding.

        Args:
            folder: The target's Hugging Face folder.
            taps: See the class; negative ones count from the last layer.
            block: See the class.
            mask_token: See the class.
            layers: See the class.
            intermediate: Width of the feed-forward blocks; None: the target's.
            window: See the class.
            markov_rank: See the class.
            markov_head: See the class.
            confidence: See the class; it reads the Markov embedding if there is one.

        Raises:
            UnsupportedModelError: The decoder does not support the target, or it lacks a layer.
            FileNotFoundError: The folder has no config.json.
        """
        shape, target = target_shape(folder, intermediate)
        return cls(
            **shape,
            layers=layers,
            taps=tuple(tap + target.layers if tap < 0 else tap for tap in taps),
            target_layers=target.layers,
            block=block,
            mask_token=mask_token,
            window=window,
            markov_rank=markov_rank,
            markov_head=markov_head,
            confidence=confidence,
            confidence_markov=confidence and markov_rank > 0,
        )
