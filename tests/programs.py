"""Programs in interpreters of their own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PACELINE = ("-m", "paceline.cli.main")  # the command, for `run_python`


def run_python(
    *words: str | Path, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a new interpreter with these words, in a folder, with variables beside those here."""
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, **(environment or {})},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def packages_after(code: str) -> set[str]:
    """Top-level packages that a new interpreter has imported after it ran some code."""
    probe = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = run_python("-c", probe)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())
