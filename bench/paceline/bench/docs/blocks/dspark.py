"""The DSpark drafter: calibration, and what its heads are worth."""

from itertools import pairwise

from paceline.bench.docs.markdown import interval, table
from paceline.bench.docs.results import Results

_DRAFTERS = {
    "dspark": "`dspark`, trees",
    "chain": "`dspark`, chains: the head's word",
    "longspec": "`longspec`",
    "ngram": "`ngram`",
}
_HEADS = {"dflash": "no heads", "dspark": "Markov", "dspark, trees": "Markov, trees of 16"}
_FILES = {"heldout": "held-out", "trained": "trained-on"}
_PLACES = 6


def calibration(results: Results) -> str:
    """Calibration errors, and areas under the ROC curve."""
    rows = []
    for drafter, kinds in results.value("calibration", "drafters").items():
        for index, (texts, figures) in enumerate(kinds.items()):
            errors = [
                f"{figures[when]['expected_calibration_error']:.1%} "
                f"({figures[when]['area_under_curve']:.2f})"
                for when in ("before", "temperatures_alone", "after")
            ]
            name = "" if index else _DRAFTERS.get(drafter, f"`{drafter}`")
            rows.append([name, texts, f"{figures['before']['paths']:,}", *errors])
    headings = ("drafter", "texts", "paths", "as drafted", "temperatures alone", "calibrated")
    return table(headings, rows)


def heads(results: Results) -> str:
    """Accepted length, and acceptance place by place."""
    rows: list[list[str]] = []
    for files, heats in results.value("dspark", "heads/sets").items():
        for heat, cell in heats.items():
            for name, shown in _HEADS.items():
                found = cell["drafters"][name]["all"]
                reached = [1.0, *found["by_position"]]
                places = [f"{each / before:.2f}" for before, each in pairwise(reached)]
                places += ["-"] * (_PLACES - len(places))
                first = not rows or name == "dflash"
                kind = _FILES[files] if first and heat == next(iter(heats)) else ""
                temperature = heat.removeprefix("T=") if first else ""
                rows.append([kind, temperature, shown, interval(found), *places[:_PLACES]])
    headings = ("files", "T", "drafter", "accepted length", "place 1", *map(str, range(2, 7)))
    return table(headings, rows)
