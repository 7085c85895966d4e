"""Compile the CPU kernels ahead, for machines without a compiler: ``... build FOLDER``."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.kernels._native import build_ahead


def main() -> None:
    """Compile and say what was made, and how it is found."""
    parser = argparse.ArgumentParser(prog="python -m paceline.kernels.build", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the libraries go")
    folder = parser.parse_args().folder
    for path in build_ahead(folder):
        print(path)
    print(f"found where LD_LIBRARY_PATH holds {folder}")


if __name__ == "__main__":
    main()
