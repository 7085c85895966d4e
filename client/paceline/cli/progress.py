"""What a command waits for, said while it waits."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_FIRST, _EVERY = 2.0, 10.0
"""When something is said first, and how often then, where there is no terminal. Unit: seconds."""


@contextmanager
def waiting(
    what: Callable[[], str],
    say: Callable[[str], None] | None = None,
    share: Callable[[], float] | None = None,
) -> Iterator[None]:
    """Show on a terminal, with a bar and the time, what the body waits for; elsewhere say it when
    it has lasted for a while, and from time to time then.

    Args:
        what: Describes it now. Called on another thread.
        say: Where there is no terminal; None: a line on stderr.
        share: How much of it is done, from 0 to 1; None if nobody knows. Called there too.
    """
    console, began, ended = Console(stderr=True), monotonic(), threading.Event()
    bar = Progress(
        *(TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()),
        console=console,
        transient=True,
        redirect_stdout=False,
        disable=not console.is_terminal,
    )
    task = bar.add_task(what(), total=None if share is None else 1.0)

    def show() -> None:
        if console.is_terminal:
            while not ended.wait(0.2):
                done = None if share is None else share()
                bar.update(task, description=what(), completed=done)
            return
        pause = _FIRST
        while not ended.wait(pause):
            line, pause = f"{what()}: {monotonic() - began:.0f} s so far", _EVERY
            if say is not None:
                say(line)
            else:
                print(line, file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, name="waiting", daemon=True)
    with bar:
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def described(model: Path) -> str:
    """Return a model by its path, size and kind."""
    if model.is_file():
        return f"{model} ({size(model.stat().st_size)}, GGUF file)"
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return f"{model} ({size(weights)}, folder)"


def size(count: float) -> str:
    """Return a number of bytes in words."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
