"""A distribution of another package that registers selection policies."""

from pathlib import Path

from distributions import write_distribution

MODULE = '''
import os
from pathlib import Path

import torch

from paceline.kv.selection import SelectionPolicy


class Newest(SelectionPolicy):
    """The newest positions."""

    def __init__(self, cache, layers):
        self._layers = len(layers)

    def choose(self, committed, budget):
        fresh = Path(__file__).with_name(f"pid.{os.getpid()}")
        fresh.write_text(str(os.getpid()))
        fresh.replace(fresh.with_suffix(""))  # whole at any time
        return [torch.arange(max(0, committed - budget), committed)] * self._layers
'''


def install(folder: Path, *names: str) -> None:
    """Install it into a folder for ``sys.path``; the policy has these names.

    The policy writes the id of the process that runs it to the file ``pid``.
    """
    (folder / "newest_policy.py").write_text(MODULE)
    entries = dict.fromkeys(names, "newest_policy:Newest")
    write_distribution(folder, entries, "paceline.kv_policies")
