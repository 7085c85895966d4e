"""Tables for terminals and HTML pages."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console, RenderableType


def write_html(path: Path, *parts: RenderableType) -> None:
    """Write tables and texts of rich as an HTML page that loads nothing else."""
    console = Console(width=160, record=True, file=io.StringIO())
    for part in parts:
        console.print(part)
    console.save_html(str(path))
