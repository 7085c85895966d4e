"""Generated parts of Markdown pages.

`<!-- results: NAME -->...<!-- end -->` holds what the block of that name makes of the results, and
`<!-- result: TOPIC PATH FORMAT -->...<!-- end -->` one figure: `PATH` leads to it in the topic's
file, `FORMAT` is as in Python's f-strings. Both are invisible to readers; behind a backtick they
are mere words.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from paceline.bench.docs.blocks import BLOCKS
from paceline.bench.docs.results import FigureError, Results

_PART = re.compile(
    r"(?<!`)<!-- (?P<kind>results?): (?P<what>[^>]+?) -->(?P<text>.*?)<!-- end -->", re.DOTALL
)


def pages(root: Path) -> Iterator[Path]:
    """README, and all pages of docs/."""
    yield root / "README.md"
    yield from sorted((root / "docs").glob("*.md"))


def filled(page: str, results: Results) -> str:
    """A page with its generated parts made anew.

    Raises:
        FigureError: A part is not known, or its figures are not there.
    """
    opened = len(re.findall(r"(?<!`)<!-- results?: ", page))
    if opened != len(re.findall(r"(?<!`)<!-- end -->", page)):
        raise FigureError(f"{opened} parts are opened, but not as many ended by <!-- end -->")

    def made(part: re.Match[str]) -> str:
        what = part["what"]
        if part["kind"] == "result":
            topic, path, how = _asked(what)
            text = format(results.value(topic, path), how)
        elif what in BLOCKS:
            text = BLOCKS[what](results)
            if part["text"].startswith("\n"):
                text = f"\n{text}\n"
        else:
            raise FigureError(f"no block is named {what!r}: expected one of {sorted(BLOCKS)}")
        if "\n" not in text and page[: part.start()].endswith("\n"):
            raise FigureError(f"{what!r} begins a line, where Markdown takes it for HTML")
        return f"<!-- {part['kind']}: {what} -->{text}<!-- end -->"

    return _PART.sub(made, page)


def without_parts(page: str) -> str:
    """A page's own words: generated parts left out."""
    return _PART.sub("", page)


def _asked(what: str) -> tuple[str, str, str]:
    try:
        topic, rest = what.split(" ", 1)
        path, how = rest.rsplit(" ", 1)
    except ValueError as error:
        raise FigureError(f"{what!r} is no figure: expected TOPIC PATH FORMAT") from error
    return topic, path, how
