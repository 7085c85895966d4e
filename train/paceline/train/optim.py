"""The optimizer: Muon for the matrices of the layers, AdamW for embeddings and norms."""

from typing import Any

from torch import nn, optim

from paceline.train.preset import Preset


class Optimizer:
    """Two optimizers that step as one, with learning rates scaled by a common factor."""

    def __init__(self, model: nn.Module, preset: Preset) -> None:
        """Split `model`'s parameters: 2-D ones outside the embedding go to Muon."""
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        matrices = [p for n, p in trained if p.ndim == 2 and "embed" not in n]
        rest = [p for n, p in trained if p.ndim != 2 or "embed" in n]
        fused = all(p.is_cuda for p in rest)
        self._parts: list[optim.Optimizer] = [
            optim.Muon(
                matrices,
                lr=preset.muon_rate,
                momentum=0.95,
                weight_decay=0.01,
                adjust_lr_fn="original",
            ),
            optim.AdamW(
                rest, lr=preset.adamw_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=fused
            ),
        ]
        self._rates = [preset.muon_rate, preset.adamw_rate]
        self._parameters = [p for _, p in trained]

    def step(self, factor: float) -> None:
        """Apply the gradients with every learning rate times `factor`, then drop them."""
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for part, rate in zip(self._parts, self._rates, strict=True):
            for group in part.param_groups:
                group["lr"] = rate * factor
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """The state of both optimizers."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state written by `state_dict`."""
        for part, kept in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(kept)
