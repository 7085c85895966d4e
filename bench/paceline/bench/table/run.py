"""A whole run, or the rest of one that was interrupted."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import uvloop

from paceline.bench.record import digest
from paceline.bench.table.groups import FILES, fitted, groups, prompts
from paceline.bench.table.measure import measure

if TYPE_CHECKING:
    from paceline.bench.setting import Bench

TOKENS = 64
"""New tokens a prompt."""


def run(bench: Bench) -> dict[str, Any] | None:
    """Cells of all groups; each group is written down as soon as it is measured.

    A run with the same models and settings goes on where an unfinished one ended; one of some
    groups alone (`--set`) keeps the others. None where the demo's drafters are not all there.
    """
    if bench.small is None or bench.longspec is None or bench.dspark is None:
        return None
    tokens = bench.args.tokens or TOKENS
    chosen = groups(bench.args.package or FILES, bench.args.prompts)
    asked = {"prompts": bench.args.texts, "repeats": bench.args.repeats}
    asked = {name: count for name, count in asked.items() if count}
    chosen = [replace(group, **asked) for group in chosen]
    if bench.args.set:
        chosen = [group for group in chosen if group.name in bench.args.set]
    found: dict[str, Any] = {
        "tokens": tokens,
        "weights": {
            folder.name: digest(folder)
            for folder in (bench.target, bench.small, bench.longspec, bench.dspark)
        },
        "groups": [asdict(group) for group in chosen],
    }
    earlier = bench.book.earlier("table") or {}
    found |= _kept(found, earlier, {group.name for group in chosen} if bench.args.set else None)
    for group in chosen:
        if any(cell["group"] == group.name for cell in found["cells"]):
            bench.console.log(f"{group.name}: measured already")
            continue
        began = time.monotonic()
        texts = prompts(group, bench.models, bench.args.package, bench.args.prompts, tokens)
        measuring = measure(
            group,
            fitted(group, bench.models, bench.work),
            texts,
            dtype=bench.args.dtype,
            tokens=tokens,
            progress=bench.console.log,
        )
        found["cells"] += uvloop.run(measuring)
        found["seconds"] += time.monotonic() - began
        bench.console.log(f"{group.name}: {found['seconds']:.0f} s in all")
        bench.book.add("table", {**found, "complete": False})
    return {**found, "complete": True}


def _kept(found: dict[str, Any], earlier: dict[str, Any], again: set[str] | None) -> dict[str, Any]:
    """Cells of an earlier run with the same models that this one need not measure.

    All of an unfinished run of the same groups; else, where only the groups `again` are asked for,
    those of the others.
    """
    cells: list[dict[str, Any]] = []
    seconds = 0.0
    if all(earlier.get(key) == found[key] for key in ("tokens", "weights")):
        if earlier["groups"] == found["groups"] and not earlier["complete"]:
            cells, seconds = earlier["cells"], earlier["seconds"]
        elif again is not None:
            cells = [cell for cell in earlier["cells"] if cell["group"] not in again]
    return {"cells": cells, "seconds": seconds}
