"""A distribution of another package that registers selection policies."""

from __future__ import annotations

from pathlib import Path

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
        Path(__file__).with_name("pid").write_text(str(os.getpid()))
        return [torch.arange(max(0, committed - budget), committed)] * self._layers
'''


def install(folder: Path, *names: str) -> None:
    """Install it into a folder for ``sys.path``; the policy has these names.

    The policy writes the id of the process that runs it to the file ``pid``.
    """
    (folder / "newest_policy.py").write_text(MODULE)
    metadata = folder / "newest_policy-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: newest-policy\nVersion: 1\n")
    lines = [f"{name} = newest_policy:Newest\n" for name in names]
    (metadata / "entry_points.txt").write_text("[paceline.kv_policies]\n" + "".join(lines))
