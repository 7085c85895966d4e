"""`paceline bench docs`: write the figures of README and docs, or say where they are wrong."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.bench.docs.own import KNOWN, unexplained
from paceline.bench.docs.pages import filled, pages, without_parts
from paceline.bench.docs.results import FigureError, Results


def run(root: Path, *, check: bool) -> int:
    """0 if all figures are those of the recorded results, 1 if not.

    Args:
        root: Of the repository.
        check: Change nothing.
    """
    results = Results(root)
    known = (root / KNOWN).read_text(encoding="utf-8")
    wrong = []
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        try:
            made = filled(text, results)
        except FigureError as error:
            wrong.append(f"{page.relative_to(root)}: {error}")
            continue
        if made != text and check:
            wrong.append(f"{page.relative_to(root)}: other figures than in bench/results")
        elif made != text:
            page.write_text(made, encoding="utf-8")
            print(f"written: {page.relative_to(root)}")
        wrong += [
            f"{page.relative_to(root)}: no result for the number in {line!r}"
            for line in unexplained(without_parts(text), known)
        ]
    for line in wrong:
        print(line, file=sys.stderr)
    if not check:
        _draw(root / "docs" / "images", results)
    if wrong:
        print(
            "Figures come from bench/results: `paceline bench docs` writes them. Numbers that are "
            f"no measurement are listed in {KNOWN}.",
            file=sys.stderr,
        )
    return 1 if wrong else 0


def _draw(folder: Path, results: Results) -> None:
    """Pictures of the pages. No check holds them to the results: their bytes are matplotlib's."""
    from paceline.bench.page.pictures import budgets, load

    [picture] = load(results.value("load", "load"))
    (folder / "load.svg").write_text(picture + "\n", encoding="utf-8")
    [picture] = budgets(results.value("budgets", "budgets/rows"))
    (folder / "budgets.svg").write_text(picture + "\n", encoding="utf-8")
