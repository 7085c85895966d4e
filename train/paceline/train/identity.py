"""What makes a run that run: its folder of checkpoints serves no other."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState

from paceline.decoder import weights_fingerprint
from paceline.train.corpus import Corpus

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from paceline.train.loop import Run

_FILE = "run.json"


def begin_run(
    run: Run,
    out: Path,
    method: str,
    preset: DataclassInstance,
    corpus: Corpus,
    *,
    target: Path | None = None,
    start: Path | None = None,
    recordings: Path | None = None,
) -> None:
    """Claim `run.work` for this run, and check that the model may be written to `out`.

    A trainer calls it first, before it reads anything from `run.work`. The identity of the run is
    everything that decides its weights: method, settings, digests of the corpus and of the models
    that it reads, and where its recordings come from. The first call writes it to `run.json`, later
    ones compare. Where a run computes (device, processes, parts of a batch) does not count.

    Args:
        run: Its folder and its budgets.
        out: Folder of the model to write.
        method: What is trained.
        preset: Its settings; their `minutes` and `steps` give way to those of `run`.
        corpus: Its text.
        target: Folder of the model to learn from.
        start: Folder of the model to train further.
        recordings: Recorded texts to learn from.

    Raises:
        FileExistsError: `out` holds something, and `run.force` is not set or it is no model.
        ValueError: `run.work` belongs to another run, or `out` is a model that the run reads.
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
        "recordings": recordings and str(recordings.resolve()),
    }
    for name in ("minutes", "steps"):
        identity.pop(f"preset.{name}", None)
    with PartialState(cpu=torch.device(run.device).type == "cpu").main_process_first():
        _claim(run.work, json.loads(json.dumps(identity)))


def cleared(out: Path) -> Path:
    """`out`, without the files of a model that it holds."""
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


def _claim(work: Path, wanted: dict[str, Any]) -> None:
    path = work / _FILE
    if work.is_dir() and {found.name for found in work.iterdir()} - {_FILE}:
        if not path.is_file():
            raise ValueError(
                f"{work} is not empty, and no {_FILE} says which run made it: give this run "
                "another --work, or remove that folder"
            )
        found = json.loads(path.read_text())
        differing = [
            f"  {name}: found {found.get(name)}, this run wants {wanted.get(name)}"
            for name in {**wanted, **found}
            if found.get(name) != wanted.get(name)
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
    partial.write_text(json.dumps(wanted, indent=1) + "\n")
    os.replace(partial, path)


def _described(corpus: Corpus) -> str:
    manifest = corpus.manifest()
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    files = len(corpus.train) + len(corpus.heldout)
    return f"{corpus.source}, {files} files, SHA-256 {digest}"
