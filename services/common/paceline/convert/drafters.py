"""Published drafters of a target, by the fields and tensor names of this project.

Projects differ in how they count target layers, in which token each position of a block predicts,
and in what layers attend to. A wrong assumption costs most of the accepted length and raises no
error, so none of these fields has a default: a config.json without them is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.convert.folder_files import check_fields, one_line, read_object
from paceline.convert.model_source import remembered_by_transformers
from paceline.convert.weights import Checkpoint
from paceline.decoder.config import UnsupportedModelError
from paceline.formats import SECTION

# Names of the tensor with the target's token id of each drafted token, int64 `[R]`, and of the one
# that tells which tokens are drafted, bool `[V]`. Published `d2t` hold the difference of both ids.
DRAFT_TOKENS, DRAFTED = "d2t", "t2d"

HF_FIELDS = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "q_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position": "max_position_embeddings",
}  # sizes of layers, and their names in a transformers configuration

_RENAMED = {
    "candidate_selector.predecessor_codebook": "markov_head.markov_w1.weight",
    "candidate_selector.successor_codebook": "markov_head.markov_w2.weight",
    "candidate_selector.hidden_projection.weight": "markov_head.gate_proj.weight",
}  # the sequential head of DFlash 2

# Method and project by a config.json's speculators_model_type, and by its only architecture.
_SPECULATORS = {name: (name.replace("dflash", "dspark"), "speculators") for name in (
    "dspark", "dflash", "eagle3")}  # fmt: skip
_ARCHITECTURES = {
    "Qwen3DSparkModel": ("dspark", "deepspec"),
    "DFlashDraftModel": ("dspark", "dflash"),  # SpecForge's too
    "DFlash2DraftModel": ("dspark", "dflash"),
    "DSparkDraftModel": ("dspark", "dflash"),
}
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # of EAGLE-3
_SLIDING = "sliding_attention"
Json = Mapping[str, Any]  # a config.json, or a part of it


class DrafterTensors(Checkpoint):
    """Tensors of a drafter's folder by the names of this project.

    Published folders may have a prefix ``model.``, and call an only layer ``midlayer``.
    """

    def __init__(
        self, folder: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(folder, dtype, device)
        self._names = {_own_name(name): file for name, file in self._names.items()}
        self._differences = SECTION not in read_object(Path(folder) / "config.json")

    def draft_tokens(self) -> Tensor:
        """Return the target's id of each drafted token; empty if the folder has none."""
        if DRAFT_TOKENS not in self:
            return torch.empty(0)
        ids = self.stored(DRAFT_TOKENS)
        return ids + torch.arange(len(ids)) if self._differences and ids.ndim == 1 else ids


def _own_name(name: str) -> str:
    short = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
    return _RENAMED.get(short, short)


def read_described(folder: Path) -> dict[str, Any]:
    """Return the config.json of a drafter's folder. Raises ``FileNotFoundError`` if there is none,
    and ``UnsupportedModelError`` if it is no JSON, or a number in it is out of range."""
    path = folder / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{folder} has no config.json")
    described = read_object(path)
    check_fields(path, described)
    if not isinstance(described.get(SECTION, {}), dict):
        raise UnsupportedModelError(f"the {SECTION!r} section of {path} is no object")
    return described


def published(described: Json) -> tuple[str, str] | None:
    """Return method and project of a published config.json; None if of no known drafter."""
    named = described.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    kind = described.get("speculators_model_type")
    if kind is not None:
        return _SPECULATORS.get(str(kind))
    if len(names) == 1 and names[0] in _ARCHITECTURES:
        return _ARCHITECTURES[names[0]]
    plain = names == ["LlamaForCausalLM"] and "draft_vocab_size" in described  # EAGLE's own
    return ("eagle3", "EAGLE") if plain or "eagle3" in " ".join(names).lower() else None


def published_shape(described: Json, method: str, target_layers: int = 0) -> dict[str, Any]:
    """Return the fields of a published drafter's shape, by all of its config.json.

    Raises ``UnsupportedModelError`` if it is of another method, needs an unsupported feature, lacks
    a field, or is for a target of another depth than ``target_layers``; 0: not known.
    """
    known = published(described)
    if known is None or known[0] != method:
        raise UnsupportedModelError(
            f"this config.json is of no {method} drafter: expected a {SECTION!r} section, a known "
            "speculators_model_type or a known architecture; found "
            f"{described.get('speculators_model_type')!r} and {described.get('architectures')!r}"
        )
    project = known[1]
    with config_errors(method):
        layer = described["transformer_layer_config"] if project == "speculators" else described
        if method == "eagle3":
            return _read_eagle3(described, layer, project, target_layers)
        return _read_dspark(described, layer, project, target_layers)


def _read_eagle3(described: Json, layer: Json, project: str, layers: int) -> dict[str, Any]:
    speculators = project == "speculators"
    if speculators and "norm_before_residual" not in described:
        raise UnsupportedModelError(
            "config.json does not specify whether the residual stream is normalised; add "
            '"norm_before_residual": true or false'
        )
    hf = _whole_config({"model_type": "llama", **layer}, ("llama", "qwen3"))
    if hf["num_hidden_layers"] != 1:
        raise UnsupportedModelError(
            f"num_hidden_layers is {hf['num_hidden_layers']}, expected 1: an EAGLE-3 drafter with "
            "more layers is not supported"
        )
    width = int(described.get("target_hidden_size") or 0)
    return _layer_fields(described, hf) | {
        "taps": _read_taps(described, speculators, layers),
        "target_layers": layers,
        "target_hidden": width if width != hf["hidden_size"] else 0,
        "window": (hf.get("use_sliding_window", False) and hf.get("sliding_window")) or 0,
        "qk_norm": hf["model_type"] == "qwen3",
        **{name: bool(described.get(name) or False) for name in _NORMS},
    }


def _read_taps(described: Json, speculators: bool, layers: int) -> tuple[int, ...]:
    """Return the tapped layers: EAGLE and SpecForge name outputs (0: the first layer's),
    speculators names inputs (1 is the same)."""
    eagle: Json = described if speculators else described.get("eagle_config") or {}
    if numbers := eagle.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(int(number) - speculators for number in numbers)
    if not layers:
        raise UnsupportedModelError(
            "config.json does not specify which target layers are read, and the usual ones depend "
            "on the target: give it as the option target=PATH"
        )
    return usual_taps(layers)


def usual_taps(layers: int) -> tuple[int, ...]:
    """Return the layers that EAGLE-3 reads by default: inputs of layers 2, n / 2 and n - 3 of n."""
    return 1, layers // 2 - 1, layers - 4


def _read_dspark(described: Json, layer: Json, project: str, layers: int) -> dict[str, Any]:
    fields: Json = described
    if project == "speculators":
        _check_speculators(described, layer)
        # Numbers refer to the inputs of layers: one more than the layer with that output.
        taps = [int(number) - 1 for number in described["aux_hidden_state_layer_ids"]]
        made_for, heads = layers, described["speculators_model_type"] == "dspark"
        shape: dict[str, Any] = {"from_anchor": bool(described["sample_from_anchor"])}
    else:
        if project == "dflash":
            fields = {**described, **described["dflash_config"]}
        taps = [int(number) for number in fields["target_layer_ids"]]
        made_for, heads = int(fields["num_target_layers"]), project == "deepspec"
        shape = {"from_anchor": heads}
        if project == "dflash":
            shape |= _read_dflash(fields)
            heads = shape["from_anchor"]
    if heads:
        shape |= _read_heads(fields)
    hf = _whole_config(layer, ("qwen3",))
    kinds = hf.get("layer_types") or ()
    if _SLIDING in kinds:
        slides = [kind == _SLIDING for kind in kinds]
        shape |= _sliding(fields, project, slides, hf["sliding_window"])
    elif fields.get("is_causal"):
        shape["causal"] = (True,) * int(hf["num_hidden_layers"])
    if min(taps, default=0) < 0:
        raise UnsupportedModelError(
            "this drafter reads the target's embeddings beside its layers, which is not supported"
        )
    if taps and taps[-1] == made_for - 1:
        # One project reads the last layer's output before the final norm, another after it.
        raise UnsupportedModelError(
            "this drafter reads the target's last layer, and config.json does not specify "
            "whether before or after the final norm; use one that reads earlier layers"
        )
    common = _layer_fields(fields, hf)
    if shape.get("markov_rank"):
        shape["markov_all"] = bool(common["draft_vocab_size"])
    return common | shape | {
        "layers": hf["num_hidden_layers"],
        "taps": tuple(taps),
        "target_layers": made_for,
        "block": int(fields["block_size"]),
        "mask_token": int(fields["mask_token_id"]),
    }  # fmt: skip


def _check_speculators(described: Json, layer: Json) -> None:
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


def _read_dflash(fields: Json) -> dict[str, Any]:
    """Return what only the layout of DFlash and SpecForge has."""
    kind = fields.get("projector_type", "dflash")
    if kind not in ("dflash", "dspark") or fields.get("attention_mode", "gqa") != "gqa":
        raise UnsupportedModelError(
            f"projector type {kind!r}, attention mode {fields.get('attention_mode')!r} are not "
            "supported, expected 'dflash' or 'dspark', 'gqa'"
        )
    shape = {
        "from_anchor": kind == "dspark",
        "embedding_factor": float(fields.get("input_embedding_scale") or 1),
        "logit_factor": float(fields.get("output_multiplier") or 1),
        "logit_cap": float(fields.get("final_logit_softcapping") or 0),
    }
    if fields["architectures"] == ["DFlash2DraftModel"]:
        shape |= {
            "markov_rank": int(fields["selector_rank"]),
            "markov_head": "product",
            "markov_best": int(fields["selector_top_k"]),
            "conv": (int(fields["conv_kernel_size"]), int(fields["conv_group_size"])),
        }
    return shape


def _read_heads(fields: Json) -> dict[str, Any]:
    rank, confidence = int(fields["markov_rank"]), bool(fields["enable_confidence_head"])
    return {
        "markov_rank": rank,
        "markov_head": str(fields["markov_head_type"]) if rank else "vanilla",
        "confidence": confidence,
        "confidence_markov": confidence and bool(fields["confidence_head_with_markov"]),
    }


def _sliding(described: Json, project: str, slides: list[bool], window: int) -> dict[str, Any]:
    """Return the windows of layers, and which are causal.

    In DFlash a position attends to the ``window`` positions up to its own, in speculators to the
    ``window`` before the anchor.
    """
    causal = slides
    if project == "dflash":
        window -= 1
        if described.get("is_causal") is not None:
            causal = [bool(described["is_causal"])] * len(slides)
    elif "sliding_window_non_causal" in described and project == "speculators":
        causal = [slide and not described["sliding_window_non_causal"] for slide in slides]
    else:
        raise UnsupportedModelError(
            "layers with sliding attention are supported only where config.json has "
            "sliding_window_non_causal (speculators) or a dflash_config: engines differ in the "
            "positions of context and block that they attend to"
        )
    return {
        "window": window if all(slides) else 0,
        "windows": () if all(slides) else tuple(window if slide else 0 for slide in slides),
        "causal": tuple(causal) if any(causal) else (),
    }


def _layer_fields(described: Json, hf: Json) -> dict[str, Any]:
    drafted = int(described.get("draft_vocab_size") or hf["vocab_size"])
    return {name: hf[key] for name, key in HF_FIELDS.items()} | {
        "norm_eps": float(hf["rms_norm_eps"]),
        "rope_parameters": dict(hf["rope_parameters"]),
        "draft_vocab_size": drafted if drafted != hf["vocab_size"] else 0,
    }


def _whole_config(layer: Json, kinds: Sequence[str]) -> Json:
    """Return a transformers configuration of layers with all its fields.

    ``layer`` is as it is in a file, ``kinds`` are supported model types, of ``llama`` and
    ``qwen3``. Raises ``UnsupportedModelError`` if it is of another type, or of one with biases or
    another activation.
    """
    kind = str(layer.get("model_type"))

    hf: Json = {"hidden_act": layer.get("hidden_act"), "attention_bias": False}
    if kind in kinds:
        facts = (kind, json.dumps(layer, sort_keys=True))
        hf = remembered_by_transformers(facts, partial(_complete, kind, dict(layer)))
    biases = hf["attention_bias"] or hf.get("mlp_bias", False)
    if kind not in kinds or hf["hidden_act"] != "silu" or biases:
        raise UnsupportedModelError(
            f"layers of model type {kind!r}, activation {hf['hidden_act']!r}, attention_bias or "
            f"mlp_bias {biases} are not supported, expected {' or '.join(kinds)}, silu, False"
        )
    return hf


def _complete(kind: str, layer: dict[str, Any]) -> dict[str, Any]:
    from transformers import LlamaConfig, Qwen3Config

    made = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind]
    try:
        filled: dict[str, Any] = made(**layer).to_dict()
    except Exception as error:  # its strict classes raise errors that are no ValueError
        raise UnsupportedModelError(f"its config.json is invalid: {one_line(error)}") from error
    return filled


@contextmanager
def config_errors(drafter: str) -> Iterator[None]:
    """Raises ``UnsupportedModelError`` for fields of a config.json that are missing or invalid."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except (LookupError, AttributeError, TypeError, ValueError, ArithmeticError) as error:
        raise UnsupportedModelError(
            f"a field of a {drafter} drafter is missing or invalid in config.json: {error!r}"
        ) from error
