"""A drafter's shape in the config.json of two other projects, DeepSpec and speculators.

Tensor names are the same in both. They differ in how layers are counted and in which token each
position of a block predicts. A wrong assumption costs most of the accepted length and raises no
error, so none of these fields has a default: a config.json without them is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from paceline.decoder import UnsupportedModelError
from paceline.drafter.methods.dspark.config import DSparkConfig
from paceline.drafter.methods.layers import config_errors
from paceline.drafter.methods.target import SECTION, TargetRef, speculators_fields

Json = Mapping[str, Any]
"""A config.json, or a part of it."""


class Layout(Enum):
    """Project whose config.json a folder has."""

    DEEPSPEC = "deepspec"
    SPECULATORS = "speculators"


_DEEPSPEC_MODEL = "Qwen3DSparkModel"
_FULL, _SLIDING = "full_attention", "sliding_attention"


def layout_of(described: Json) -> Layout:
    """Returns the project whose config.json it is.

    Raises:
        UnsupportedModelError: Neither's.
    """
    if described.get("speculators_model_type") in ("dspark", "dflash"):
        return Layout.SPECULATORS
    if list(described.get("architectures") or ()) == [_DEEPSPEC_MODEL]:
        return Layout.DEEPSPEC
    raise UnsupportedModelError(
        "this config.json is of an unknown drafter: expected speculators_model_type 'dspark' or "
        f"'dflash', or the architecture {_DEEPSPEC_MODEL}; found "
        f"{described.get('speculators_model_type')!r} and {described.get('architectures')!r}"
    )


def read_config(described: Json, target_layers: int = 0) -> DSparkConfig:
    """Reads the shape of a drafter from a config.json of either layout.

    Args:
        described: All of config.json.
        target_layers: Number of layers of the target, if known: speculators has no field for it.

    Raises:
        UnsupportedModelError: It needs an unsupported feature, lacks a field, or is for a target of
            another depth.
    """
    layout = layout_of(described)
    with config_errors(layout.value):
        config = (_read_deepspec if layout is Layout.DEEPSPEC else _read_speculators)(described)
    if target_layers and config.target_layers not in (0, target_layers):
        raise UnsupportedModelError(
            f"this drafter is for a target of {config.target_layers} layers, this one has "
            f"{target_layers}"
        )
    config = replace(config, target_layers=config.target_layers or target_layers)
    if SECTION not in described and config.taps[-1] == config.target_layers - 1:
        # One project reads the last layer's output before the final norm, another after it.
        raise UnsupportedModelError(
            "this drafter reads the target's last layer, and config.json does not specify "
            "whether before or after the final norm; use one that reads earlier layers"
        )
    return config


def write_config(config: DSparkConfig, layout: Layout, target: TargetRef) -> dict[str, Any]:
    """Inverse of :func:`read_config`, without the ``paceline`` section.

    Raises:
        UnsupportedModelError: The layout has no field for a part of ``config``.
    """
    heads = {
        "block_size": config.block,
        "mask_token_id": config.mask_token,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_markov,
    }
    if layout is Layout.SPECULATORS:
        return _speculators(config, target) | heads
    if not config.from_anchor or config.window or config.draft_vocab_size or config.state_input:
        raise UnsupportedModelError(
            "DeepSpec supports only blocks from the anchor on that attend to the whole context, "
            "draft the whole vocabulary and add no states to embeddings; export to speculators"
        )
    return {
        **_backbone(config),
        **heads,
        "architectures": [_DEEPSPEC_MODEL],
        "num_target_layers": config.target_layers,
        "target_layer_ids": list(config.taps),
        "num_anchors": 512,  # of its training; its loader requires the field
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
    drafted = described.get("draft_vocab_size") or layer["vocab_size"]
    reduced = int(drafted) if drafted != layer["vocab_size"] else 0
    if reduced and SECTION not in described:  # its d2t has differences of ids
        raise UnsupportedModelError(
            f"a vocabulary reduced to {reduced} of {layer['vocab_size']} tokens is supported only "
            "in folders of this project; use a drafter with the target's whole vocabulary"
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
        draft_vocab_size=reduced,
        **(_read_heads(described) if described["speculators_model_type"] == "dspark" else {}),
    )


def _build(described: Json, layer: Json, *, taps: list[int], **rest: Any) -> DSparkConfig:
    from transformers import Qwen3Config

    hf: Any = Qwen3Config(**dict(layer))
    if layer.get("model_type") != "qwen3" or hf.hidden_act != "silu" or hf.attention_bias:
        raise UnsupportedModelError(
            f"a backbone of model type {layer.get('model_type')!r}, activation {hf.hidden_act!r}, "
            f"attention_bias {hf.attention_bias} is not supported, expected qwen3, silu, False"
        )
    if _SLIDING in (hf.layer_types or ()) and not rest.get("window"):
        raise UnsupportedModelError(
            "layers with sliding attention are not supported: engines differ in the positions of "
            "context and block that they attend to"
        )
    if min(taps, default=0) < 0:
        raise UnsupportedModelError(
            "this drafter reads the target's embeddings beside its layers, which is not supported"
        )
    return DSparkConfig.from_hf(
        hf.to_dict(),
        taps=tuple(taps),
        block=int(described["block_size"]),
        mask_token=int(described["mask_token_id"]),
        **rest,
    )


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


def _speculators(config: DSparkConfig, target: TargetRef) -> dict[str, Any]:
    # dflash has no heads there; dspark may have none.
    kind = "dspark" if config.markov_rank or config.confidence else "dflash"
    architecture = "DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"
    return {
        **speculators_fields(architecture, kind, "greedy", config.levels, target),
        "transformer_layer_config": _backbone(config),
        "draft_vocab_size": config.drafted,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.taps],
        "sample_from_anchor": config.from_anchor,
    }
