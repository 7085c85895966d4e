"""Cost tables, and what schedulers learnt, kept in the user's cache folder between starts."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from paceline.decoder import Decoder
from paceline.kernels import cpu_kernels, processor_name
from paceline.verifier.scheduler.costs import CostTable
from paceline.verifier.scheduler.profile import contexts_of, profile
from paceline.verifier.scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)
_MAX_FILES = 64
_FORMAT = 5  # of the file, and of what is measured
_TOO_SLOW = 0.75  # learnt scale of a table below which it was measured beside other processes


def cost_table(decoder: Decoder, max_context: int, *, again: bool = False) -> CostTable:
    """The table of a model's shape on this kind of machine: the stored one, or one measured now.

    Weights make no difference. Of several processes that start at a time one measures, and the
    others wait for it: they would only disturb each other. A table whose steps then took much less
    time than it says was measured on a busy machine: it is measured again, and what was learnt
    with it is dropped.

    Args:
        decoder: The model.
        max_context: Longest text that will be served. Unit: tokens.
        again: Measure even if there is one.
    """
    file = _file(decoder, max_context, "costs")
    with _alone(file.with_suffix(".lock")):
        state = _file(decoder, max_context, "state")
        if _scale(state) < _TOO_SLOW:
            state.unlink()
        elif not again:
            with suppress(OSError, ValueError):  # none is stored, or it is damaged
                return CostTable.from_json(file.read_text())
        table = profile(decoder, max_context)
        _write(file, table.to_json())
    return table


def load_state(scheduler: Scheduler, decoder: Decoder, max_context: int) -> None:
    """Let a scheduler go on from what the last one of this model and machine learnt, if stored."""
    with suppress(OSError, ValueError):
        scheduler.load_json(json.loads(_file(decoder, max_context, "state").read_text()))


def save_state(scheduler: Scheduler, decoder: Decoder, max_context: int) -> None:
    """Store what a scheduler learnt. Of several verifiers of one model the last one counts."""
    _write(_file(decoder, max_context, "state"), json.dumps(scheduler.to_json()))


def _scale(state: Path) -> float:
    """The factor by which steps differed from the table in the last process, if stored."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return float(json.loads(state.read_text())["costs"]["common"])
    return 1.0


def _file(decoder: Decoder, max_context: int, kind: str) -> Path:
    return _folder() / f"{_key(decoder, max_context)}.{kind}.json"


def _key(decoder: Decoder, max_context: int) -> str:
    facts = (
        _FORMAT,
        decoder.config,
        str(decoder.device),
        contexts_of(max_context),
        torch.get_num_threads(),
        torch.__version__,
        cpu_kernels().level,
        (processor_name(), len(os.sched_getaffinity(0))),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root, "paceline", "costs")


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Hold a file's lock, which the system frees if the process dies. No matter where it can't."""
    with ExitStack() as held:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fcntl.flock(held.enter_context(file.open("w")), fcntl.LOCK_EX)
        yield


def _write(file: Path, text: str) -> None:
    fresh = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh.write_text(text)
        fresh.replace(file)
        files = sorted(file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
        for old in files[:-_MAX_FILES]:
            old.unlink(missing_ok=True)
            old.with_suffix(".lock").unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s could not be stored: %s", file, error)
