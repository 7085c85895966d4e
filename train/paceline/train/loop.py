"""The training loop, the same for every model: batches in, a loss out, checkpoints between."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress as Bar,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from torch import Tensor, nn

from paceline.train.batches import Batches
from paceline.train.checkpoint import Progress, load_run, save_run
from paceline.train.optim import Optimizer
from paceline.train.preset import Preset
from paceline.train.schedule import Clock, Schedule

Loss = Callable[[nn.Module, Tensor], Tensor]
"""(model, int64 [rows, length + 1]) -> scalar loss in nats per token."""


@dataclass(frozen=True)
class Run:
    """Where and how long to train: `work` holds the checkpoints, written every `every` seconds.

    `minutes` counts stepping only. `device` is a torch device name; on "cuda" and "cpu" alike the
    forward pass runs in bf16 autocast unless `bf16` is off.
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
    """Train `model` in place until the run's minutes or steps are used up; resumes by itself.

    `heldout` measures the held-out loss (nats per token) at each checkpoint. On SIGTERM or Ctrl-C
    a checkpoint is written before KeyboardInterrupt is raised; the next call goes on from it.
    """
    model.to(run.device)
    optimizer = Optimizer(model, preset)
    progress = load_run(run.work, model, optimizer, batches) or Progress()
    schedule = Schedule(preset, run.steps, run.minutes)
    clock = Clock(progress.elapsed)
    stepped = torch.compile(model, dynamic=False) if run.compile else model
    saved = time.monotonic()
    losses: list[float] = []

    def save() -> None:
        save_run(run.work, model, optimizer, batches, progress)

    with _Interrupts() as interrupts, _bar() as bar:
        task = bar.add_task(
            "training", total=run.steps, completed=progress.step, **_shown(progress, run)
        )
        while (done := schedule.progress(progress.step, progress.elapsed)) < 1:
            started = time.monotonic()
            batch = batches.next(*schedule.shape(done)).to(run.device)
            model.train()
            with torch.autocast(run.device, torch.bfloat16, enabled=run.bf16):
                value = loss(stepped, batch)
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step(schedule.rate(progress.step, done))
            losses.append(value.item())  # waits for the device, so the time below is true
            clock.add(time.monotonic() - started)
            progress.step += 1
            progress.tokens += batch.shape[0] * (batch.shape[1] - 1)
            progress.elapsed = clock.elapsed
            if progress.step % run.log_steps == 0:
                _note(progress, losses)
                bar.update(task, completed=progress.step, **_shown(progress, run))
            if time.monotonic() - saved > run.every:
                if heldout is not None:
                    progress.log.append({"step": progress.step, "heldout": heldout(model)})
                    bar.update(task, **_shown(progress, run))
                save()
                saved = time.monotonic()
            if interrupts.seen:
                save()
                raise KeyboardInterrupt(f"stopped at step {progress.step}; checkpoint written")
    save()
    return progress


def _note(progress: Progress, losses: list[float]) -> None:
    progress.log.append({
        "step": progress.step,
        "loss": sum(losses) / len(losses),
        "elapsed": progress.elapsed,
    })
    losses.clear()


def _shown(progress: Progress, run: Run) -> dict[str, str]:
    def last(name: str) -> str:
        return next((f"{row[name]:.3f}" for row in reversed(progress.log) if name in row), "-")

    return {
        "loss": last("loss"),
        "heldout": last("heldout"),
        "rate": f"{progress.tokens / max(progress.elapsed, 1e-9):,.0f}",
        "spent": f"{progress.elapsed / 60:.1f}/{run.minutes:g}",
    }


class _LoggedBar(Bar):
    """A progress bar that prints a plain line per update where there is no terminal."""

    def update(self, task_id, **fields) -> None:  # type: ignore[no-untyped-def, override]
        super().update(task_id, **fields)
        if not self.console.is_terminal:
            shown = self.tasks[0].fields
            print(f"step {self.tasks[0].completed:g}", shown, flush=True)


def _bar() -> Bar:
    return _LoggedBar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TextColumn(
            "loss {task.fields[loss]} held-out {task.fields[heldout]} "
            "{task.fields[rate]} tokens/s {task.fields[spent]} min"
        ),
        TimeElapsedColumn(),
    )


class _Interrupts:
    """Remembers SIGINT and SIGTERM instead of dying in the middle of a step."""

    seen = False

    def __enter__(self) -> "_Interrupts":
        self._before = {s: signal.signal(s, self._see) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _see(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
