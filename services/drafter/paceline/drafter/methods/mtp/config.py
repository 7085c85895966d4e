"""The shape of heads for multi-token prediction, and folders of trained ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from paceline.convert import open_model
from paceline.convert.drafters import DRAFT_TOKENS, HF_FIELDS
from paceline.convert.folder_files import read_object
from paceline.convert.mtp import DEEPSEEK, FINAL_NORM, MtpHeads
from paceline.decoder import DecoderConfig
from paceline.drafter.methods.base import SECTION
from paceline.drafter.methods.checkpoint import CONFIG_FILE, TargetRef, save_drafter
from paceline.drafter.methods.layers import TappedShape, drafted_tokens


@dataclass(frozen=True)
class MtpConfig(TappedShape):
    """Shape of heads, which read outputs of the target's last layer. Raises
    ``UnsupportedModelError`` if a field is out of range."""

    method: ClassVar[str] = "mtp"
    # Whether heads of queries and keys are normalised, where there is no `block`.
    qk_norm: bool = False
    # Number of heads. Level n of a tree is drafted by the nth, deeper ones by the last.
    heads: int = field(default=1, kw_only=True)
    # Their layer, as one of a model; None: in training, a layer of `llama` or `qwen3`.
    block: DecoderConfig | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, heads: MtpHeads) -> Self:
        """Return the shape of the heads in a folder."""
        block = heads.block
        return cls(
            **{name: getattr(block, name) for name in (*HF_FIELDS, "norm_eps")},
            rope_parameters={}, taps=(block.layers - 1,), target_layers=block.layers,
            window=heads.window, draft_vocab_size=heads.drafted, heads=heads.count, block=block,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        fields = super().to_json()
        del fields["block"]
        return fields

    @property
    def of_target(self) -> dict[str, int]:
        return {**super().of_target, "layers": self.target_layers}

    @property
    def states(self) -> int:
        return self.hidden

    @property
    def rope_inv_freq(self) -> tuple[float, ...]:
        return super().rope_inv_freq if self.block is None else self.block.rope_inv_freq

    @property
    def rope_scaling(self) -> float:
        return super().rope_scaling if self.block is None else self.block.rope_scaling

    @classmethod
    def for_target(cls, path: str | Path, **fields: Any) -> Self:
        """See :meth:`LayerShape.for_target`. All dimensions of a head are rotated."""
        shape = super().for_target(path, taps=(-1,), **fields)
        rope = {
            name: value
            for name, value in shape.rope_parameters.items()
            if name != "partial_rotary_factor"
        }
        return replace(shape, rope_parameters=rope)


def save_mtp(
    folder: str | Path,
    config: MtpConfig,
    weights: Mapping[str, Tensor],
    target: TargetRef,
    final_norm: Tensor,
    *,
    levels: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write a head's folder in the layout of DeepSeek-V3, beside a target without heads, with the
    factors of the target's final norm, ``[hidden]``; see :func:`save_drafter`."""
    described = {
        **{key: getattr(config, name) for name, key in HF_FIELDS.items()},
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": dict(config.rope_parameters),
        "architectures": ["MtpDraftModel"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "num_hidden_layers": config.target_layers,
        "num_nextn_predict_layers": config.heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "draft_vocab_size": config.drafted,
    }
    named = {name if name == DRAFT_TOKENS else f"model.{name}": t for name, t in weights.items()}
    save_drafter(
        folder, config, {**named, FINAL_NORM: final_norm}, target, levels=levels, dtype=dtype,
        notes=notes, further=described,
    )  # fmt: skip


def load_mtp(folder: Path) -> tuple[MtpConfig, dict[str, Tensor]]:
    """Read the shape and the float32 weights of a folder that :func:`save_mtp` wrote, to train its
    head further."""
    source, described = open_model(folder), read_object(folder / CONFIG_FILE)
    config = MtpConfig.from_json(described[SECTION]["shape"])
    tensors = source.tensors(torch.float32, "cpu")
    weights = {
        name.removeprefix("model."): source.tensor(name, torch.float32, "cpu")
        for name in tensors
        if DEEPSEEK.head_of(name, config.target_layers) is not None
    }
    drafted = drafted_tokens(folder, config)
    return config, weights if drafted is None else {**weights, DRAFT_TOKENS: drafted}
