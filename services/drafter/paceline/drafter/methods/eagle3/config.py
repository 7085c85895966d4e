"""An EAGLE-3 drafter's shape and folder, in the layouts of EAGLE and SpecForge or of speculators.

Projects differ in how they count target layers: the first two name outputs (0 is that of the first
layer), speculators names inputs (1 is the same). Without numbers all read the inputs of layers 2,
n / 2 and n - 3 of a target with n layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from paceline.convert import load_config
from paceline.decoder import UnsupportedModelError
from paceline.drafter.methods.base import SECTION
from paceline.drafter.methods.checkpoint import (
    TargetRef,
    read_shape,
    speculators_fields,
    write_checkpoint,
)
from paceline.drafter.methods.layers import (
    TappedShape,
    config_errors,
    reduced_vocabulary,
    target_depth,
    whole_config,
)

METHOD = "eagle3"

# Fields of the configuration that all layouts have under the same names.
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Eagle3Config(TappedShape):
    """Shape of an EAGLE-3 layer, and the target layers that it reads.

    A position's input is the embedding of the token there, and a hidden state of the position
    before: of the target, fused, or the layer's own output.

    The ``window`` of :class:`TappedShape` includes the token's own position.

    Raises:
        UnsupportedModelError: A field is out of range.
    """

    COUNTS: ClassVar = (*TappedShape.COUNTS, "target_hidden")

    target_hidden: int = 0  # width of the target's hidden states; 0: that of the layer
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
    def for_target(cls, path: str | Path, *, taps: Sequence[int] = (), **fields: Any) -> Self:
        """See :meth:`LayerShape.for_target`; without ``taps`` they are the usual ones."""
        taps = taps or _usual_taps(load_config(path).layers)
        return super().for_target(path, taps=taps, **fields)


def _usual_taps(layers: int) -> tuple[int, ...]:
    return 1, layers // 2 - 1, layers - 4


def is_eagle3(described: Json) -> bool:
    if SECTION in described:
        return bool(described[SECTION].get("method") == METHOD)
    kind = described.get("speculators_model_type")
    names = " ".join(described.get("architectures") or ())
    plain = names == "LlamaForCausalLM" and "draft_vocab_size" in described  # EAGLE's own
    return kind == METHOD or (kind is None and ("eagle3" in names.lower() or plain))


@config_errors(METHOD)
def eagle3_config(described: Json, target_layers: int = 0) -> Eagle3Config:
    """Read the shape of a drafter from a config.json of any layout.

    Args:
        described: All of config.json.
        target_layers: Number of layers of the target; 0: not known.

    Raises:
        UnsupportedModelError: See :func:`read_eagle3`.
    """
    if not is_eagle3(described):
        raise UnsupportedModelError(
            "this config.json is not of an EAGLE-3 drafter: expected speculators_model_type "
            f"'eagle3' or an architecture like LlamaForCausalLMEagle3, found "
            f"{described.get('speculators_model_type')!r} and {described.get('architectures')!r}"
        )
    speculators = described.get("speculators_model_type") == METHOD
    layer = described["transformer_layer_config"] if speculators else described
    if speculators and "norm_before_residual" not in described:
        raise UnsupportedModelError(
            "config.json does not specify whether the residual stream is normalised; add "
            '"norm_before_residual": true or false'
        )
    hf = whole_config({"model_type": "llama", **layer}, ("llama", "qwen3"))
    if hf["num_hidden_layers"] != 1:
        raise UnsupportedModelError(
            f"num_hidden_layers is {hf['num_hidden_layers']}, expected 1: an EAGLE-3 drafter with "
            "more layers is not supported"
        )
    section = described.get(SECTION) or {}
    layers = target_depth(int(section.get("target_layers", 0)), target_layers)
    sliding = hf.get("use_sliding_window", False) and hf.get("sliding_window")
    return Eagle3Config.from_hf(
        hf,
        taps=_read_taps(described, speculators, layers),
        target_layers=layers,
        target_hidden=int(described.get("target_hidden_size") or 0),
        window=int(section.get("window", sliding or 0)),
        qk_norm=hf["model_type"] == "qwen3",
        draft_vocab_size=reduced_vocabulary(described, hf),
        **{name: bool(described.get(name) or False) for name in _NORMS},
    )


def _read_taps(described: Json, speculators: bool, layers: int) -> tuple[int, ...]:
    own: Json = described if speculators else described.get("eagle_config") or {}
    numbers = own.get("eagle_aux_hidden_state_layer_ids")
    if numbers:
        return tuple(int(number) - speculators for number in numbers)
    if not layers:
        raise UnsupportedModelError(
            "config.json does not specify which target layers are read, and the usual ones depend "
            "on the target: give it as the option target=PATH"
        )
    return _usual_taps(layers)


def read_eagle3(folder: str | Path, target_layers: int = 0) -> tuple[Eagle3Config, torch.dtype]:
    """See :func:`read_shape`; ``target_layers`` is the depth of its target, 0: not known."""
    config, dtype = read_shape(folder, METHOD, lambda found: eagle3_config(found, target_layers))
    if config.target_hidden == config.hidden:
        config = replace(config, target_hidden=0)
    return config, dtype


def save_eagle3(
    folder: str | Path,
    config: Eagle3Config,
    weights: Mapping[str, Tensor],
    target: TargetRef,
    *,
    levels: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write a drafter's folder in the layout of speculators.

    ``weights`` are its tensors by name, ``levels`` is the depth that it was trained to draft to.
    ``notes`` say how it was trained.
    """
    layer = {
        **config.to_hf(),
        "model_type": "qwen3" if config.qk_norm else "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "sliding_window": config.window or None,
        "use_sliding_window": bool(config.window),
    }
    described = {
        **speculators_fields("Eagle3DraftModel", METHOD, "greedy", levels, target),
        "transformer_layer_config": layer,
        "draft_vocab_size": config.drafted,
        "target_hidden_size": config.target_hidden or None,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        **{name: getattr(config, name) for name in _NORMS},
    }
    section = {name: getattr(config, name) for name in ("target_layers", "window")}
    write_checkpoint(
        folder, METHOD, described, weights, target, dtype=dtype, section=section, notes=notes
    )
