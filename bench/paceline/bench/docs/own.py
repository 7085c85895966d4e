"""Numbers in a page's own words: those that look measured must be known to be something else."""

import re
from collections.abc import Iterator
from pathlib import Path

KNOWN = Path("docs/site/numbers.txt")

_CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", re.DOTALL)
_VERSION = re.compile(r"\b(?:Python|PyTorch|Triton|CUDA|sections?|tables?) \d+\.\d+")
_NUMBER = re.compile(r"(?<![\w.§-])(?:\d[\d,]*(?:\.\d+)?\s?%|\d+\.\d+(?!\.?\d|\w))")


def unexplained(page: str, known: str) -> Iterator[str]:
    """Lines of a page with a decimal number or a percentage that nothing accounts for.

    Args:
        page: A page without its generated parts.
        known: Phrases with numbers that are no measurements of ours, one a line: settings, other
            people's results. Numbers of versions, sections and tables need not be there.
    """
    words = _VERSION.sub("", _CODE.sub("", page))
    for phrase in known.splitlines():
        if phrase and not phrase.startswith("#"):
            words = words.replace(phrase, "")
    for line in words.splitlines():
        if _NUMBER.search(line):
            yield line.strip()
