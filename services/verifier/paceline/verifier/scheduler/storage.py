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
from typing import Any

import torch

from paceline.decoder import Decoder
from paceline.kernels import cpu_kernels, processor_name
from paceline.verifier.scheduler.costs import CostTable, flat_table, profile
from paceline.verifier.scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)
_MAX_FILES = 64
_FORMAT = 6  # of the file, and of what is measured
_TOO_SLOW = 0.75  # learnt scale of a table below which it was measured beside other processes


def load_scheduler(
    decoder: Decoder, max_context: int, max_nodes: int, *, again: bool = False
) -> Scheduler:
    """The scheduler of a model's shape on this kind of machine, with what the last one learnt.

    Weights make no difference. The table is measured if none is stored. Of several processes that
    start at a time one measures, and the others wait for it: they would only disturb each other. A
    table whose steps then took much less time than it says was measured on a busy machine: it is
    measured again, and what was learnt with it is dropped.

    Args:
        decoder: The model.
        max_context: Longest text that will be served. Unit: tokens.
        max_nodes: Largest node budget.
        again: Measure even if a table is stored.
    """
    file = _file(decoder)
    with _alone(file.with_suffix(".lock")):
        with suppress(OSError, ValueError, LookupError, TypeError):  # nothing, or it is damaged
            stored = json.loads(file.read_text())
            table, learnt = CostTable.from_json(stored["table"]), stored["learnt"]
            if not again and (learnt is None or learnt["costs"]["scale"] >= _TOO_SLOW):
                scheduler = Scheduler(table, max_nodes)
                if learnt is not None:
                    scheduler.load_json(learnt)
                return scheduler
        # On a GPU a profile would run without the engine's graphs.
        on_cpu = decoder.device.type == "cpu"
        table = profile(decoder, max_context) if on_cpu else flat_table()
        _write(file, table, None)
    return Scheduler(table, max_nodes)


def save_scheduler(scheduler: Scheduler, decoder: Decoder) -> None:
    """Store what a scheduler learnt. Of several verifiers of one model the last one counts."""
    _write(_file(decoder), scheduler.costs.profiled, scheduler.to_json())


def _file(decoder: Decoder) -> Path:
    facts = (
        _FORMAT,
        decoder.config,
        str(decoder.device),
        torch.get_num_threads(),
        torch.__version__,
        cpu_kernels().level,
        (processor_name(), len(os.sched_getaffinity(0))),
    )
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    return Path(root, "paceline", "costs", f"{key}.json")


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Hold a file's lock, which the system frees if the process dies. Without one if it fails."""
    with ExitStack() as held:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fcntl.flock(held.enter_context(file.open("w")), fcntl.LOCK_EX)
        yield


def _write(file: Path, table: CostTable, learnt: dict[str, Any] | None) -> None:
    fresh = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh.write_text(json.dumps({"table": table.to_json(), "learnt": learnt}))
        fresh.replace(file)
        files = sorted(file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
        for old in files[:-_MAX_FILES]:
            old.unlink(missing_ok=True)
            old.with_suffix(".lock").unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s could not be stored: %s", file, error)
