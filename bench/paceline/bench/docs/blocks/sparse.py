"""KV under a budget."""

from collections import defaultdict
from statistics import fmean
from typing import Any

from paceline.bench.docs.markdown import interval, table
from paceline.bench.docs.results import Results

_FILES = {"heldout": "held-out", "trained": "trained"}
_NOTING = ("verified", "all rows", "chunk_topk", "quest")
_NAMES = {"all rows": "all rows", "all positions": "all positions"}
_SUBJECTS = {
    "plain": "longspec, plain",
    "multi-budget": "longspec, multi-budget",
    "single-budget": "longspec, single-budget",
}


def collection(results: Results) -> str:
    """What noting scores adds to a verification."""
    rows = [
        [str(row["context"]), *(f"{row[policy]:.1%}" for policy in _NOTING)]
        for row in results.value("selfspec", "collection/collection")
    ]
    return table(("context", *map(_policy, _NOTING)), rows)


def selection(results: Results) -> str:
    """A drafted token's attention to chosen positions."""
    found = results.value("selfspec", "collection/attention")
    return (
        f"A drafted token's attention in all 8 layers over {found['positions']} chosen positions "
        f"of {found['context']}\ntakes {found['sparse_ms']:.2f} ms, gathering them "
        f"{found['gather_ms']:.2f} ms once a round; with a seventh of that for each of 7 drafted\n"
        f"tokens it is {found['share']:.1%} of attention to all positions "
        f"({found['full_ms']:.2f} ms)."
    )


def policies(results: Results) -> str:
    """Accepted length by policy."""
    cells = {
        f"{_FILES[files]}, {heat.replace('=', ' = ')}": cell
        for files, heats in results.value("selfspec", "selfspec").items()
        for heat, cell in heats.items()
    }
    names = list(next(iter(cells.values())))
    rows = []
    for name in names:
        shown = (
            f"{cell[name]['accepted_length']:.2f}"
            if name == "all positions"
            else interval(cell[name])
            for cell in cells.values()
        )
        rows.append([_policy(name), *shown])
    return table(("policy", *cells), rows)


def two_rows(results: Results) -> str:
    """How much two rows keep of what all rows give: least and most."""
    shares = [
        cell["verified"]["accepted_length"] / cell["all rows"]["accepted_length"]
        for heats in results.value("selfspec", "selfspec").values()
        for cell in heats.values()
    ]
    return f"{min(shares):.2f} to {max(shares):.2f}"


def budgets(results: Results) -> str:
    """Accepted length by budget, drafter, policy and context."""
    lengths: dict[tuple[str, str], dict[int, dict[int, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    whole = {}
    for row in results.value("budgets", "budgets/rows"):
        if row["budget"]:
            by_context = lengths[row["drafter"], row["policy"]]
            by_context[row["context"]][row["budget"]] = row["accepted_length"]
        else:
            whole[row["drafter"], row["context"]] = row["accepted_length"]
    contexts = sorted({context for by_context in lengths.values() for context in by_context})
    rows = []
    for (drafter, policy), by_context in lengths.items():
        cells = []
        for context in contexts:
            found = by_context[context]
            each = [found[budget] for budget in sorted(found)] + [whole[drafter, context]]
            worst = 1 - min(each) / max(each)
            cells.append(f"{', '.join(f'{value:.2f}' for value in each)} ({worst:.0%})")
        rows.append([_SUBJECTS.get(drafter, drafter), f"`{policy}`", *cells])
    return table(("drafter", "policy", *(f"{context:,}" for context in contexts)), rows)


def flatness(results: Results) -> str:
    """Mean over contexts of how far the worst budget is below the best, for `streaming`."""
    spreads: dict[str, list[float]] = defaultdict(list)
    for entry in results.value("budgets", "budgets/spreads"):
        if entry["policy"] == "streaming":
            spreads[entry["drafter"]].append(entry["spread"])
    mean = {drafter: f"{fmean(values):.0%}" for drafter, values in spreads.items()}
    return (
        f"for `streaming` the worst budget is {mean['plain']} below the best before and "
        f"{mean['multi-budget']} after for `longspec`, {mean['lm, plain']} and "
        f"{mean['lm, multi-budget']} for `lm`, on average over contexts, and "
        f"{mean['single-budget']} and {mean['lm, single-budget']} after training under 256 alone"
    )


def remote(results: Results) -> str:
    """A followed KV beside a mapped one."""
    rows = []
    for way, found in results.value("budgets", "remote").items():
        wire: list[Any] = ["", "", ""]
        if found["kv_bytes_a_round"]:
            wire = [
                f"{found['first_kv_bytes'] / 1024:.0f} KiB",
                f"{found['kv_bytes_a_round'] / 1024:.1f} KiB",
                f"{found['kv_share']:.2%}",
            ]
        length = f"{found['accepted_length']:.2f}"
        shown = way.replace("1024", "1,024")
        rows.append([shown, length, f"{found['share_of_map_all']:.0%}", *wire])
    sent = ("first update", "a round after", "of the layer")
    return table(("way", "accepted length", "of mapped, all", *sent), rows)


def _policy(name: str) -> str:
    return _NAMES.get(name, f"`{name}`")
