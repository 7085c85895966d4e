"""Programs in interpreters of their own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PACELINE = ("-m", "paceline.cli.main")  # the command, for `run_python`


def run_python(
    *words: str | Path, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a new interpreter with these words, and variables beside those that are there."""
    return subprocess.run(
        [sys.executable, *words], env={**os.environ, **(environment or {})},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
