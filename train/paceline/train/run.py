"""A run: its budgets, the identity of its work folder, and its checkpoints."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState

from paceline.convert import weights_fingerprint
from paceline.train.corpus import Corpus

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_FILE = "run.json"
# Shares of the minutes after which nothing more is written, and computed, for a run's texts.
WRITING, PREPARING = 0.3, 0.5


@dataclass(frozen=True)
class Run:
    """Where and how long to train.

    `work` holds the checkpoints, written every `every` seconds; one is measured on held-out texts
    if the last one that was is `measure` seconds old. The run ends `minutes` after it
    `began`, of which preparing for the first step takes at most half; pauses between steps are not
    counted. `device` is "cpu" or a CUDA device; with `bf16` the forward pass runs in bf16 autocast
    there. Gradients of a batch are accumulated over `accumulate` parts. `force` lets the run
    replace a model in its output folder. Without `card` no model card is written or measured.
    Stored signals of a target are in `signals`, by default in `work`.
    """

    work: Path
    minutes: float
    steps: int
    device: str = "cpu"
    every: float = 60.0
    measure: float = 240.0
    bf16: bool = True
    compile: bool = False
    log_steps: int = 20
    accumulate: int = 1
    force: bool = False
    card: bool = True
    signals: Path | None = None
    began: float = field(default_factory=time.monotonic)

    def in_fast_types(self) -> Run:
        """This run, without bf16 on a CPU that has no such instructions and is slower with it."""
        fast = torch.device(self.device).type != "cpu" or torch.cpu._is_avx512_bf16_supported()
        return replace(self, bf16=self.bf16 and fast)

    def until(self, share: float) -> float:
        """When a share of the minutes is over, on the clock `time.monotonic`."""
        return self.began + 60 * self.minutes * share


def begin_run(
    run: Run,
    out: Path,
    method: str,
    preset: DataclassInstance,
    corpus: Corpus,
    *,
    target: Path | None = None,
    start: Path | None = None,
    written: Sequence[Path] = (),
) -> None:
    """Claim `run.work` for this run, and check that the model may be written to `out`.

    A trainer calls it before it reads anything from `run.work`. The identity of the run is
    everything that determines its weights: method, settings, digests of the corpus and of the
    models that it reads. The first call writes it to `run.json`, later ones compare. Device,
    processes and parts of a batch may differ. Raises ``FileExistsError`` if `out` holds something,
    and `run.force` is not set or it is no model, and ``ValueError`` if `run.work` belongs to
    another run, or `out` is a model that the run reads.
    """
    _check_out(out, [folder for folder in (target, start) if folder is not None], run.force)
    identity: dict[str, Any] = {
        "method": method,
        **{f"preset.{name}": value for name, value in asdict(preset).items()},
        "minutes": run.minutes,
        "steps": run.steps,
        "bf16": run.bf16,
        "data": _described(corpus),
        "target": target and weights_fingerprint(target),
        "start": start and weights_fingerprint(start),
        "written": [str(file.resolve()) for file in written] or None,
    }
    for name in ("minutes", "steps"):
        identity.pop(f"preset.{name}", None)
    with PartialState(cpu=torch.device(run.device).type == "cpu").main_process_first():
        _claim(run.work, json.loads(json.dumps(identity)))


def cleared(out: Path) -> Path:
    """Remove the files in the folder `out`, if it exists; returns `out`."""
    if out.is_dir():
        for path in out.iterdir():
            if not path.is_dir():
                path.unlink()
    return out


def _check_out(out: Path, read: list[Path], force: bool) -> None:
    if any(out.resolve() == folder.resolve() for folder in read):
        raise ValueError(f"{out} is a model that this run reads: give --out another folder")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / "config.json").is_file():
        raise FileExistsError(f"{out} exists and holds no model: give --out another folder")
    if not force:
        raise FileExistsError(
            f"{out} holds a model already: give --out another folder, or --force to replace it"
        )


def _claim(work: Path, identity: dict[str, Any]) -> None:
    path = work / _FILE
    if work.is_dir() and {entry.name for entry in work.iterdir()} - {_FILE}:
        if not path.is_file():
            raise ValueError(
                f"{work} is not empty and has no {_FILE} that identifies its run: give this run "
                "another --work, or remove that folder"
            )
        stored = json.loads(path.read_text())
        differing = [
            f"  {name}: found {stored.get(name)}, this run has {identity.get(name)}"
            for name in {**identity, **stored}
            if stored.get(name) != identity.get(name)
        ]
        if differing:
            raise ValueError(
                f"{work} holds another run:\n"
                + "\n".join(differing)
                + "\ngive this run another --work, or remove that folder"
            )
        return
    work.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(identity, indent=1) + "\n")
    os.replace(partial, path)


def _described(corpus: Corpus) -> str:
    manifest = corpus.manifest()
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    files = len(corpus.train) + len(corpus.heldout)
    return f"{corpus.source}, {files} files, SHA-256 {digest}"


@dataclass
class Progress:
    """Counters of a run: steps, tokens seen, seconds of stepping, and a log of its losses."""

    step: int = 0
    tokens: int = 0
    elapsed: float = 0.0
    prepared: float = 0.0  # seconds that passed before the first step
    log: list[dict[str, float]] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        return {"steps": self.step, "tokens": self.tokens, "minutes": round(self.elapsed / 60, 1)}

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
