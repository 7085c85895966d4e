"""Every drafter method beside transformers, by context and temperature, in one run."""

from paceline.bench.table.run import run

__all__ = ["run"]
