"""The training loop, the same for every model: batches in, a loss out, checkpoints between."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from paceline.train.bar import Bar
from paceline.train.batches import Batches
from paceline.train.checkpoint import Progress, load_run, save_run
from paceline.train.interrupt import Interrupts
from paceline.train.optim import Optimizer
from paceline.train.preset import Preset
from paceline.train.schedule import Clock, Schedule

Loss = Callable[[nn.Module, Tensor], Tensor]
"""(model, places in the stream: int64 [rows, length + 1]) -> scalar loss in nats per token."""


@dataclass(frozen=True)
class Run:
    """Where and how long to train.

    `work` holds the checkpoints, written every `every` seconds; `minutes` counts stepping only,
    so a paused run loses nothing. `device` is "cpu" or a CUDA device; with `bf16` the forward
    pass runs in bf16 autocast there.
    """

    work: Path
    minutes: float
    steps: int
    device: str = "cpu"
    every: float = 240.0
    bf16: bool = True
    compile: bool = False
    log_steps: int = 20


def train(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    preset: Preset,
    run: Run,
    heldout: Callable[[nn.Module], float] | None = None,
) -> Progress:
    """Train `model` in place until the run's minutes or steps are used up.

    Where `run.work` holds a checkpoint it goes on from there; a finished run returns at once.
    `heldout` measures the held-out loss in nats per token before each checkpoint. On SIGTERM or
    Ctrl-C a checkpoint is written and KeyboardInterrupt raised.
    """
    model.to(run.device)
    optimizer = Optimizer(model, preset)
    progress = load_run(run.work, model, optimizer, batches) or Progress()
    schedule = Schedule(preset, run.minutes, run.steps)
    clock = Clock(progress.elapsed)
    forward = cast(nn.Module, torch.compile(model, dynamic=False)) if run.compile else model
    kind = torch.device(run.device).type
    saved = time.monotonic()
    losses: list[float] = []

    def save() -> None:
        if heldout is not None:
            progress.note(heldout=heldout(model))
        save_run(run.work, model, optimizer, batches, progress)

    with Interrupts() as interrupts, Bar("training", run.minutes) as bar:
        while (done := schedule.progress(progress.step, progress.elapsed)) < 1:
            started = time.monotonic()
            places = batches.next(*schedule.shape(done), schedule.documents(done))
            model.train()
            with torch.autocast(kind, torch.bfloat16, enabled=run.bf16):
                value = loss(forward, places)
            value.backward()
            optimizer.step(schedule.rate(progress.step, done))
            losses.append(value.item())  # waits for the device: the time below is true
            clock.add(time.monotonic() - started)
            progress.step += 1
            progress.tokens += places.shape[0] * (places.shape[1] - 1)
            progress.elapsed = clock.elapsed
            if progress.step % run.log_steps == 0:
                progress.note(loss=sum(losses) / len(losses))
                losses.clear()
                bar.show(progress, done)
            if interrupts.seen:
                save_run(run.work, model, optimizer, batches, progress)
                raise KeyboardInterrupt(f"stopped at step {progress.step}, checkpoint written")
            if time.monotonic() - saved > run.every:
                save()
                saved = time.monotonic()
        if losses:
            save()
    return progress
