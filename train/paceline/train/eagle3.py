"""Training of an EAGLE-3 layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.convert import ModelSource
from paceline.drafter.methods.checkpoint import load_weights, read_shape
from paceline.drafter.methods.eagle3 import Eagle3Config
from paceline.train.drafters import DrafterModel, parameters, trained_levels
from paceline.train.modules import Eagle3Model
from paceline.train.recipes.eagle3 import Eagle3Preset
from paceline.train.unrolled import UnrolledTrainer, layer_weights

_EMBEDDING_SCALE = 0.02


@dataclass
class Eagle3DrafterModel(DrafterModel):
    method = "eagle3"
    model: Eagle3Model

    @property
    def config(self) -> Eagle3Config:
        return self.model.config


class Eagle3Trainer(UnrolledTrainer[Eagle3Preset, Eagle3DrafterModel]):
    """Trains an EAGLE-3 layer. Its LM head is the target's, frozen."""

    method = "eagle3"

    def new_drafter(self, end: int) -> Eagle3DrafterModel:
        preset = self.preset
        config = Eagle3Config.for_target(
            self.target, taps=preset.taps, window=preset.window, fc_norm=preset.fc_norm,
            norm_output=preset.norm_output, draft_vocab_size=preset.draft_vocab_size,
        )  # fmt: skip
        return Eagle3DrafterModel(self.target, Eagle3Model(config), preset.levels)

    def read(self, folder: Path, device: str) -> Eagle3DrafterModel:
        config, _ = read_shape(Eagle3Config, folder)
        model = Eagle3Model(config)
        model.load_state_dict(load_weights(folder, config, torch.float32))
        return Eagle3DrafterModel(self.target, model.to(device), trained_levels(folder))

    def initial_weights(
        self, source: ModelSource, drafter: Eagle3DrafterModel
    ) -> dict[str, Tensor]:
        """Return the weights of the target's last layer, by the names of an Eagle3Model.

        Its projections read the hidden state; the embedding's are small. The hidden state is
        what that layer reads in the target, as near as a tap is.
        """
        config = drafter.config
        base, prefix = f"model.layers.{config.target_layers - 1}.", "layers.0."

        def read(name: str) -> Tensor:
            return source.tensor(f"{name}.weight", torch.float32, "cpu")

        weights = layer_weights(source, prefix, config.target_layers, "norm") | {
            f"{prefix}hidden_norm.weight": read(f"{base}input_layernorm"),
            f"{prefix}input_layernorm.weight": read("model.layers.0.input_layernorm"),
        }
        for name in ("q", "k", "v"):
            half = read(f"{base}self_attn.{name}_proj")
            small = torch.randn_like(half) * _EMBEDDING_SCALE
            weights[f"{prefix}self_attn.{name}_proj.weight"] = torch.cat([small, half], dim=1)
        near = config.target_layers - 2
        tap = min(range(len(config.taps)), key=lambda index: abs(config.taps[index] - near))
        mixed = torch.zeros(len(config.taps), config.hidden, config.hidden)
        mixed[tap] = torch.eye(config.hidden)
        weights["fc.weight"] = torch.cat(list(mixed), dim=1)
        return weights

    def shape_section(self, drafter: Eagle3DrafterModel) -> str:
        config = drafter.config
        context = f"the last {config.window} positions" if config.window else "all positions"
        return f"""\
- {parameters(drafter.model)}, in 8-bit blocks: one layer of width {config.hidden},
  {config.q_heads} heads over {config.kv_heads} KV heads of {config.head_dim}, feed-forward
  {config.intermediate}, over {context}
- fuses the outputs of target layers {", ".join(map(str, config.taps))} (0 is the first of
  {config.target_layers}){" after a norm of each" if config.fc_norm else ""}, and reads its own
  output {"after" if config.norm_output else "before"} the final norm
- drafts the {config.drafted:,} most frequent of {config.vocab_size:,} tokens; embedding and LM head
  are the target's and not in this folder"""
