"""The progress bar of a run; plain lines if the output is no terminal."""

from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as RichProgress

from paceline.train.checkpoint import Progress


class Bar:
    """Shows share done, losses (nats per token), speed and time spent; a context manager."""

    def __init__(self, title: str, minutes: float, quiet: bool = False) -> None:
        """`minutes` is the time budget; `quiet` shows nothing."""
        self._console = Console(quiet=quiet)
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, line="")
        self._minutes = minutes

    def show(self, progress: Progress, done: float) -> None:
        """Show `progress`; `done` is the share of the run done, 0 to 1."""
        line = (
            f"loss {_shown(progress.last('loss'))}, held out {_shown(progress.last('heldout'))}, "
            f"{progress.tokens / max(progress.elapsed, 1e-9):,.0f} tokens/s, "
            f"{progress.elapsed / 60:.1f} of {self._minutes:g} min"
        )
        total = max(progress.step, round(progress.step / max(done, 1e-9)))
        self._bar.update(self._task, completed=progress.step, total=total, line=line)
        if not self._console.is_terminal:
            self._console.print(f"step {progress.step}: {line}", highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
