"""The training loop, the same for every model: batches in, a loss out, checkpoints between."""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from paceline.train.bar import Bar
from paceline.train.batches import Batches
from paceline.train.checkpoint import Progress, load_run, save_run
from paceline.train.interrupt import Interrupts
from paceline.train.optim import Optimizer
from paceline.train.schedule import Clock

Loss = Callable[[nn.Module, Tensor, float], Tensor]
"""(model, places in the stream: int64 [rows, length + 1], share of the run done, 0 to 1) -> scalar
loss in nats per token."""


class Plan(Protocol):
    """What a run does when: see :class:`~paceline.train.schedule.Schedule`."""

    def progress(self, step: int, elapsed: float) -> float:
        """Share of the run done, 0 to 1, after `step` steps and `elapsed` seconds of stepping."""
        ...

    def rate(self, step: int, progress: float) -> float:
        """Factor on the learning rates."""
        ...

    def documents(self, progress: float) -> int | None:
        """How many documents the next batch is drawn from; None: all."""
        ...

    def shape(self, progress: float) -> tuple[int, int]:
        """(rows, length in tokens) of the next batch."""
        ...


@dataclass(frozen=True)
class Run:
    """Where and how long to train.

    `work` holds the checkpoints, written every `every` seconds; `minutes` counts stepping only,
    so a paused run loses nothing. `device` is "cpu" or a CUDA device; with `bf16` the forward
    pass runs in bf16 autocast there. A batch goes through the model in `accumulate` parts, where
    memory is short. `force` lets it replace a model that stands where its own is to be written.
    """

    work: Path
    minutes: float
    steps: int
    device: str = "cpu"
    every: float = 240.0
    bf16: bool = True
    compile: bool = False
    log_steps: int = 20
    accumulate: int = 1
    force: bool = False


def train(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    optimizer: Optimizer,
    plan: Plan,
    run: Run,
    heldout: Callable[[nn.Module], Mapping[str, float]] | None = None,
) -> Progress:
    """Train `model` in place until the run's minutes or steps are used up.

    Where `run.work` holds a checkpoint it goes on from there; a finished run returns at once.
    `heldout` measures what goes into the log before each checkpoint, a figure named `heldout` among
    it. On SIGTERM or Ctrl-C a checkpoint is written and KeyboardInterrupt raised.

    Started by `accelerate launch` or `torchrun`, the processes share every batch: each takes its
    part of the rows, and of the `run.accumulate` parts that a batch is cut into. The first process
    keeps the time, writes the checkpoints and measures; the others follow it.
    """
    progress = load_run(run.work, model, optimizer, batches) or Progress()
    clock = Clock(progress.elapsed)
    forward = cast(nn.Module, torch.compile(model, dynamic=False)) if run.compile else model
    accelerator = Accelerator(cpu=torch.device(run.device).type == "cpu")
    forward = accelerator.prepare_model(forward, device_placement=False)
    first = accelerator.is_main_process
    saved = time.monotonic()
    begun, losses = progress.step, list[float]()

    def save() -> None:
        if heldout is not None:
            progress.note(**heldout(model))
        save_run(run.work, model, optimizer, batches, progress)

    def agreed(done: float, stop: bool) -> tuple[float, bool]:
        """What the first process says: clocks and signals differ between processes."""
        said = [done, stop]
        broadcast_object_list(said)
        return said[0], bool(said[1])

    with Interrupts() as interrupts, Bar("training", run.minutes, quiet=not first) as bar:
        while True:
            share = plan.progress(progress.step, progress.elapsed)
            done, stop = agreed(share, interrupts.seen)
            if stop:
                if first:
                    save_run(run.work, model, optimizer, batches, progress)
                raise KeyboardInterrupt(f"stopped at step {progress.step}, checkpoint written")
            if done >= 1:
                break
            started = time.monotonic()
            places = batches.next(*plan.shape(done), plan.documents(done))
            losses.append(_step(forward, loss, _own(places, accelerator), done, run, accelerator))
            optimizer.step(plan.rate(progress.step, done))
            clock.add(time.monotonic() - started)
            progress.step += 1
            progress.tokens += places.shape[0] * (places.shape[1] - 1)
            progress.elapsed = clock.elapsed
            if progress.step % run.log_steps == 0:
                progress.note(loss=sum(losses) / len(losses))
                losses.clear()
                bar.show(progress, done)
            if first and time.monotonic() - saved > run.every:
                save()
                saved = time.monotonic()
        if first and progress.step > begun:
            save()
    return progress


def _own(places: Tensor, accelerator: Accelerator) -> Tensor:
    """This process's rows of a batch; all processes must have as many."""
    count = accelerator.num_processes
    if len(places) % count:
        raise ValueError(
            f"a batch of {len(places)} rows cannot be shared by {count} processes alike: start as "
            "many as divide the rows of every stage"
        )
    return places[accelerator.process_index :: count]


def _step(
    forward: nn.Module, loss: Loss, places: Tensor, done: float, run: Run, accelerator: Accelerator
) -> float:
    """Gradients of one batch, in parts of equal rows; returns its loss in nats."""
    kind = torch.device(run.device).type
    forward.train()
    parts = places.tensor_split(min(run.accumulate, len(places)))
    total = 0.0
    for number, part in enumerate(parts):
        with (
            accelerator.no_sync(forward) if number + 1 < len(parts) else nullcontext(),
            torch.autocast(kind, torch.bfloat16, enabled=run.bf16),
        ):
            value = loss(forward, part, done) * (len(part) / len(places))
            accelerator.backward(value)
        total += value.item()  # waits for the device: the time of a step is true
    return total
