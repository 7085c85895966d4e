"""The shape of an EAGLE-3 drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from paceline.convert import load_config
from paceline.convert.drafters import usual_taps
from paceline.decoder import UnsupportedModelError
from paceline.drafter.methods.layers import TappedShape


@dataclass(frozen=True)
class Eagle3Config(TappedShape):
    """Shape of an EAGLE-3 layer, and the target layers that it reads.

    A position's input is the embedding of the token there, and a hidden state of the position
    before: of the target, fused, or the layer's own output.

    The ``window`` of :class:`TappedShape` includes the token's own position. Raises
    ``UnsupportedModelError`` if a field is out of range.
    """

    method: ClassVar[str] = "eagle3"
    COUNTS: ClassVar = (*TappedShape.COUNTS, "target_hidden")

    target_hidden: int = 0  # width of the target's hidden states; 0: the layer's
    qk_norm: bool = False  # whether heads of queries and keys are normalised
    # Whether the residual stream begins with the normalised hidden state.
    norm_before_residual: bool = False
    norm_before_fc: bool = False  # whether the target's states are normalised, side by side
    fc_norm: bool = False  # whether each of the target's states is normalised (EAGLE-3.1)
    # Whether the layer's output is normalised before it is an input again (EAGLE-3.1).
    norm_output: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_before_fc and self.fc_norm:
            raise UnsupportedModelError(
                "norm_before_fc and fc_norm are both true, expected one norm of the target's states"
            )

    @property
    def of_target(self) -> dict[str, int]:
        return {**super().of_target, "hidden": self.target_hidden or self.hidden}

    @property
    def states(self) -> int:
        """Width of the target's states of a position, side by side."""
        return len(self.taps) * (self.target_hidden or self.hidden)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        wide, norms = self.states // len(self.taps), len(self.taps) * self.fc_norm
        return {
            **({"input_norm.weight": (self.states,)} if self.norm_before_fc else {}),
            **{f"fc_norm.{index}.weight": (wide,) for index in range(norms)},
            "fc.weight": (self.hidden, self.states),
            **self.layer_tensors("layers.0.", 2 * self.hidden, head_norms=self.qk_norm),
            "layers.0.hidden_norm.weight": (self.hidden,),
            "norm.weight": (self.hidden,),
        }

    @classmethod
    def for_target(cls, path: str | Path, *, taps: Sequence[float] = (), **fields: Any) -> Self:
        """See :meth:`LayerShape.for_target`; without ``taps`` they are the usual ones."""
        taps = taps or usual_taps(load_config(path).layers)
        return super().for_target(path, taps=taps, **fields)
