"""The page: machine, tables, plots by context, temperature, load and budget."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from paceline.bench import machine
from paceline.bench.docs.results import FigureError, Results
from paceline.bench.page import pictures


def write(results: Results, file: Path) -> None:
    """Write a page that holds everything it shows and asks nothing of a network.

    Raises:
        FigureError: Nothing was recorded.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # names of models and prompt sets are their authors' words
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    known = {
        topic: results.of(topic)[part]
        for topic, part in (("table", "table"), ("load", "load"), ("server", "server"))
        if results.has(topic) and part in results.of(topic)
    }
    if results.has("budgets") and "budgets" in results.of("budgets"):
        known["budgets"] = results.of("budgets")["budgets"]["rows"]
    if not known:
        raise FigureError("there are no results to report: run paceline bench first")
    page = environment.get_template("page.html.j2").render(
        machine=results.machine, plots=_plots(known), **dict.fromkeys(pictures.PICTURES) | known
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page + "\n", encoding="utf-8")


def report(root: Path, file: Path) -> int:
    """What was recorded on this kind of machine, or else on the documents'; 0 if there is any."""
    own = Results(root, str(machine.describe()["kind"]))
    try:
        write(own if own.any else Results(root), file)
    except FigureError as error:
        print(f"paceline bench report: {error}", file=sys.stderr)
        return 1
    print(f"written: {file}")
    return 0


def _plots(known: dict[str, Any]) -> dict[str, list[Markup]]:
    drawn = {topic: pictures.PICTURES[topic](found) for topic, found in known.items()}
    return {topic: [Markup(svg) for svg in svgs] for topic, svgs in drawn.items()}
