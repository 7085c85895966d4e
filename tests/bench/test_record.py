"""Runs of parts, and what becomes of the file."""

import json
from pathlib import Path
from typing import Any

from paceline.bench.record import with_earlier

HEAD: dict[str, Any] = {
    "machine": {"kind": "cpu"}, "dtype": "bfloat16", "longspec": "ab", "dspark": "ef",
}  # fmt: skip


def test_a_run_of_parts_keeps_the_rest_of_the_file(tmp_path: Path) -> None:
    output = tmp_path / "cpu.json"
    assert with_earlier({**HEAD, "replay": 1}, output) == {**HEAD, "replay": 1}
    earlier = {**HEAD, "replay": {"old": 1}, "comparison": {"heldout": 1, "trained": 1}}
    output.write_text(json.dumps(earlier))
    later = {**HEAD, "comparison": {"heldout": 2}, "coupling": {"heldout": 2}}
    assert with_earlier(later, output) == {
        **HEAD,
        "replay": {"old": 1},
        "comparison": {"heldout": 2, "trained": 1},
        "coupling": {"heldout": 2},
    }


def test_figures_of_another_drafter_or_machine_are_not_kept(tmp_path: Path) -> None:
    """But for replay, which has nothing to do with drafters."""
    output = tmp_path / "cpu.json"
    output.write_text(json.dumps({**HEAD, "comparison": {"heldout": 1}, "replay": 1}))
    for change in ({"dtype": "float32"}, {"machine": {"kind": "other"}}):
        later = {**HEAD, **change, "coupling": {"heldout": 2}}
        assert with_earlier(later, output) == later
    for change in ({"longspec": "cd"}, {"dspark": "gh"}):
        later = {**HEAD, **change, "coupling": {"heldout": 2}}
        assert with_earlier(later, output) == {**later, "replay": 1}
    output.write_text(json.dumps({**HEAD, "dspark": None, "comparison": {"heldout": 1}}))
    assert with_earlier(HEAD, output) == {**HEAD, "comparison": {"heldout": 1}}, "none at that time"
