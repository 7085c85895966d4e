"""The scheduler under load."""

from collections.abc import Mapping
from statistics import fmean, median, stdev
from typing import Any

from paceline.bench.docs.markdown import number, table
from paceline.bench.docs.results import Results
from paceline.bench.load.turns import MODES, over, quotients

_PAYING = {"ngram": "load-copying", "longspec": "load-longspec"}
_WITHIN = 0.15  # of what was foretold: a good guess


def facts(results: Results) -> str:
    """What a decision and the cost table take, and what batching gives."""
    costs = results.value("load", "costs")
    decision, shapes = costs["decision"], costs["shapes"]
    worst = max(shapes, key=lambda shape: float(shape["error"]))
    near = sum(shape["error"] <= _WITHIN for shape in shapes)
    plain = {
        size: modes["plain"]["tokens_per_second"]
        for size, modes in results.value("load", "load/closed").items()
    }
    largest = max(plain, key=int)
    return (
        f"- A decision for {decision['sequences']} sequences with {decision['nodes']} nodes each\n"
        f"  takes {decision['median_ms']:.2f} ms (median; 99th percentile "
        f"{decision['p99_ms']:.2f}).\n"
        f"- The table takes {costs['profile_seconds']:.1f} s to measure. On {len(shapes)} steps\n"
        f"  that lie between its points it is wrong by {costs['mean_error']:.1%} on average, by\n"
        f"  {costs['median_error']:.1%} at the median; {near} of them are within {_WITHIN:.0%}.\n"
        f"  The worst, of {worst['tokens']} in a batch behind a context of {worst['context']:,},\n"
        f"  is off by {worst['error']:.1%}.\n"
        f"- Continuous batching: {largest} plain generations at once give "
        f"{plain[largest] / plain['1']:.1f} times the tokens of one."
    )


def closed(results: Results) -> str:
    """Throughput by generations at once."""
    rows = []
    for size, modes in results.value("load", "load/closed").items():
        scheduled = modes["scheduled"]
        rates = {mode: figures["tokens_per_second"] for mode, figures in modes.items()}
        checked = "-"
        if scheduled["drafted_nodes"]:
            checked = f"{scheduled['checked_nodes']:.1f} of {scheduled['drafted_nodes']:.1f}"
        rows.append(
            [
                size,
                *(number(rates[mode], 0) for mode in ("plain", "fixed", "scheduled")),
                *(_ratio(modes, other) for other in ("plain", "fixed")),
                checked,
                f"{scheduled['budget_0_share'] or 0:.0%}",
            ]
        )
    headings = ("plain, tokens/s", "every round 8 nodes", "scheduled", "over plain", "over fixed")
    return table(("at once", *headings, "checked of drafted nodes", "answers with budget 0"), rows)


def _ratio(modes: Mapping[str, Any], other: str) -> str:
    """Scheduled over another mode: the median of the turns, and their quartiles."""
    least, middle, most = (over(modes, other, quantile) for quantile in (0.25, 0.5, 0.75))
    return f"{middle:.2f} ({least:.2f}-{most:.2f})"


def paying(results: Results) -> str:
    """Throughput where texts repeat themselves, by drafter and generations at once."""
    rows = []
    for drafter, part in _PAYING.items():
        if part not in results.of("load"):
            continue
        for size, modes in results.value("load", f"{part}/closed").items():
            rates = [modes[mode]["tokens_per_second"] for mode in MODES]
            ratios = [_ratio(modes, other) for other in ("plain", "fixed")]
            rows.append([f"`{drafter}`", size, *(number(rate, 0) for rate in rates), *ratios])
    headings = ("plain, tokens/s", "every round 8 nodes", "scheduled")
    return table(("drafter", "at once", *headings, "over plain", "over fixed"), rows)


def opened(results: Results) -> str:
    """What users saw who came at random times."""
    rows = []
    for arrivals, modes in results.value("load", "load/open").items():
        for index, mode in enumerate(MODES):
            row = modes[mode]
            times = [
                f"{row[key]['p50']:.0f} ({row[key]['p99']:.0f})"
                for key in ("first_token_ms", "per_token_ms")
            ]
            rows.append(["" if index else arrivals, mode, *times])
    return table(("arrivals a second", "mode", "first token, ms", "a token, ms"), rows)


def window(results: Results) -> str:
    """How often each cell was measured, between what bounds ratios and shares lie, and the mean."""
    points = results.value("load", "load/closed").values()
    turns = [quotients(modes, "plain") for modes in points]
    ratios = [median(cell) for cell in turns]
    shares = [modes["scheduled"]["drafted_share"] for modes in points]
    every = [quotient for cell in turns for quotient in cell]
    return (
        f"Turns a cell: {' or '.join(map(str, sorted({len(cell) for cell in turns})))}. "
        f"Scheduled over plain: {min(ratios):.2f} to {max(ratios):.2f}, on average over all "
        f"turns {fmean(every):.3f} (standard error {stdev(every) / len(every) ** 0.5:.3f}). "
        f"Tokens of drafted rounds: {min(shares):.0%} to {max(shares):.0%}."
    )
