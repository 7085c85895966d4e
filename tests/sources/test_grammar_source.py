"""Guesses under a grammar, of a grammar that is a list of what may come at each place."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.sources.grammar import GrammarOwners, GrammarSource, TokenForms

FREE = range(1000)  # more tokens than a place that is remembered has
END = 999


class Places:
    """A grammar whose n-th token is any of the n-th set, whatever came before."""

    forms = TokenForms([b"word"] * 1000)

    def __init__(self, *places: list[int] | range) -> None:
        self._places = places
        self.text: list[int] = []

    def allowed(self) -> NDArray[np.uint8]:
        bits = np.zeros(1024, np.uint8)
        bits[list(self._places[len(self.text)])] = 1
        return np.packbits(bits, bitorder="little")

    def accepts(self, tokens: Sequence[int]) -> int:
        for count, (token, place) in enumerate(
            zip(tokens, self._places[len(self.text) :], strict=False)
        ):
            if token not in place:
                return count
        return len(tokens)

    def push(self, token: int) -> None:
        assert token in self._places[len(self.text)], "only what may come next"
        self.text.append(token)

    def pop(self, tokens: int) -> None:
        del self.text[len(self.text) - tokens :]


def emit(grammar: Places, source: GrammarSource, *tokens: int) -> None:
    """A step of the verifier."""
    for token in tokens:
        grammar.push(token)
    source.extend(tokens)


def test_what_is_forced_is_proposed_up_to_where_the_text_is_free() -> None:
    grammar = Places([5], [6], FREE, [7])
    tree = GrammarSource(grammar).propose(8)
    assert tree.tokens == (5, 6)
    assert min(tree.confidences) > 0.9
    assert grammar.text == [], "the grammar is where it was"


def test_no_path_goes_behind_its_end_or_the_most_tokens() -> None:
    assert GrammarSource(Places([5], [END], [6]), [END]).propose(8).tokens == (5,)
    assert GrammarSource(Places([1], [2], [3])).propose(2).tokens == (1, 2)
    assert not len(GrammarSource(Places([1])).propose(0))


def test_what_was_chosen_among_the_same_tokens_is_chosen_again() -> None:
    grammar = Places([1, 2], FREE, [3, 4], [1, 2], [3, 4], [8, 9])
    source = GrammarSource(grammar)
    assert not len(source.propose(8)), "nothing is known yet"
    emit(grammar, source, 2, 77, 3)
    assert source.propose(8).tokens == (2, 3), "8 or 9 was never to choose from"


def test_confidence_falls_where_the_choice_changes() -> None:
    """And rises where it does not; free text is never guessed."""
    found = []
    for change in (0, 1):
        grammar = Places(*[[1, 2]] * 40)
        source = GrammarSource(grammar)
        for number in range(20):
            emit(grammar, source, 1 + number // 2 * change % 2)
        found.append(source.propose(1))
    assert found[0].confidences[0] > 0.9
    assert not len(found[1])


def test_a_choice_depends_on_the_token_before_it_where_that_is_known() -> None:
    grammar = Places(*[[1, 2], [5, 6]] * 20)
    source = GrammarSource(grammar)
    for number in range(10):
        emit(grammar, source, 1 + number % 2, 5 + number % 2)
    assert source.propose(4).tokens == (1, 5, 2, 6)


class Written(Places):
    texts = (b"a", b"b", b"c", b"{", b",", b"}", b" ", b"\n ", b"\n   ", b"\n     ", b" {")
    forms = TokenForms(texts)

    def __init__(self, *places: tuple[bytes, ...]) -> None:
        super().__init__(*([self.texts.index(text) for text in place] for place in places))


A, B, C, OPEN, COMMA, CLOSE, BLANK, ONE, THREE, FIVE, BLANK_OPEN = range(len(Written.texts))


def test_what_has_the_form_of_a_known_place_is_written_alike() -> None:
    """The words that may come there are others."""
    first, second, line = (b"a", b","), (b"b", b","), (b" ", b"\n ", b"{")
    grammar = Written(first, (*line, b"a"), second, (*line, b"b"), (b"c", b"}"))
    source = GrammarSource(grammar)
    emit(grammar, source, COMMA, BLANK)
    assert source.propose(2).tokens == (), "a comma behind a blank was never seen"
    emit(grammar, source, COMMA)
    assert source.propose(1).tokens == (BLANK,)


def test_line_breaks_are_indented_as_the_lines_before() -> None:
    """Behind a bracket by more, and behind a comma by the same, at any depth."""
    lines = b"\n ", b"\n   ", b"\n     "
    opened, next_line = (*lines, b"{"), (*lines, b"a", b"}")
    grammar = Written((b"{", b" {"), opened, (b"a", b","), next_line, (b"{", b" {"), opened)
    source = GrammarSource(grammar)
    emit(grammar, source, OPEN, ONE, COMMA, ONE, BLANK_OPEN)
    assert source.propose(1).tokens == (THREE,)


def test_a_form_that_the_grammar_forbids_is_not_proposed() -> None:
    grammar = Written((b"{",), (b"\n ", b"\n   "), (b"{",), (b"\n ", b" "))
    source = GrammarSource(grammar)
    emit(grammar, source, OPEN, THREE, OPEN)
    assert source.propose(1).tokens == ()


def test_texts_of_an_owner_know_what_earlier_ones_chose() -> None:
    owners = GrammarOwners()
    for owner, known in (("a", ()), ("a", (2, 4)), ("b", ()), ("", ()), ("", ())):
        grammar = Places([1, 2], [3, 4], FREE)
        source = owners.start(grammar, owner)
        assert source.propose(8).tokens == known
        emit(grammar, source, 2, 4)


@given(st.lists(st.sampled_from([(1,), (2, 3), (4, 5, 6)]), min_size=1, max_size=30), st.data())
def test_a_path_is_always_allowed(places: list[tuple[int, ...]], data: st.DataObject) -> None:
    grammar = Places(*map(list, places), FREE)
    source = GrammarSource(grammar)
    for place in places:
        tree = source.propose(16)  # `push` asserts that each token may come
        assert tree.is_chain
        assert all(0 < each <= 1 for each in tree.confidences)
        emit(grammar, source, data.draw(st.sampled_from(place)))


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_of_many_tokens_teaches_as_single_ones_do(count: int) -> None:
    grammar = Places(*[[1, 2], [3, 4], [5]] * 4)
    source = GrammarSource(grammar)
    text = [1, 4, 5] * 3
    for start in range(0, len(text), count):
        emit(grammar, source, *text[start : start + count])
    assert source.propose(3).tokens == (1, 4, 5)
