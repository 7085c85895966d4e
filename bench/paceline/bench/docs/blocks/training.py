"""What training under budgets gave, by the models' cards, and what telemetry costs."""

import re

from paceline.bench.docs.markdown import interval, table
from paceline.bench.docs.results import FigureError, Results

_LENGTHS = ("1,024", "3,840")


def budgets(results: Results) -> str:
    """Accepted length by budget, before training under budgets and after."""
    rows = []
    headings = ["drafter"]
    for name in ("longspec", "lm"):
        card = results.root / "models" / "demo" / f"{name}-budget" / "README.md"
        text = card.read_text(encoding="utf-8")
        before, after = [f"`{name}`"], [f"`{name}-budget`"]
        for length in _LENGTHS:
            line = re.search(rf"^\| {length} tokens \|(.*)\|$", text, re.MULTILINE)
            if line is None:
                raise FigureError(f"{card} has no row of {length} tokens")
            for cell in line[1].split("|"):
                first, _, last = cell.strip().partition(" → ")
                before.append(first)
                after.append(last)
        rows += [before, after]
    for length in _LENGTHS:
        headings += [f"{length} tokens, B = 64", "256", "1,024", "all"]
    return table(headings, rows)


def telemetry(results: Results) -> str:
    """A sentence on throughput, and one on rounds."""
    modes = results.value("telemetry", "modes")
    off, metrics, traces = (modes[mode] for mode in ("off", "metrics", "metrics and traces"))
    low, high = traces["throughput_cost_quartiles"]
    longer = traces["round_overhead_ms"] - off["round_overhead_ms"]
    processor = traces["cpu_ms_per_round"] - off["cpu_ms_per_round"]
    return (
        f"the median loss of throughput was {metrics['throughput_cost']:.1%} with metrics and "
        f"{traces['throughput_cost']:.1%} with traces too, in {traces['runs']} runs each that "
        f"differed by more (quartiles {low:+.1%} and {high:+.1%}); a round took {longer:.2f} ms "
        f"longer beside its computing, and {processor:.1f} ms more processor time."
    )


def online(results: Results) -> str:
    """Accepted length before and after learning from traffic."""
    rows = []
    for method, run in results.value("online", "drafters").items():
        for kind, heats in run["accepted_length"].items():
            for heat, versions in heats.items():
                cells = [interval(versions[name]) for name in ("before", "after")]
                rows.append([f"`{method}`", kind, heat.removeprefix("T="), *cells])
    return table(("drafter", "prompts from", "T", "before", "after"), rows)


def online_run(results: Results) -> str:
    """How much was recorded and learnt, and what the trial said."""
    lines = []
    for method, run in results.value("online", "drafters").items():
        training, trial = run["training"], run["trial"]
        lines += [
            f"- `{method}`: learnt from {training['recorded_texts']} texts of at most "
            f"{run['new_tokens']} tokens",
            f"  after prompts of {run['prompt_tokens']}; {training['steps']} steps in "
            f"{training['minutes']:.1f} minutes.",
            f"  The trial ended {trial['state'].replace('_', ' ')}, after "
            f"{trial['candidate_figures']['generations']} generations of the new version:",
            f"  {trial['reason']}.",
        ]
    return "\n".join(lines)
