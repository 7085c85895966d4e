"""What documents name is there: files, headings, commands, options, and the words of the code."""

import argparse
import ast
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

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
def program() -> argparse.ArgumentParser:
    return build_parser(COMMANDS)


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


@cache
def all_options(parser: argparse.ArgumentParser) -> frozenset[str]:
    """What a command and its sub-commands take."""
    below = (all_options(command) for command in subcommands(parser).values())
    return frozenset(parser._option_string_actions).union(*below)


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_the_options_that_are_shown(page: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = []
    for command in commands(page):
        name, *words = command.split() or [""]
        if name == "make":
            wrong += [command for word in words if "=" not in word and word not in targets]
        elif name == "paceline" and not command.startswith(NO_COMMANDS):
            shown = {w.partition("=")[0] for w in words if re.match(r"--\w", w)}
            wrong += [f"{command}: {each}" for each in shown - options_of(program(), words)]
    assert not wrong


@pytest.mark.parametrize("page", PAGES)
def test_options_without_a_command_are_those_of_some(page: str) -> None:
    spans = re.findall(r"`([^`]+)`", _BLOCK.sub("", text_of(page)))
    shown = {option for span in spans for option in re.findall(r"(?<![\w-])--\w[\w-]*", span)}
    assert shown <= all_options(program()) | FOREIGN_OPTIONS


PRODUCT = ("kernels", "services", "client")
PACKAGES = (*PRODUCT, "train", "bench")
SENT = ("KvPages", "TokenTree")  # classes with the name of the message that they are sent as


@cache
def modules() -> dict[Path, ast.Module]:
    files = [file for folder in PACKAGES for file in sorted((ROOT / folder).rglob("*.py"))]
    return {file.relative_to(ROOT): ast.parse(file.read_text()) for file in files}


def table() -> list[str]:
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Words")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [row.rstrip("| ").rpartition("|")[2].strip(" `") for row in rows]


def found(name: str) -> Any:
    """A module, or what is in it. A field without a default is named by its class."""
    parts, value = name.split("."), None
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            fields = getattr(value, "__annotations__", {})
            value = fields[part] if part in fields else getattr(value, part)
        return value
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("name", sorted(set(table()) - {"paceline.cuda.triton"}))
def test_the_words_of_the_table_are_in_the_code(name: str) -> None:
    assert found(name) is not None


def test_docstrings_name_what_is_in_the_code() -> None:
    named = {
        name
        for file in modules()
        for name in re.findall(r":\w+:`~?(paceline\.[\w.]+)`", (ROOT / file).read_text())
    }
    assert len(named) > 50
    for name in sorted(named):
        assert found(name) is not None


def test_a_class_name_means_one_class_of_the_product() -> None:
    places: dict[str, list[Path]] = {}
    for file in sorted((ROOT / "protos" / "paceline").rglob("*.proto")):
        for name in re.findall(r"^message (\w+)", file.read_text(), re.MULTILINE):
            if name not in SENT:
                places[name] = [file.relative_to(ROOT)]
    for file, tree in modules().items():
        if file.parts[0] != "bench":
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(file)
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert not twice


def test_constants_stand_at_the_head_of_files() -> None:
    late = []
    for file, tree in modules().items():
        # What a constant may need: it then stands behind it.
        needed: set[str] = set()
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                needed.add(node.name)
                continue
            if not needed or not isinstance(node, (ast.Assign, ast.AnnAssign)):
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            read = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            stored = {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
            if not needed & read and isinstance(target, (ast.Name, ast.Tuple)):
                late.append(f"{file}:{node.lineno}: {ast.unparse(target)}")
            needed |= stored
    assert not late, "they need no function or class of the file"
