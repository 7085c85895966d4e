"""Pictures of result files."""

import re
from xml.etree import ElementTree

import pytest

from paceline.bench import chart, headline
from paceline.bench.chart import draw_arms
from paceline.bench.table import figures


def test_arms_of_entries_share_panels_and_labels_do_not_overlap() -> None:
    points = {str(x): [1.0, 2.0, 3.0] for x in (1, 2, 30, 31, 32)}
    entries = {
        "first": {"panel": "chat", "arms": {"old": {"length": points}}},
        "second": {"panel": "chat", "arms": {"new": {"length": {"64": [2.0, 2.0, 2.0]}}}},
    }
    drawn = draw_arms(entries)
    assert re.findall(r'<text y="-14">(.*?)</text>', drawn) == ["length, chat"]
    assert drawn.count("<polyline") == 2
    assert drawn.count("<circle") == 6, "every point is drawn"
    labels = re.findall(r'y="218" text-anchor="middle">(.*?)<', drawn)
    assert labels == ["1", "2", "30", "64"], "those of near points are left out"


@pytest.mark.parametrize("name", ["a&b", "a<b", "</svg>"])
def test_names_of_users_are_text_in_every_picture(name: str) -> None:
    rate = {"figures": {"tokens_per_second": [1.0, 2.0, 3.0], "over_none": [1.0, 2.0, 3.0]}}
    pictures = [
        chart.draw({name: {name: {1.0: [1.0, 2.0, 3.0]}}}),
        figures.draw({f"{name}, T = 0, 1 user": {"paceline int8 none": rate}}),
        headline._draw({"Part": [(name, [("plain", 1.0)], name)]}),
    ]
    for drawn in pictures:
        assert name in "".join(ElementTree.fromstring(drawn).itertext())
