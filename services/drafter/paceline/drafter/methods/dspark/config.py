"""A DSpark drafter's shape and folder, in the layout of DeepSpec or of speculators.

Tensor names are the same in both. They differ in how layers are counted and in which token each
position of a block predicts. A wrong assumption costs most of the accepted length and raises no
error, so none of these fields has a default: a config.json without them is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from paceline.decoder import UnsupportedModelError
from paceline.drafter.methods.base import SECTION
from paceline.drafter.methods.checkpoint import (
    TargetRef,
    read_shape,
    speculators_fields,
    write_checkpoint,
)
from paceline.drafter.methods.layers import (
    LayerShape,
    TappedShape,
    config_errors,
    reduced_vocabulary,
    target_depth,
    whole_config,
)

METHOD = "dspark"
TEMPERATURES = "confidence_temperatures"  # key of the ``paceline`` section
# Sequential heads that published checkpoints have: DSpark's, and that of DFlash 2.
MARKOV_HEADS = ("vanilla", "product")

_DEEPSPEC_MODEL = "Qwen3DSparkModel"
_DFLASH_MODELS = ("DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel")

_FULL, _SLIDING = "full_attention", "sliding_attention"

Json = Mapping[str, Any]  # a config.json, or a part of it


@dataclass(frozen=True)
class DSparkConfig(TappedShape):
    """Shape of a DSpark drafter, and the target layers that it reads.

    The backbone's layers are Qwen3's: heads are normalised, and there are no biases.

    The ``window`` of :class:`TappedShape` is a number of positions before the anchor.

    Raises:
        UnsupportedModelError: A field is out of range.
    """

    HF_FIELDS: ClassVar = {**LayerShape.HF_FIELDS, "layers": "num_hidden_layers"}

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
    # attend to the whole block. The window of a causal layer moves with the position, that of
    # others is the anchor's.
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
        found = self.confidence_temperatures
        known = self.confidence and len(found) == self.levels
        if found and not (known and all(0 < each < math.inf for each in found)):
            raise UnsupportedModelError(
                f"{TEMPERATURES} is {list(found)}, expected a number above 0 for each of "
                f"{self.levels} levels, of a drafter with a confidence head"
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


class Layout(Enum):
    """Project whose config.json a folder has."""

    DEEPSPEC = "deepspec"
    SPECULATORS = "speculators"
    DFLASH = "dflash"  # the layout of DFlash and SpecForge, with fields in a ``dflash_config``


def layout_of(described: Json) -> Layout:
    """Return the project whose config.json it is.

    Raises:
        UnsupportedModelError: No known one's.
    """
    if described.get("speculators_model_type") in ("dspark", "dflash"):
        return Layout.SPECULATORS
    names = list(described.get("architectures") or ())
    if names == [_DEEPSPEC_MODEL]:
        return Layout.DEEPSPEC
    if "speculators_model_type" not in described and len(names) == 1 and names[0] in _DFLASH_MODELS:
        return Layout.DFLASH
    raise UnsupportedModelError(
        "this config.json is of an unknown drafter: expected speculators_model_type 'dspark' or "
        f"'dflash', or an architecture of {_DEEPSPEC_MODEL}, {', '.join(_DFLASH_MODELS)}; found "
        f"{described.get('speculators_model_type')!r} and {names}"
    )


def dspark_config(described: Json, target_layers: int = 0) -> DSparkConfig:
    """Read the shape of a drafter from a config.json of either layout.

    Args:
        described: All of config.json.
        target_layers: Number of layers of the target, if known: speculators has no field for it.

    Raises:
        UnsupportedModelError: It needs an unsupported feature, lacks a field, or is for a target of
            another depth.
    """
    layout = layout_of(described)
    with config_errors(layout.value):
        config = _READERS[layout](described)
        own = described.get(SECTION) or {}
        temperatures = tuple(float(each) for each in own.get(TEMPERATURES, ()))
        config = replace(config, confidence_temperatures=temperatures)
    config = replace(config, target_layers=target_depth(config.target_layers, target_layers))
    if SECTION not in described and config.taps[-1] == config.target_layers - 1:
        # One project reads the last layer's output before the final norm, another after it.
        raise UnsupportedModelError(
            "this drafter reads the target's last layer, and config.json does not specify "
            "whether before or after the final norm; use one that reads earlier layers"
        )
    return config


def _write_config(config: DSparkConfig, target: TargetRef) -> dict[str, Any]:
    """Inverse of :func:`dspark_config` in the layout of speculators, without the ``paceline``
    section. Raises ``UnsupportedModelError`` if it has no field for a part of ``config``."""
    published = ("windows", "causal", "markov_all", "markov_best", "conv")
    if any(getattr(config, name) for name in published):
        raise UnsupportedModelError("published drafters with parts of DFlash are read, not written")
    # dflash has no heads there; dspark may have none.
    kind = "dspark" if config.markov_rank or config.confidence else "dflash"
    architecture = "DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"
    return {
        **speculators_fields(architecture, kind, "greedy", config.levels, target),
        "transformer_layer_config": _backbone(config),
        "draft_vocab_size": config.drafted,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.taps],
        "sample_from_anchor": config.from_anchor,
        "block_size": config.block,
        "mask_token_id": config.mask_token,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_markov,
    }


def _read_deepspec(described: Json) -> DSparkConfig:
    return _build(
        described,
        described,
        taps=[int(layer) for layer in described["target_layer_ids"]],
        target_layers=int(described["num_target_layers"]),
        from_anchor=True,
        **_read_heads(described),
    )


def _read_dflash(described: Json) -> DSparkConfig:
    fields: dict[str, Any] = {**described, **described["dflash_config"]}
    second = described["architectures"] == ["DFlash2DraftModel"]
    kind = fields.get("projector_type", "dflash")
    if kind not in ("dflash", "dspark") or fields.get("attention_mode", "gqa") != "gqa":
        raise UnsupportedModelError(
            f"projector type {kind!r}, attention mode {fields.get('attention_mode')!r} are not "
            "supported, expected 'dflash' or 'dspark', 'gqa'"
        )
    heads = _read_heads(fields) if kind == "dspark" else {}
    if second:
        heads = {
            "markov_rank": int(fields["selector_rank"]),
            "markov_head": "product",
            "markov_best": int(fields["selector_top_k"]),
            "conv": (int(fields["conv_kernel_size"]), int(fields["conv_group_size"])),
        }
    return _build(
        fields,
        described,
        taps=[int(layer) for layer in fields["target_layer_ids"]],
        target_layers=int(fields["num_target_layers"]),
        from_anchor=kind == "dspark",
        draft_vocab_size=reduced_vocabulary(fields, fields),
        embedding_factor=float(fields.get("input_embedding_scale") or 1),
        logit_factor=float(fields.get("output_multiplier") or 1),
        logit_cap=float(fields.get("final_logit_softcapping") or 0),
        **heads,
    )


def _read_heads(described: Json) -> dict[str, Any]:
    markov_rank = int(described["markov_rank"])
    confidence = bool(described["enable_confidence_head"])
    return {
        "markov_rank": markov_rank,
        "markov_head": str(described["markov_head_type"]) if markov_rank else "vanilla",
        "confidence": confidence,
        "confidence_markov": confidence and bool(described["confidence_head_with_markov"]),
    }


def _read_speculators(described: Json) -> DSparkConfig:
    layer = described["transformer_layer_config"]
    if "sample_from_anchor" not in described:
        raise UnsupportedModelError(
            "config.json does not specify whether the anchor's position predicts a token; add "
            '"sample_from_anchor": true (usual for DSpark) or false (usual for DFlash)'
        )
    if described.get("projector_type", "dflash") != "dflash":
        raise UnsupportedModelError(
            f"projector type {described['projector_type']!r} is not supported, only 'dflash'"
        )
    if described.get("target_hidden_size") not in (None, layer["hidden_size"]):
        raise UnsupportedModelError(
            f"target_hidden_size is {described['target_hidden_size']} and hidden_size "
            f"{layer['hidden_size']}, expected the same: the target's embedding is shared"
        )
    section = described.get(SECTION) or {}
    return _build(
        described,
        layer,
        # Numbers refer to the inputs of layers: one more than the layer with that output.
        taps=[int(number) - 1 for number in described["aux_hidden_state_layer_ids"]],
        target_layers=int(section.get("target_layers", 0)),
        from_anchor=bool(described["sample_from_anchor"]),
        window=int(section.get("window", 0)),
        state_input=bool(section.get("state_input", False)),
        draft_vocab_size=reduced_vocabulary(described, layer),
        **(_read_heads(described) if described["speculators_model_type"] == "dspark" else {}),
    )


def _build(described: Json, layer: Json, *, taps: list[int], **rest: Any) -> DSparkConfig:
    hf = whole_config(layer, ("qwen3",))
    types = hf.get("layer_types") or ()
    if _SLIDING in types and not rest.get("window"):
        rest |= _sliding(described, [kind == _SLIDING for kind in types], hf["sliding_window"])
    elif described.get("is_causal"):
        rest["causal"] = (True,) * int(hf["num_hidden_layers"])
    if min(taps, default=0) < 0:
        raise UnsupportedModelError(
            "this drafter reads the target's embeddings beside its layers, which is not supported"
        )
    if SECTION not in described and rest.get("markov_rank"):
        rest["markov_all"] = bool(rest.get("draft_vocab_size"))
    return DSparkConfig.from_hf(
        hf,
        taps=tuple(taps),
        block=int(described["block_size"]),
        mask_token=int(described["mask_token_id"]),
        **rest,
    )


def _sliding(described: Json, slides: list[bool], window: int) -> dict[str, Any]:
    """Windows of a published drafter, and which layers are causal.

    In DFlash a position attends to the ``window`` positions up to its own, in speculators to the
    ``window`` before the anchor.
    """
    layout = layout_of(described)
    causal = slides
    if layout is Layout.DFLASH:
        window -= 1
        if described.get("is_causal") is not None:
            causal = [bool(described["is_causal"])] * len(slides)
    elif "sliding_window_non_causal" in described and layout is Layout.SPECULATORS:
        causal = [each and not described["sliding_window_non_causal"] for each in slides]
    else:
        raise UnsupportedModelError(
            "layers with sliding attention are supported only where config.json has "
            "sliding_window_non_causal (speculators) or a dflash_config: engines differ in the "
            "positions of context and block that they attend to"
        )
    windows = tuple(window if each else 0 for each in slides)
    return {
        "window": window if all(slides) else 0,
        "windows": () if all(slides) else windows,
        "causal": tuple(causal) if any(causal) else (),
    }


_READERS = {
    Layout.DEEPSPEC: _read_deepspec,
    Layout.SPECULATORS: _read_speculators,
    Layout.DFLASH: _read_dflash,
}


def _backbone(config: DSparkConfig) -> dict[str, Any]:
    return config.to_hf() | {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": [_SLIDING if config.window else _FULL] * config.layers,
        "sliding_window": config.window or None,
        "use_sliding_window": bool(config.window),
    }


def save_dspark(
    folder: str | Path,
    config: DSparkConfig,
    weights: Mapping[str, Tensor],
    target: TargetRef,
    *,
    dtype: torch.dtype = torch.bfloat16,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write a drafter's folder in the layout of speculators. Its ``paceline`` section holds what
    that project has no fields for.

    Args:
        folder: Created if it does not exist.
        config: Shape of the drafter.
        weights: Its tensors by name.
        target: The target that it was trained for.
        dtype: Type of the tensors in the file.
        notes: Written to the ``paceline`` section as ``training``: how it was trained.

    Raises:
        UnsupportedModelError: The layout cannot express such a drafter.
    """
    described = _write_config(config, target)
    section = {name: getattr(config, name) for name in ("target_layers", "window", "state_input")}
    if config.confidence_temperatures:
        section[TEMPERATURES] = config.confidence_temperatures
    write_checkpoint(
        folder, METHOD, described, weights, target, dtype=dtype, section=section, notes=notes
    )


def read_dspark(folder: str | Path, target_layers: int = 0) -> tuple[DSparkConfig, torch.dtype]:
    """See :func:`read_shape`; ``target_layers`` is the depth of its target, 0: not known."""
    return read_shape(folder, METHOD, lambda found: dspark_config(found, target_layers))
