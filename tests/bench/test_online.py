"""The new workload of the loop of learning."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench.online.workload import LENGTH, of_package

TARGET = Path("models/demo/target")


def test_what_is_measured_on_was_never_recorded() -> None:
    found = of_package("rich", "*.py", TARGET, traffic=12, heldout=4)
    assert (len(found.traffic), len(found.heldout)) == (12, 4)
    assert not {text.file for text in found.traffic} & {text.file for text in found.heldout}
    prompts = [tuple(text.tokens) for text in (*found.traffic, *found.heldout)]
    assert {len(prompt) for prompt in prompts} == {LENGTH}
    assert len(set(prompts)) == 16
    assert of_package("rich", "*.py", TARGET, traffic=12, heldout=4) == found


@pytest.mark.parametrize("name", ["json", "no_such_package", "keyword"])
def test_what_a_target_may_have_seen_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="site-packages"):
        of_package(name, "*.py", TARGET, traffic=1, heldout=1)


def test_too_few_files_give_what_there_is() -> None:
    found = of_package("rich", "__main__.py", TARGET, traffic=500, heldout=500)
    assert 0 < len(found.traffic) + len(found.heldout) < 500
