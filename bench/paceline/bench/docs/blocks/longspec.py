"""The LongSpec drafter."""

from typing import Any

from paceline.bench.docs.markdown import interval, number, table
from paceline.bench.docs.results import Results

_WAYS = {
    "tree, shared noise": "tree, shared noise",
    "tree, ranked by probability": "tree, ranked by probability",
    "tree, other noise": "tree, noise of its own",
    "chain, shared noise": "chain, shared noise",
    "chain, rejection sampling": "chain, rejection sampling (Leviathan et al.)",
}
_SUBJECTS = {
    "longspec, 36 nodes": "`longspec`, 36 nodes",
    "longspec": "`longspec`, default for CPUs",
    "ngram": "`ngram`",
}
_ROWS = {
    "transformers greedy": "transformers greedy",
    "transformers prompt lookup": "transformers prompt lookup",
    "paceline none": "Paceline, no drafter",
    "paceline ngram": "Paceline, `ngram`",
    "paceline longspec": "Paceline, `longspec` (default, 10 nodes)",
    "paceline longspec-8": "Paceline, `longspec` (4,8,8,8 with 8 nodes)",
}


def accepted(results: Results) -> str:
    """Accepted length by length of prompt."""
    rows = []
    heats = results.value("longspec", "acceptance/heldout")
    lengths: list[str] = []
    for heat, cell in heats.items():
        for name, shown in _SUBJECTS.items():
            parts = cell["drafters"][name]
            lengths = [part for part in parts if part.isdigit()]
            each = [f"{parts[length]['accepted_length']:.2f}" for length in lengths]
            calm = f"{parts['not looping']['accepted_length']:.2f}"
            rows.append([heat.removeprefix("T="), shown, *each, interval(parts["all"]), calm])
    shown_lengths = [f"{int(length):,}" for length in lengths]
    return table(("T", "drafter", *shown_lengths, "all", "texts that do not loop"), rows)


def coupling(results: Results) -> str:
    """Ways to accept at temperature 1."""
    ways = results.value("longspec", "coupling/heldout")
    rows = [[shown, interval(ways[way])] for way, shown in _WAYS.items()]
    return table(("way", "accepted length"), rows)


def stretched(results: Results) -> str:
    """Speed on the stretched target."""
    return _speeds(results.value("longspec", "stretched/heldout"))


def demo(results: Results) -> str:
    """Speed on the demo target itself."""
    return _speeds(results.value("longspec", "comparison/heldout"))


def stretched_round(results: Results) -> str:
    """Where a drafted round's time goes on the stretched target."""
    modes = results.value("longspec", "stretched/heldout")
    default, deep = modes["paceline longspec"], modes["paceline longspec-8"]
    free = default["free_run_tokens"] / (default["free_run_tokens"] + _drafted(default))
    fast, deeper = (row["tokens_per_second_while_drafting"] for row in (default, deep))
    return (
        f"A drafted round of the default takes {_split(default)}. {free:.0%} of the tokens came "
        "from free runs, which the client tries now and then; while drafting, the two rows make "
        f"{fast:.1f} and {deeper:.1f} tokens a second."
    )


def demo_round(results: Results) -> str:
    """The same on the demo target."""
    found = results.value("longspec", "comparison/heldout")["paceline longspec"]
    return (
        f"A drafted round takes {_split(found)}, and emits {found['accepted_length']:.2f} tokens. "
        f"{found['drafted_share']:.0%} of the tokens were drafted."
    )


def _speeds(modes: dict[str, Any]) -> str:
    rows = [
        [
            shown,
            number(modes[mode]["tokens_per_second"], 1),
            number(modes[mode]["against_paceline_none"]),
            number(modes[mode]["against_transformers_greedy"]),
        ]
        for mode, shown in _ROWS.items()
        if mode in modes
    ]
    against = ("against Paceline without drafter", "against transformers greedy")
    return table(("way", "tokens/s", *against), rows)


def _drafted(row: dict[str, Any]) -> float:
    """Tokens of drafted rounds."""
    return float(row["accepted_length"] * row["drafted_rounds"])


def _split(row: dict[str, Any]) -> str:
    split = row["round"]
    return (
        f"{split['round_ms']:.1f} ms: draft {split['draft_ms']:.1f}, verification "
        f"{split['verify_ms']:.1f}, transport {split['transport_ms']:.1f}, queue "
        f"{split['queue_ms']:.1f}"
    )
