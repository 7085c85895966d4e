"""Options of a drafter service, most of which are arguments of `paceline drafter`. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.service.options import option


@dataclass(frozen=True)
class DrafterOptions:
    """Options of one drafter service."""

    device: str = option(
        "cpu",
        "device of drafters with weights: auto (default of the command: the second GPU, the only "
        "one, or the CPU), cpu, cuda or cuda:N; drafters on a GPU map the KV of a verifier on a "
        "GPU, drafters on the CPU receive it over gRPC",
        metavar="D",
    )
    overlap: bool | None = option(
        None,
        "draft on while the verifier works: chains of lm and selfspec; it pays where the drafter "
        "has cores or a device of its own (default: on a GPU, and for verifiers on other cores)",
        action=argparse.BooleanOptionalAction,
    )
    max_context: int = option(1 << 20, "longest text, in tokens", metavar="N")
    max_streams: int = option(
        1024, "maximum number of generations drafted for at a time", metavar="N"
    )
    verifiers: Sequence[str] = ()  # addresses of verifiers to join
    # Folders below which LoadDrafter may load; none: the folders of drafters loaded at the
    # start, and their parents.
    roots: Sequence[Path] = ()
    threads: int | None = None  # of the math library for methods with weights; None: its default
