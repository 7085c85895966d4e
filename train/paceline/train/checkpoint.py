"""Working checkpoints of a run, and the final weights."""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from paceline.decoder import store_int8
from paceline.train.batches import Position, Rows
from paceline.train.identity import cleared
from paceline.train.model import load_model
from paceline.train.optim import Optimizer

_NAME = "run.pt"


@dataclass
class Progress:
    """Counters of a run: steps, tokens seen, seconds of stepping, and a log of its losses."""

    step: int = 0
    tokens: int = 0
    elapsed: float = 0.0
    log: list[dict[str, float]] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Steps, tokens and minutes of this run."""
        return {
            "steps": self.step,
            "tokens": self.tokens,
            "minutes": round(self.elapsed / 60, 1),
        }

    @property
    def description(self) -> str:
        """Steps, tokens and minutes of this run, for a model card."""
        minutes = f"{self.elapsed / 60:.0f} minutes"
        return f"{self.step:,} steps, {self.tokens / 1e6:.1f} M tokens, {minutes}"

    def note(self, **values: float) -> None:
        """Add one row to the log; `values` are losses in nats per token."""
        self.log.append({"step": self.step, "elapsed": self.elapsed, **values})

    def last(self, name: str) -> float | None:
        """The newest value logged as `name`, None if there is none."""
        return next((row[name] for row in reversed(self.log) if name in row), None)


def save_run(
    folder: Path, model: nn.Module, optimizer: Optimizer, batches: Rows, progress: Progress
) -> None:
    """Write everything that a bit-exact resumption needs: weights, optimizer, data position, RNG.

    The file is replaced whole, so a run killed while writing keeps the checkpoint before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "position": asdict(batches.position),
        "progress": asdict(progress),
        "rng": torch.get_rng_state(),
    }
    partial = folder / (_NAME + ".partial")
    torch.save(state, partial)
    os.replace(partial, folder / _NAME)


def load_run(
    folder: Path, model: nn.Module, optimizer: Optimizer, batches: Rows
) -> Progress | None:
    """Restore what `save_run` wrote; None if `folder` holds no run.

    `begin_run` has checked that it is the same run.
    """
    path = folder / _NAME
    if not path.is_file():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    batches.seek(Position(**state["position"]))
    torch.set_rng_state(state["rng"])
    return Progress(**state["progress"])


def save_model(
    folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> LlamaForCausalLM:
    """Write an HF model folder (8-bit blocks, config, tokenizer); `model` becomes bf16.

    Files of an older model in `folder` are removed. Returns the model as read back from there, for
    measurements.
    """
    cleared(folder).mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16)  # type: ignore[arg-type]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    store_int8(folder)
    shipped: LlamaForCausalLM = load_model(folder, torch.bfloat16).to(model.device)
    return shipped
