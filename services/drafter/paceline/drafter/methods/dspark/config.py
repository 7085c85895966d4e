"""The shape of a DSpark drafter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from paceline.decoder import UnsupportedModelError
from paceline.drafter.methods.layers import LayerShape, TappedShape

# Sequential heads that published checkpoints have: DSpark's and DFlash 2's.
MARKOV_HEADS = ("vanilla", "product")
_MAX_LAYERS = 1 << 12


@dataclass(frozen=True)
class DSparkConfig(TappedShape):
    """Shape of a DSpark drafter, and the target layers that it reads.

    The backbone's layers are Qwen3's: heads are normalised, and there are no biases.

    The ``window`` of :class:`TappedShape` is a number of positions before the anchor. Raises
    ``UnsupportedModelError`` if a field is out of range.
    """

    method: ClassVar[str] = "dspark"
    SIZES: ClassVar = (*LayerShape.SIZES, "layers")
    COUNTS: ClassVar = (*TappedShape.COUNTS, "markov_rank")

    layers: int  # layers of the backbone
    block: int  # tokens fed in one pass: the anchor and mask tokens after it
    mask_token: int  # token id that is fed for each token to be drafted
    # Whether each position of the block predicts the next token, the anchor's the first one
    # (DSpark). If false, a mask's position predicts its own token, and the anchor's predicts
    # nothing (DFlash).
    from_anchor: bool = True
    # The window of each layer; none: `window`, which is the largest, for all layers.
    windows: tuple[int, ...] = ()
    # For each layer, whether a position of the block attends only to those up to itself; none: all
    # attend to the whole block. The window of a causal layer moves with the position, the
    # window of others is the anchor's.
    causal: tuple[bool, ...] = ()
    # Whether the projected hidden states of the position before the anchor are added to every
    # embedding of the block, as in EAGLE. If false, they are read by attention alone, as in DSpark.
    state_input: bool = False
    markov_rank: int = 0  # rank of the sequential head (equation 5); 0: there is none
    # `vanilla` (equation 5), or `product` with a projection of the hidden state (DFlash 2).
    markov_head: str = "vanilla"
    # Whether W1 has a row for every token although the vocabulary is reduced.
    markov_all: bool = False
    # The sequential head chooses among this many best tokens of the backbone; 0: all.
    markov_best: int = 0
    confidence: bool = False  # whether there is a confidence head (equation 7)
    # Whether its input includes the previous token's Markov embedding; needs a `markov_rank`.
    confidence_markov: bool = False
    # For each level, what the logit of the confidence is divided by (sequential temperature
    # scaling, section 3.2.1); none: 1.
    confidence_temperatures: tuple[float, ...] = ()
    # Kernel size and group size of the convolutions around attention and feed-forward blocks
    # (DFlash 2); None if there are none.
    conv: tuple[int, int] | None = None
    embedding_factor: float = 1.0  # factor on embeddings
    logit_factor: float = 1.0  # factor on the backbone's logits
    logit_cap: float = 0.0  # soft cap of the backbone's logits; 0: none

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers > _MAX_LAYERS:
            raise UnsupportedModelError(f"layers is {self.layers}, expected up to {_MAX_LAYERS}")
        if not 0 <= self.mask_token < self.vocab_size:
            raise UnsupportedModelError(
                f"the mask token is {self.mask_token}, expected 0 to {self.vocab_size - 1}"
            )
        for name in ("windows", "causal"):
            if len(getattr(self, name)) not in (0, self.layers):
                raise UnsupportedModelError(
                    f"{name} is {getattr(self, name)}, expected a value for {self.layers} layers"
                )
        if self.conv is not None and (self.conv[0] < 1 or self.hidden % self.conv[1]):
            raise UnsupportedModelError(
                f"convolutions have size and groups {self.conv}, expected a size of 1 or more and "
                f"groups that divide {self.hidden}"
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
        temperatures = self.confidence_temperatures
        known = self.confidence and len(temperatures) == self.levels
        if temperatures and not (known and all(0 < value < math.inf for value in temperatures)):
            raise UnsupportedModelError(
                f"confidence_temperatures is {list(temperatures)}, expected a number above 0 for "
                f"each of {self.levels} levels, of a drafter with a confidence head"
            )

    @property
    def levels(self) -> int:
        """Tokens drafted in one pass: the depth of a draft. Unit: tokens."""
        return self.block if self.from_anchor else self.block - 1

    @property
    def attention(self) -> list[tuple[int, bool]]:
        """Window of each layer, and whether it is causal."""
        windows = self.windows or (self.window,) * self.layers
        return list(zip(windows, self.causal or (False,) * self.layers, strict=True))

    @property
    def markov_rows(self) -> int:
        """Rows of W1: one for each drafted token and one for all others, or one for each token."""
        if self.markov_all:
            return self.vocab_size
        return self.drafted + (1 if self.draft_vocab_size else 0)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        wide, rank = self.hidden, self.markov_rank
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (wide, len(self.taps) * wide),
            "hidden_norm.weight": (wide,),
            "norm.weight": (wide,),
        }
        for layer in range(self.layers):
            base = f"layers.{layer}."
            shapes |= self.layer_tensors(base, head_norms=True)
            for name in ("attention_conv", "mlp_conv") if self.conv else ():
                size, group = self.conv or (0, 1)
                shapes[f"{base}{name}.base_kernel"] = (2, size, wide)
                projection = (2 * size * (wide // group), wide)
                shapes[f"{base}{name}.kernel_projection.weight"] = projection
        if rank:
            shapes["markov_head.markov_w1.weight"] = (self.markov_rows, rank)
            shapes["markov_head.markov_w2.weight"] = (self.drafted, rank)
            if self.markov_head == "product":
                shapes["markov_head.gate_proj.weight"] = (rank, wide)
        if self.confidence:
            read = wide + rank if self.confidence_markov else wide
            shapes["confidence_head.proj.weight"] = (1, read)
            shapes["confidence_head.proj.bias"] = (1,)
        return shapes

    @classmethod
    def for_target(cls, path: str | Path, *, confidence: bool = True, **fields: Any) -> Self:
        """See :meth:`LayerShape.for_target`; the confidence head reads the Markov embedding if
        there is one."""
        markov = confidence and bool(fields.get("markov_rank"))
        fields = {"layers": 1, **fields, "confidence": confidence, "confidence_markov": markov}
        return super().for_target(path, **fields)
