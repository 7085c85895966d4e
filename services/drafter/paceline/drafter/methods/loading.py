"""Loading models without slowing down the thread that drafts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

from paceline.decoder import use_device
from paceline.drafter.methods.base import Resources

_P = ParamSpec("_P")
_T = TypeVar("_T")


def on_passing_thread(
    resources: Resources, load: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    """What ``load`` returns or raises, on a thread that then ends.

    It takes its team of OpenMP workers along: beside the drafting thread's own, a second team would
    outnumber the cores and slow every operation.
    """
    threads = resources.threads or torch.get_num_threads()

    def prepare() -> None:
        torch.set_num_threads(threads)
        use_device(resources.device)

    with ThreadPoolExecutor(1, initializer=prepare) as pool:
        return pool.submit(load, *args, **kwargs).result()
