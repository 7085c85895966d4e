"""Distributions with entry points, as another package would have them."""

from collections.abc import Mapping
from pathlib import Path


def write_distribution(
    folder: Path, entries: Mapping[str, str], group: str = "paceline.methods"
) -> Path:
    """Write a distribution that is found once its folder is on sys.path; returns the folder."""
    info = folder / "temporary-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: temporary\nVersion: 1\n")
    lines = [f"{name} = {path}\n" for name, path in entries.items()]
    (info / "entry_points.txt").write_text(f"[{group}]\n" + "".join(lines))
    return folder
