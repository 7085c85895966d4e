"""The progress bar of a run, and plain lines instead of it where there is no terminal."""

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

from paceline.train.checkpoint import Progress

_TEMPLATE = (
    "loss {fields[loss]}, held out {fields[heldout]}, {fields[speed]} tokens/s, "
    "{fields[spent]} of {fields[minutes]:g} min"
)


class Bar:
    """Shows share done, losses (nats per token), speed and time spent; a context manager."""

    def __init__(
        self, title: str, minutes: float, console: Console | None = None, quiet: bool = False
    ) -> None:
        """`minutes` is the time budget; `console` defaults to standard output."""
        self._console = console or Console(quiet=quiet)
        self._plain = not self._console.is_terminal
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            MofNCompleteColumn(),
            TextColumn(_TEMPLATE.replace("{fields", "{task.fields")),
            TimeRemainingColumn(),
            console=self._console,
            disable=self._plain,
        )
        self._task = self._bar.add_task(title, **_fields(Progress(), minutes))
        self._minutes = minutes

    def show(self, progress: Progress, done: float) -> None:
        """Show `progress`; `done` is the share of the run done, 0 to 1."""
        fields = _fields(progress, self._minutes)
        total = max(progress.step, round(progress.step / max(done, 1e-9)))
        self._bar.update(self._task, completed=progress.step, total=total, **fields)
        if self._plain:
            line = _TEMPLATE.format(fields=fields)
            self._console.print(f"step {progress.step}: {line}", highlight=False, soft_wrap=True)

    def __enter__(self) -> "Bar":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()


def _fields(progress: Progress, minutes: float) -> dict[str, Any]:
    def last(name: str) -> str:
        value = progress.last(name)
        return "-" if value is None else f"{value:.3f}"

    return {
        "loss": last("loss"),
        "heldout": last("heldout"),
        "speed": f"{progress.tokens / max(progress.elapsed, 1e-9):,.0f}",
        "spent": f"{progress.elapsed / 60:.1f}",
        "minutes": minutes,
    }
