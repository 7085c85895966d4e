"""The training loop of every model: batches, steps, checkpoints."""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from paceline.train.batches import Rows
from paceline.train.checkpoint import Progress, load_run, save_run
from paceline.train.interrupt import Interrupts
from paceline.train.optim import Optimizer
from paceline.train.schedule import Clock, Plan

Loss = Callable[[nn.Module, Tensor, float], Tensor]
"""(model, indices into the stream: int64 [rows, length + 1], share of the run done, 0 to 1) ->
scalar loss in nats per token."""


@dataclass(frozen=True)
class Run:
    """Where and how long to train.

    `work` holds the checkpoints, written every `every` seconds; `minutes` counts stepping only,
    not pauses. `device` is "cpu" or a CUDA device; with `bf16` the forward pass runs in bf16
    autocast there. Gradients of a batch are accumulated over `accumulate` parts. `force` lets the
    run replace a model in its output folder.
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
    batches: Rows,
    optimizer: Optimizer,
    plan: Plan,
    run: Run,
    heldout: Callable[[nn.Module], Mapping[str, float]] | None = None,
) -> Progress:
    """Train `model` in place until the run's minutes or steps are used up.

    Resumes from the checkpoint in `run.work`, if there is one; a finished run returns at once.
    `heldout` returns figures that are logged before each checkpoint, one of them named `heldout`.
    On SIGTERM or Ctrl-C a checkpoint is written and KeyboardInterrupt raised.

    Started by `accelerate launch` or `torchrun`, the processes share every batch: each takes its
    part of the rows, and of the `run.accumulate` parts that a batch is cut into. The first process
    keeps the time, writes the checkpoints and measures; the others do what it broadcasts.
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
        """The values of the first process: clocks and signals differ between processes."""
        values = [done, stop]
        broadcast_object_list(values)
        return values[0], bool(values[1])

    with Interrupts() as interrupts:
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
            indices = batches.next(*plan.shape(done), plan.documents(done))
            losses.append(_step(forward, loss, _own(indices, accelerator), done, run, accelerator))
            optimizer.step(plan.rate(progress.step, done))
            clock.add(time.monotonic() - started)
            progress.step += 1
            progress.tokens += indices.shape[0] * (indices.shape[1] - 1)
            progress.elapsed = clock.elapsed
            if progress.step % run.log_steps == 0:
                progress.note(loss=sum(losses) / len(losses))
                losses.clear()
                if first:
                    _report(progress, done)
            if first and time.monotonic() - saved > run.every:
                save()
                saved = time.monotonic()
        if first and progress.step > begun:
            save()
    return progress


def _report(progress: Progress, done: float) -> None:
    """Print the share done, the newest losses (nats per token), the speed and the time spent."""
    losses = ((name, progress.last(name)) for name in ("loss", "heldout"))
    print(
        f"step {progress.step} ({done:.0%}):",
        *(f"{name} {value:.3f}," for name, value in losses if value is not None),
        f"{progress.tokens / max(progress.elapsed, 1e-9):,.0f} tokens/s,",
        f"{progress.elapsed / 60:.1f} min",
        flush=True,
    )


def _own(indices: Tensor, accelerator: Accelerator) -> Tensor:
    """This process's rows of a batch."""
    count = accelerator.num_processes
    if len(indices) % count:
        raise ValueError(
            f"a batch of {len(indices)} rows cannot be split evenly between {count} processes: "
            "start a number of processes that divides the rows of every stage"
        )
    return indices[accelerator.process_index :: count]


def _step(
    forward: nn.Module, loss: Loss, indices: Tensor, done: float, run: Run, accelerator: Accelerator
) -> float:
    """Gradients of one batch, in parts of equal rows; returns its loss in nats."""
    kind = torch.device(run.device).type
    forward.train()
    parts = indices.tensor_split(min(run.accumulate, len(indices)))
    total = 0.0
    for number, part in enumerate(parts):
        with (
            accelerator.no_sync(forward) if number + 1 < len(parts) else nullcontext(),
            torch.autocast(kind, torch.bfloat16, enabled=run.bf16),
        ):
            value = loss(forward, part, done) * (len(part) / len(indices))
            accelerator.backward(value)
        total += value.item()  # synchronizes the device, so that the step is timed as a whole
    return total
