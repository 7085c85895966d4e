"""Training of a head for multi-token prediction beside a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.convert import ModelSource, open_model
from paceline.convert.pack import read_norm
from paceline.drafter.methods.mtp import MtpConfig, save_mtp
from paceline.drafter.methods.mtp.config import load_mtp
from paceline.train.blocks import store_blocks
from paceline.train.drafters import DrafterModel, parameters, trained_levels
from paceline.train.modules import MtpModel
from paceline.train.recipes.mtp import MtpPreset
from paceline.train.unrolled import UnrolledTrainer, layer_weights

_EMBEDDING_SCALE = 0.5
# One over the root mean square of a residual stream before the last layer; of SmolLM2 it is 29.
_LAYER_SCALE = 1 / 32


def _final_norm(source: ModelSource) -> Tensor:
    """Return the factors of a target's final norm, ``[hidden]``."""
    config, tensors = source.config(), source.tensors(torch.float32, "cpu")
    return read_norm(config, tensors, "model.norm", config.hidden)


@dataclass
class MtpDrafterModel(DrafterModel):
    """A head for multi-token prediction."""

    method = "mtp"
    model: MtpModel

    @property
    def config(self) -> MtpConfig:
        return self.model.config

    def save(self, folder: Path, notes: Mapping[str, Any] | None = None) -> None:
        save_mtp(
            folder, self.config, self.model.state_dict(), self.reference,
            _final_norm(open_model(self.target)), levels=self.levels, notes=notes,
        )  # fmt: skip
        store_blocks(folder)


class MtpTrainer(UnrolledTrainer[MtpPreset, MtpDrafterModel]):
    """Trains a head. Its LM head is the target's, frozen."""

    method = "mtp"

    def new_drafter(self, end: int) -> MtpDrafterModel:
        preset = self.preset
        config = MtpConfig.for_target(
            self.target, window=preset.window, draft_vocab_size=preset.draft_vocab_size
        )
        return MtpDrafterModel(self.target, MtpModel(config), preset.levels)

    def read(self, folder: Path, device: str) -> MtpDrafterModel:
        config, weights = load_mtp(folder)
        model = MtpModel(config)
        model.load_state_dict(weights)
        return MtpDrafterModel(self.target, model.to(device), trained_levels(folder))

    def initial_weights(self, source: ModelSource, drafter: MtpDrafterModel) -> dict[str, Tensor]:
        """Return the weights of the target's last layer, by the names of an MtpModel.

        The projection passes the state on without the factors of the target's final norm, and adds
        the embedding. It has a mean square of 1, so what the layer adds is scaled too.
        """
        config = drafter.config
        base, prefix = (f"layers.{config.target_layers - past}." for past in (1, 0))

        def read(name: str) -> Tensor:
            return source.tensor(f"model.{base}{name}.weight", torch.float32, "cpu")

        weights = layer_weights(source, prefix, config.target_layers, f"{prefix}shared_head.norm")
        for name in ("input_layernorm", *(f"self_attn.{part}_proj" for part in "qkv")):
            weights[f"{prefix}{name}.weight"] = read(name)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"{prefix}{name}.weight"] *= _LAYER_SCALE
        factors = _final_norm(source)
        weights[f"{prefix}hnorm.weight"] = factors.mean() / factors.clamp(min=factors.mean() / 8)
        passed = torch.eye(config.hidden)
        weights[f"{prefix}eh_proj.weight"] = torch.cat([passed * _EMBEDDING_SCALE, passed], dim=1)
        return weights

    def shape_section(self, drafter: MtpDrafterModel) -> str:
        config = drafter.config
        context = f"the last {config.window} positions" if config.window else "all positions"
        return f"""\
- {parameters(drafter.model)}, in 8-bit blocks: a projection of embedding and hidden state, and one
  layer of width {config.hidden}, {config.q_heads} heads over {config.kv_heads} KV heads of
  {config.head_dim}, feed-forward {config.intermediate}, over {context}
- reads the target's states behind its final norm, then its own output before the norm, as in
  DeepSeek-V3, whose names its tensors have
- drafts the {config.drafted:,} most frequent of {config.vocab_size:,} tokens; embedding and LM head
  are the target's and not in this folder"""
