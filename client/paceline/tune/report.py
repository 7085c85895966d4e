"""What came out, as a page with plots and as a config file."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence

from paceline.tune.steps import Step, Trial

_WIDTH, _HEIGHT, _MARGIN = 640, 240, 48
_COLOURS = {"accepted_length": "#3b78d8", "tokens_per_second": "#3fa55b"}
_NAMES = {"accepted_length": "accepted length", "tokens_per_second": "tokens/s"}


def to_toml(
    verifier: Mapping[str, str | bool], load: str, steps: Sequence[Step], plain: float
) -> str:
    """A config file for `paceline serve`, `paceline verifier` and `paceline drafter`.

    Args:
        verifier: Arguments of the verifier by their long names.
        load: The drafter, NAME=METHOD:DIR,key=value...
        steps: All steps; the last one's choice is what is loaded.
        plain: Tokens a second without a drafter.
    """
    best = steps[-1].chosen
    lines = [
        f"# Found by paceline tune: {best.tokens_per_second:.1f} tokens/s, accepted length "
        f"{best.accepted_length:.2f}; {plain:.1f} tokens/s without a drafter.",
    ]
    if best.tokens_per_second < plain:
        lines.append(
            "# Drafting does not pay with these prompts here; clients notice, and do without."
        )
    values = {name: json.dumps(value) for name, value in verifier.items()}
    lines += ["", "[verifier]", *(f"{name} = {value}" for name, value in values.items())]
    lines += ["", "[drafter]", f"load = [{json.dumps(load)}]", ""]
    return "\n".join(lines)


def to_html(title: str, steps: Sequence[Step], plain: float) -> str:
    """A page that needs no network: a plot and a table for each step."""
    parts = [_step(step, plain) for step in steps]
    return (
        f"<!doctype html><meta charset='utf-8'><title>{html.escape(title)}</title>"
        "<style>body{font:14px sans-serif;max-width:760px;margin:2em auto}"
        "table{border-collapse:collapse}td,th{padding:2px 12px;text-align:right}"
        "td:first-child{text-align:left}.chosen{font-weight:bold}</style>"
        f"<h1>{html.escape(title)}</h1><p>{plain:.1f} tokens/s without a drafter.</p>"
        f"{''.join(parts)}\n"
    )


def _step(step: Step, plain: float) -> str:
    rows = "".join(
        f"<tr{' class=chosen' if trial is step.chosen else ''}><td>{html.escape(trial.label)}</td>"
        f"<td>{trial.accepted_length:.2f}</td><td>{trial.tokens_per_second:.1f}</td>"
        f"<td>{trial.tokens_per_second / plain:.2f}</td></tr>"
        for trial in step.trials
    )
    return (
        f"<h2>{html.escape(step.title)}</h2>{_plot(step)}<table><tr><th></th>"
        f"<th>accepted length</th><th>tokens/s</th><th>x plain</th></tr>{rows}</table>"
    )


def _plot(step: Step) -> str:
    """Both figures over the trials in their order, each on a scale of its own from 0."""
    count = len(step.trials)
    across = [_MARGIN + (_WIDTH - 2 * _MARGIN) * (i + 0.5) / count for i in range(count)]
    drawn = "".join(_line(step.trials, across, figure) for figure in _COLOURS)
    chosen = across[step.trials.index(step.chosen)]
    labels = "".join(
        f"<text x='{x:.0f}' y='{_HEIGHT - 8}' text-anchor='middle' font-size='11'>"
        f"{html.escape(_varied(step, trial))}</text>"
        for x, trial in zip(across, step.trials, strict=True)
    )
    names = "".join(
        f"<text x='{_MARGIN + 160 * i}' y='14' fill='{colour}'>{_NAMES[figure]}</text>"
        for i, (figure, colour) in enumerate(_COLOURS.items())
    )
    return (
        f"<svg width='{_WIDTH}' height='{_HEIGHT}' role='img'>"
        f"<line x1='{chosen:.0f}' x2='{chosen:.0f}' y1='20' y2='{_HEIGHT - 24}' "
        f"stroke='#bbb' stroke-dasharray='4'/>{drawn}{labels}{names}</svg>"
    )


def _line(trials: Sequence[Trial], across: Sequence[float], figure: str) -> str:
    values = [float(getattr(trial, figure)) for trial in trials]
    low, high, most = _HEIGHT - 28, 24, max(values) or 1.0
    down = [low - (low - high) * value / most for value in values]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True))
    texts = "".join(
        f"<text x='{x:.0f}' y='{y - 5:.0f}' text-anchor='middle' font-size='10' "
        f"fill='{_COLOURS[figure]}'>{value:.3g}</text>"
        for x, y, value in zip(across, down, values, strict=True)
    )
    return f"<polyline points='{points}' fill='none' stroke='{_COLOURS[figure]}'/>{texts}"


def _varied(step: Step, trial: Trial) -> str:
    """What sets a trial apart from the others of its step."""
    same = set.intersection(*({*each.options.items()} for each in step.trials))
    return " ".join(v for k, v in trial.options.items() if (k, v) not in same) or trial.label
