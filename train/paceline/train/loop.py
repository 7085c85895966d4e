"""The training loop of every model: clock, optimizer, batches, steps, checkpoints."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, Self, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn, optim

from paceline.train.batches import Position, RowStream
from paceline.train.presets import Plan
from paceline.train.run import Progress, Run

# A step this many times the usual one was paused (SIGSTOP, suspend), not slow.
_PAUSE_FACTOR = 20.0
# Embedding tables: most rows get no gradient in a batch, so Muon does not apply.
_TABLES = ("embed", "markov_w")
_CHECKPOINT = "run.pt"
# (model, indices into the stream: int64 [rows, length + 1], share of the run done, 0 to 1) ->
# scalar loss in nats per token.
Loss = Callable[[nn.Module, Tensor, float], Tensor]


@dataclass
class Clock:
    """Time spent stepping, in seconds; what a pause adds to one step is not counted."""

    elapsed: float = 0.0
    _recent: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        if len(self._recent) >= 5:
            usual = median(self._recent)
            if seconds > _PAUSE_FACTOR * usual:
                seconds = usual
        self._recent = [*self._recent[-20:], seconds]
        self.elapsed += seconds


class Interrupts:
    """A context manager in which SIGINT and SIGTERM only set `seen`.

    It must be entered in the main thread: Python allows signal handlers in no other.
    """

    seen = False

    def __enter__(self) -> Self:
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True


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
            muon = optim.Muon(
                matrices, lr=muon_rate, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original"
            )
            self._parts.append(muon)
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
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, kept in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(kept)


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    if parameter.ndim != 2 or min(parameter.shape) == 1:
        return False
    return not any(table in name for table in _TABLES)


def save_run(
    folder: Path, model: nn.Module, optimizer: Optimizer, batches: RowStream, progress: Progress
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
    partial = folder / (_CHECKPOINT + ".partial")
    torch.save(state, partial)
    os.replace(partial, folder / _CHECKPOINT)


def load_run(
    folder: Path, model: nn.Module, optimizer: Optimizer, batches: RowStream
) -> Progress | None:
    """Restore what `save_run` wrote; None if `folder` holds no run.

    `begin_run` has checked that it is the same run.
    """
    path = folder / _CHECKPOINT
    if not path.is_file():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    batches.seek(Position(**state["position"]))
    torch.set_rng_state(state["rng"])
    return Progress(**state["progress"])


def train(
    model: nn.Module,
    loss: Loss,
    batches: RowStream,
    optimizer: Optimizer,
    plan: Plan,
    run: Run,
    heldout: Callable[[nn.Module], Mapping[str, float]] | None = None,
) -> Progress:
    """Train `model` in place until the run's minutes or steps are used up: the minutes that are
    left of the plan's after what was prepared, at least a tenth of them.

    Resumes from the checkpoint in `run.work`, if there is one; a finished run returns at once.
    `heldout` returns figures that are logged before some checkpoints and the last, one of them
    named `heldout`.
    On SIGTERM or Ctrl-C a checkpoint is written and KeyboardInterrupt raised.

    Started by `accelerate launch` or `torchrun`, the processes share every batch: each takes its
    part of the rows, and of the `run.accumulate` parts that a batch is cut into. The first process
    keeps the time, writes the checkpoints and measures; the others do what it broadcasts.
    """
    progress = load_run(run.work, model, optimizer, batches)
    if progress is None:
        progress = Progress(prepared=time.monotonic() - run.began)
    left = max(plan.minutes - progress.prepared / 60, plan.minutes / 10)
    plan = replace(plan, minutes=left)
    clock = Clock(progress.elapsed)
    forward = cast(nn.Module, torch.compile(model, dynamic=False)) if run.compile else model
    accelerator = Accelerator(cpu=torch.device(run.device).type == "cpu")
    forward = accelerator.prepare_model(forward, device_placement=False)
    first = accelerator.is_main_process
    saved = measured = time.monotonic()
    begun, losses = progress.step, list[float]()

    def save(last: bool) -> None:
        nonlocal saved, measured
        if heldout is not None and (last or time.monotonic() - measured > run.measure):
            with torch.random.fork_rng([]):  # when it is measured changes no step
                progress.note(**heldout(model))
            measured = time.monotonic()
        save_run(run.work, model, optimizer, batches, progress)
        saved = time.monotonic()

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
                    _report(progress, plan)
            if first and time.monotonic() - saved > run.every:
                save(last=False)
        if first and progress.step > begun:
            save(last=True)
    return progress


def _report(progress: Progress, plan: Plan) -> None:
    """Print the share done, the newest losses (nats per token), the speed, the time spent, and
    about how long the rest takes at this speed."""
    losses = ((name, progress.last(name)) for name in ("loss", "heldout"))
    done, minutes = plan.progress(progress.step, progress.elapsed), progress.elapsed / 60
    print(
        f"step {progress.step} ({done:.0%}):",
        *(f"{name} {value:.3f}," for name, value in losses if value is not None),
        f"{progress.tokens / max(progress.elapsed, 1e-9):,.0f} tokens/s,",
        f"{minutes:.1f} min, {minutes * (1 / done - 1):.1f} left",
        flush=True,
    )


def _own(indices: Tensor, accelerator: Accelerator) -> Tensor:
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
