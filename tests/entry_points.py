"""Drafting methods that a temporary distribution registers."""

from collections.abc import Mapping
from pathlib import Path


def register_methods(folder: Path, methods: Mapping[str, str]) -> Path:
    """Makes a folder that registers methods once it is on sys.path.

    Args:
        folder: Created if it does not exist.
        methods: Name of each method to ``module:Class``.
    """
    info = folder / "temporary-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: temporary\nVersion: 1\n")
    lines = [f"{name} = {path}\n" for name, path in methods.items()]
    (info / "entry_points.txt").write_text("[paceline.methods]\n" + "".join(lines))
    return folder
