"""Stop strings, against a reference that looks at the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.client._output import StopMatcher

WORDS = st.text("abc", min_size=1, max_size=5)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Text and stop string, found by growing the text a character at a time."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(st.lists(st.text("abc", max_size=6), max_size=12), st.lists(WORDS, max_size=4))
def test_equals_the_reference_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    released = "".join(matcher.push(piece) for piece in pieces)
    if matcher.matched is None:
        released += matcher.flush()
    assert (released, matcher.matched) == reference("".join(pieces), stops)


@given(st.lists(st.text("abc", max_size=6), max_size=12), st.lists(WORDS, min_size=1, max_size=4))
def test_holds_back_no_more_than_the_beginning_of_a_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    seen, released = "", ""
    for piece in pieces:
        seen += piece
        released += matcher.push(piece)
        if matcher.matched is not None:
            return
        held = seen[len(released) :]
        assert seen.startswith(released)
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert held not in stops


def test_after_a_match_nothing_comes() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.push("ab") == "a"
    assert matcher.push("a") == ""
    assert matcher.matched == "b"
