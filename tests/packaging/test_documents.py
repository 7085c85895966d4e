"""What documents name is there: files, headings, commands and their options."""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from paceline.cli.main import COMMANDS, build_parser

ROOT = Path(__file__).parents[2]

FOREIGN = ("multiprocessing/connection.py",)  # files of other projects that documents name
# Options of docker, vLLM and llama.cpp in backticks.
FOREIGN_OPTIONS = {
    "--rm", "--model", "--reasoning-format", "--reasoning-parser", "--tool-call-parser",
}  # fmt: skip
NO_COMMANDS = ("paceline drafts for vLLM",)  # beginnings of lines of a log, which documents quote
_ENDS = "c|h|html|js|json|jsonl|md|proto|py|sh|svg|toml|yml"
_FOLDERS = "bench|client|compose|docs|kernels|models|protos|services|tests|train"
_BLOCK = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


PAGES = sorted(
    str(page.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "bench/*/*.md", "models/*/*/*.md")
    for page in ROOT.glob(pattern)
)


@cache
def files() -> frozenset[str]:
    """All of the repository, by their paths."""
    folders = (ROOT / name for name in _FOLDERS.split("|"))
    found = (*ROOT.iterdir(), *(file for folder in folders for file in folder.rglob("*")))
    return frozenset(str(file.relative_to(ROOT)) for file in found)


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def headings(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ (.*)$", _BLOCK.sub("", text_of(page)), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.strip().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", text_of(page)):
        path, _, anchor = "".join(link).partition("#")
        if re.match(r"\w+:", path):
            continue
        file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        known = file.exists() and (not anchor or anchor in headings(str(file.relative_to(ROOT))))
        wrong += [] if known else ["".join(link)]
    assert not wrong


@pytest.mark.parametrize("page", PAGES)
def test_files_are_named_as_they_are(page: str) -> None:
    """Whole paths anywhere, their last parts in backticks."""
    paths = re.findall(rf"(?<![\w./-])((?:{_FOLDERS})/[\w./-]+\.(?:{_ENDS}))\b", text_of(page))
    names = re.findall(rf"`([\w./-]+\.(?:{_ENDS}))`", text_of(page))
    ends = [f"/{name}" for name in (*paths, *names) if name not in FOREIGN]
    missing = {end for end in ends if not any(f"/{file}".endswith(end) for file in files())}
    assert not missing


def commands(page: str) -> Iterator[str]:
    """The command lines of a page, in blocks and in backticks."""
    text = text_of(page)
    blocks = "\n".join(match[0] for match in _BLOCK.finditer(text)).replace("\\\n", " ")
    spans = re.findall(r"`([^`]+)`", _BLOCK.sub("", text))
    for line in (*blocks.splitlines(), *(" ".join(span.split()) for span in spans)):
        for command in re.split(r"[|;&#]", line):
            yield command.strip()


@cache
def subcommands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Those of a command by their names."""
    return next((each.choices for each in parser._actions if isinstance(each.choices, dict)), {})


def options_of(parser: argparse.ArgumentParser, words: Sequence[str]) -> set[str]:
    """What the command of a line takes; for a name in capitals or `...`, what any one takes.

    Raises KeyError: there is no such command.
    """
    commands = subcommands(parser)
    if not commands or not words or words[0].startswith("-"):
        return set(parser._option_string_actions)
    name, *rest = words
    any_one = name.isupper() or name == "..."
    each = commands.values() if any_one else [commands[name]]
    return set().union(*(options_of(command, rest) for command in each))


def all_options(parser: argparse.ArgumentParser) -> set[str]:
    """What a command and its sub-commands take."""
    below = (all_options(command) for command in subcommands(parser).values())
    return set(parser._option_string_actions).union(*below)


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_the_options_that_are_shown(page: str) -> None:
    parser = build_parser(COMMANDS)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = []
    for command in commands(page):
        program, *words = command.split() or [""]
        if program == "make":
            wrong += [command for word in words if "=" not in word and word not in targets]
        elif program == "paceline" and not command.startswith(NO_COMMANDS):
            shown = {w.partition("=")[0] for w in words if re.match(r"--\w", w)}
            wrong += [f"{command}: {each}" for each in shown - options_of(parser, words)]
    assert not wrong


@pytest.mark.parametrize("page", PAGES)
def test_options_without_a_command_are_those_of_some(page: str) -> None:
    spans = re.findall(r"`([^`]+)`", _BLOCK.sub("", text_of(page)))
    shown = {option for span in spans for option in re.findall(r"(?<![\w-])--\w[\w-]*", span)}
    assert shown <= all_options(build_parser(COMMANDS)) | FOREIGN_OPTIONS
