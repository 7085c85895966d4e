"""Drafting methods of benchmarks, registered for the drafter processes that they start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def register(folder: Path, methods: Mapping[str, str]) -> dict[str, str]:
    """Write a distribution with entry points; returns the environment in which it is found.

    Args:
        folder: Where it is written.
        methods: ``module:Class`` by name of the method.
    """
    info = folder / "bench_methods-1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-methods\nVersion: 1\n")
    lines = [f"{name} = {path}" for name, path in methods.items()]
    (info / "entry_points.txt").write_text("\n".join(["[paceline.methods]", *lines, ""]))
    paths = filter(None, (str(folder), os.environ.get("PYTHONPATH")))
    return {"PYTHONPATH": os.pathsep.join(paths)}
