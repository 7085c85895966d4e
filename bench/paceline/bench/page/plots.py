"""Pictures of the results, as SVG to be put into a page."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_WIDTH, _HEIGHT = 5.2, 3.4  # of a panel. Unit: inches
_FORGOTTEN = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>", re.DOTALL)

Draws = Callable[[Any, Sequence[Any]], None]
"""Draws into matplotlib's pyplot and axes."""


def svg(name: str, columns: int, draws: Draws, height: float = _HEIGHT) -> str:
    """A figure with panels side by side; nothing in it refers to anything outside.

    `name` makes the ids in the figure its own.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # Text stays text: small, and to be searched.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure, panels = pyplot.subplots(
            1, columns, figsize=(_WIDTH * columns, height), squeeze=False, layout="constrained"
        )
        draws(pyplot, panels[0])
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return _FORGOTTEN.sub("", file.getvalue()).strip()


def by_context(cells: Sequence[Mapping[str, Any]], figure: str, label: str) -> str:
    """A figure of every row by context, a panel for each target and temperature."""
    panels = [
        (target, heat)
        for target in dict.fromkeys(cell["target"] for cell in cells)
        for heat in dict.fromkeys(cell["temperature"] for cell in cells)
    ]

    def draws(_: Any, axes: Sequence[Any]) -> None:
        for axis, (target, heat) in zip(axes, panels, strict=True):
            here = [c for c in cells if (c["target"], c["temperature"]) == (target, heat)]
            here.sort(key=lambda cell: cell["context"])
            for row in here[0]["rows"]:
                points = [(c["context"], c["rows"][row].get(figure)) for c in here]
                if all(value is not None for _, value in points):
                    axis.plot(*zip(*points, strict=True), marker="o", ms=4, label=row)
            axis.set(title=f"{target} target, T = {heat:g}", xlabel="context, tokens", ylabel=label)
            axis.set_xscale("log", base=2)
            contexts = [cell["context"] for cell in here]
            axis.set_xticks(contexts, [f"{context // 1024}k" for context in contexts])
            axis.grid(alpha=0.3)
        axes[-1].legend(fontsize=7)

    return svg(f"context-{figure}", len(panels), draws)


def by_temperature(cells: Sequence[Mapping[str, Any]], figure: str, label: str) -> str:
    """A figure of every row at each temperature, bars side by side, a panel for each group."""
    groups = list(dict.fromkeys(cell["group"] for cell in cells))

    def draws(_: Any, axes: Sequence[Any]) -> None:
        for axis, group in zip(axes, groups, strict=True):
            here = [cell for cell in cells if cell["group"] == group]
            rows = [row for row, found in here[0]["rows"].items() if figure in found]
            for index, cell in enumerate(here):
                places = [place + index * 0.4 for place in range(len(rows))]
                values = [cell["rows"][row].get(figure, 0.0) for row in rows]
                axis.bar(places, values, width=0.38, label=f"T = {cell['temperature']:g}")
            names = [row.removeprefix("paceline ") for row in rows]
            axis.set_xticks(
                [place + 0.2 for place in range(len(rows))], names, rotation=60, ha="right"
            )
            axis.set(title=group, ylabel=label)
            axis.grid(alpha=0.3, axis="y")
        axes[0].legend(fontsize=8)

    return svg(f"temperature-{groups[0]}-{figure}", len(groups), draws, _HEIGHT + 1.2)
