"""Results of tuning, as tables and as a config file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rich.bar import Bar
from rich.table import Table

from paceline.tune.steps import Step

_BAR = 40  # columns


def to_toml(
    verifier: Mapping[str, str | bool], load: str, steps: Sequence[Step], baseline: float
) -> str:
    """A config file for `paceline serve`, `paceline verifier` and `paceline drafter`.

    Args:
        verifier: Arguments of the verifier by their long names.
        load: The drafter, NAME=METHOD:DIR,key=value...
        steps: All steps; the drafter has the settings chosen in the last one.
        baseline: Speed without a drafter. Unit: tokens/s.
    """
    best = steps[-1].chosen
    lines = [
        f"# Found by paceline tune: {best.tokens_per_second:.1f} tokens/s, accepted length "
        f"{best.accepted_length:.2f}; {baseline:.1f} tokens/s without a drafter.",
    ]
    if best.tokens_per_second < baseline:
        lines.append("# Drafting does not pay with these prompts here: services will not draft.")
    lines += ["", "[verifier]", *(f"{key} = {json.dumps(v)}" for key, v in verifier.items())]
    lines += ["", "[drafter]", f"load = [{json.dumps(load)}]", ""]
    return "\n".join(lines)


def to_table(step: Step, baseline: float) -> Table:
    """The runs of a step with their speeds as bars; `baseline` as in `to_toml`."""
    table = Table(title=step.title)
    table.add_column("setting")
    for heading in ("accepted length", "tokens/s", "speed-up"):
        table.add_column(heading, justify="right")
    table.add_column("", min_width=_BAR)
    table.add_column("")
    fastest = max(run.tokens_per_second for run in step.runs)
    for run in step.runs:
        speed = run.tokens_per_second
        table.add_row(
            run.label,
            f"{run.accepted_length:.2f}",
            f"{speed:.1f}",
            f"{speed / baseline:.2f}x",
            Bar(fastest, 0, speed, width=_BAR),
            "chosen" if run is step.chosen else "",
        )
    return table
