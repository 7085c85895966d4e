"""What callers send and models write: random sampling parameters, and random texts of calls.

PACELINE_FUZZ_SECONDS is the duration of each test; without it they are skipped.
PACELINE_FUZZ_SEED is the seed.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "kernels")]

import test_sampling_extremes as extremes  # noqa: E402
from gateway import test_call_forms as calls  # noqa: E402

SECONDS = float(os.environ.get("PACELINE_FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("PACELINE_FUZZ_SEED", "1"))
EXAMPLES = 200  # examples of each seed; the duration is looked at between two seeds

pytestmark = pytest.mark.skipif(not SECONDS, reason="PACELINE_FUZZ_SECONDS is not set")

fragments = st.sampled_from(
    [text[at : at + 9] for text, _ in calls.FORMS.values() for at in range(0, len(text), 9)]
)  # pieces of calls in the forms of all families
texts = st.lists(st.one_of(fragments, st.text(max_size=4)), max_size=24).map("".join)


def fuzz(check: Callable[..., None], *strategies: st.SearchStrategy[Any]) -> int:
    """Check random examples for some time; returns how many."""
    count, end, number = 0, monotonic() + SECONDS, SEED
    while monotonic() < end:

        @seed(number)
        @settings(max_examples=EXAMPLES, database=None, deadline=None, phases=[Phase.generate])
        @given(example=st.tuples(*strategies))
        def run(example: tuple[Any, ...]) -> None:
            nonlocal count
            count += 1
            check(*example)

        run()
        number += 1
    return count


def test_sampling_parameters() -> None:
    """Each ends in the token of the definition, for ordinary logits and for strange ones."""
    ordinary = extremes.test_any_parameters_choose_the_token_of_the_definition
    strange = extremes.test_strange_logits_end_in_a_token_too

    def check(params: Any, number: int, row: Any) -> None:
        ordinary.hypothesis.inner_test(params, number)
        strange.hypothesis.inner_test(params, row)

    count = fuzz(check, extremes.extreme_params, st.integers(0, 1000), extremes.strange_rows)
    print(f"{count} sampling parameters")
    assert count


def test_texts_of_calls() -> None:
    """A text that is streamed one character at a time is read as the whole text is."""

    def check(text: str) -> None:
        whole = calls.parsed(calls.parser_of(calls.USE, frozenset()), [text])
        assert calls.parsed(calls.parser_of(calls.USE, frozenset()), list(text)) == whole

    print(f"{fuzz(check, texts)} texts of calls")
