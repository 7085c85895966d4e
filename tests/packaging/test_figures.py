"""Figures of documents are those of result files, which say what was measured on which code.

A comment behind a paragraph or table says where each of its figures comes from, in their order::

    <!--figures cpu-2x-amd-epyc-26-2-table: chat_T_0_1_user/contestants/paceline_int4_none/...-->

A word that ends with a colon names a file of ``bench/results``. Every other word is a path below
the file's ``results``, or from its top where it begins with ``/``. In a path ``_`` stands for what
is neither letter nor digit, ``{a|b}`` for one value after the other, ``*`` for any name.
``min(PATH)``, ``max(PATH)`` and ``sum(PATH)`` are of all that are found, ``ratio(PATH;PATH)`` and
``less(PATH;PATH)`` of two: a / b, and 1 - a / b; ``ms(PATH)`` is of microseconds. Values are
rounded as the text is, and are percentages or millions where it says so.
"""

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
FILES = sorted(RESULTS.glob("*.json"))
PAGES = ("README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))))
PAGES += tuple(str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("models/*/*/README.md")))
PICTURES = ("docs/images/speed.svg",)  # whose words are a paragraph
# Pages whose every figure has a file. Elsewhere those of paragraphs that name one do.
WHOLE = ("README.md", "docs/evidence.md", *PICTURES)
_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
_LIST = rf"{_NUMBER}(?:(?:,\s|\sand\s|\sor\s|\sto\s){_NUMBER})*"
_COUNTS = r"(?<![\w.,-])" + _LIST.replace(r"(?:\.\d+)?", "")
_FIGURE = re.compile(rf"(?<![\w.-])({_NUMBER})(%| million|)(?!\w|-[a-z]|\.\d)")
_COUNTED = "bits?|cores|nodes|positions|prompts|rows|texts|tokens|trees|users?|at once"
_NO_FIGURES = re.compile(
    "|".join((
        r"^ *```.*?^ *```", r"`[^`]*`", r"\]\([^)]*\)", r"<!--.*?-->", r"<\w[^>]*>",
        r"^\|(?:[^|]*\|)+\n\|(?: *[-:]+ *\|)+$", r"^\|[^|]*\|",  # heads and labels of tables
        r"\d+ [A-Z][a-z]+ \d{4}", r"\d+(?:\.\d+){2,}", r"arXiv \S+",  # dates, versions, papers
        rf"\b(?:CUDA|Python|PyTorch|Triton|WSL|Qwen|Gemma|Phi|SmolLM|OLMo) {_LIST}",
        rf"\b(?:family|model|section|T =|behind)\s{_LIST}", rf"{_LIST}\s[bm]illion\sparameters",
        rf"{_NUMBER} [MB]\b",  # sizes of models
        rf"{_COUNTS}\s(?:{_COUNTED})\b(?!/)",  # what was set, unless it is a rate
    )),
    re.MULTILINE | re.DOTALL,
)  # fmt: skip
_OF_ALL = {"min": min, "max": max, "sum": sum}
_MARKER = re.compile(r"^<!--figures\s(.*?)-->", re.MULTILINE | re.DOTALL)


@cache
def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def paths(template: str) -> Iterator[str]:
    """A template's paths: of ``{a|b}`` first all with a."""
    head, brace, rest = template.partition("{")
    if not brace:
        yield template
        return
    choices, _, tail = rest.partition("}")
    for choice in choices.split("|"):
        yield from paths(head + choice + tail)


def values(found: Any, path: str) -> Iterator[float]:
    if not path:
        assert isinstance(found, int | float), f"{found!r} is no number"
        yield found
        return
    name, _, rest = path.partition("/")
    items = found.items() if isinstance(found, dict) else enumerate(found)
    for key, value in items:
        if fnmatchcase(re.sub(r"[\W_]+", "_", str(key)), name):
            yield from values(value, rest)


def evaluate(name: str, word: str) -> Iterator[float]:
    """The values of one word of a marker."""
    call = re.fullmatch(r"(min|max|sum|ratio|less|ms)\((.*)\)", word)
    found = [
        list(values(results(name), path[1:] if path.startswith("/") else f"results/{path}"))
        for part in (call[2] if call else word).split(";")
        for path in paths(part)
    ]
    if call and call[1] in _OF_ALL:
        yield _OF_ALL[call[1]](chain(*found))
        return
    every = [value for [value] in found]
    if call and call[1] in ("ratio", "less"):
        first, second = every
        yield first / second if call[1] == "ratio" else 1 - first / second
        return
    yield from (value / (1000 if call else 1) for value in every)


def marked(marker: str) -> list[float]:
    name, found = "", []
    for word in marker.split():
        if word.endswith(":"):
            name = word[:-1]
        else:
            try:
                found += evaluate(name, word)
            except ValueError as error:
                raise AssertionError(f"{name}: {word}: expected one value") from error
    return found


def figures(text: str) -> list[tuple[str, str]]:
    """The figures of a text, with their units."""
    return _FIGURE.findall(_NO_FIGURES.sub(" ", text))


def differences(text: str, expected: list[float]) -> list[str]:
    """What a text says otherwise than its files."""
    shown, scales = figures(text), {"%": 100, " million": 1e-6, "": 1}
    wrong = [] if len(shown) == len(expected) else [f"{len(shown)} figures, {len(expected)} values"]
    for (number, unit), value in zip(shown, expected, strict=False):
        decimals = len(number.partition(".")[2])
        if abs(float(number.replace(",", "")) - value * scales[unit]) > 0.501 * 10**-decimals:
            wrong.append(f"{number}{unit} is {value * scales[unit]:.{decimals + 2}f}")
    return wrong


def blocks(page: str) -> Iterator[tuple[str, str | None]]:
    """Paragraphs and tables of a page, with the marker behind each."""
    if page in PICTURES:
        drawn = (ROOT / page).read_text()
        marker = _MARKER.search(drawn)
        yield " ".join(re.findall(r"<text[^>]*>(.*?)</text>", drawn)), marker and marker[1]
        return
    text = re.sub(
        r"^( *)```.*?^\1```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL
    )
    before = ""
    for block in (*re.split(r"\n\s*\n", text), ""):
        marker = _MARKER.match(block)
        if before:
            yield before, marker and marker[1]
        before = "" if marker else block


@pytest.mark.parametrize("page", [*PAGES, *PICTURES])
def test_figures_are_those_of_result_files(page: str) -> None:
    wrong = []
    for block, marker in blocks(page):
        named = page in WHOLE or re.search(r"bench/results/[\w.-]+\.json", block)
        if marker is not None or (named and figures(block)):
            found = differences(block, marked(marker or ""))
            wrong += [f"{block[:60]!r}: {'; '.join(found)}"] if found else []
    assert not wrong, "\n".join(wrong)


def test_every_result_file_has_a_page() -> None:
    text = "\n".join((ROOT / page).read_text() for page in PAGES)
    assert not [file.name for file in FILES if file.stem not in text]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_result_files_name_command_commit_machine_and_models(file: Path) -> None:
    found = json.loads(file.read_text())
    assert found["machine"]["kind"]
    for title, entry in found["results"].items():
        made = found | entry
        assert re.fullmatch(r"[0-9a-f]{8,40}", made["commit"]), title
        assert made["command"], title
        weights = [made.get("target"), *made.get("digests", {}).values()]
        assert all(re.fullmatch(r"[0-9a-f]{64}", each) for each in weights if each), title
        assert any(weights) or "weights" in made, title
        trained = re.search(r"dspark|longspec|eagle3|mtp", " ".join(drafters(entry)))
        assert not trained or made.get("digests"), title


def drafters(entry: dict[str, Any]) -> Iterator[str]:
    for part in ("contestants", "arms", "drafters"):
        yield from entry.get(part, ())


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("1.12 tokens a round, 30% of 2 cores, 4 bits, 9.5 million tokens, 12.3 tokens/s", False),
        ("1.12 times, 31%, 9.5 million and 12.3", True),
        ("1.1 times and 30%", True),
        ("1.12 times, 30%, 9.5 million, 12.3 and 7 of 8", True),
    ],
)
def test_a_figure_that_no_file_has_fails(text: str, wrong: bool) -> None:
    assert bool(differences(text, [1.1234, 0.3, 9_500_213, 12.3])) is wrong


def test_a_path_that_is_gone_fails() -> None:
    [first, *_] = results(FILES[0].stem)["results"]
    with pytest.raises(AssertionError, match="expected one value"):
        marked(f"{FILES[0].stem}: {re.sub(r'[^a-zA-Z0-9]+', '_', first)}/no_such_name")
