"""The optimizer: Muon for the matrices of the layers, AdamW for all else."""

from typing import Any

from torch import nn, optim

# Embedding tables: most rows get no gradient in a batch, so Muon does not apply.
_TABLES = ("embed", "markov_w")


class Optimizer:
    """Two optimizers that step as one, with learning rates scaled by a common factor."""

    def __init__(self, model: nn.Module, muon_rate: float | None, adamw_rate: float) -> None:
        """Split `model`'s parameters: matrices that are no embedding tables go to Muon.

        `model` must be on its device. With a `muon_rate` of None all parameters go to AdamW.
        """
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        by_muon = {n for n, p in trained if muon_rate and _is_matrix(n, p)}
        self._parts: list[optim.Optimizer] = []
        self._rates: list[float] = []
        if muon_rate and by_muon:
            matrices = [p for n, p in trained if n in by_muon]
            self._parts.append(
                optim.Muon(
                    matrices,
                    lr=muon_rate,
                    momentum=0.95,
                    weight_decay=0.01,
                    adjust_lr_fn="original",
                )
            )
            self._rates.append(muon_rate)
        rest = [p for n, p in trained if n not in by_muon]
        fused = all(p.is_cuda for p in rest)
        self._parts.append(
            optim.AdamW(rest, lr=adamw_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        )
        self._rates.append(adamw_rate)
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


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    if parameter.ndim != 2 or min(parameter.shape) == 1:
        return False
    return not any(table in name for table in _TABLES)
