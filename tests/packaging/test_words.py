"""One word for one thing, one place for each description: rules of CONTRIBUTING.md."""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("kernels", "services", "client")
PACKAGES = (*PRODUCT, "train", "bench")

GIVEN_UP = (
    *("TreeSegment", "LevelSegment", "ContextSegment", "chain_segments", "BlockTables", "CBlock"),
    *("BlockFormat", "RowBlock", "BLOCK_INS", "BLOCK_ROWS", "MAX_BLOCK", "BLOCK_TOKENS"),
    *("StateBlock", "Followers", "follow_rank_0", "_Seat", "Running"),
)  # names that had a word with another meaning
SENT = ("KvPages", "TokenTree")  # classes with the name of the message that they are sent as
# Structures of ctypes: their fields are no statements that a docstring could follow.
NO_STATEMENTS = ("DraftText",)


@cache
def modules() -> dict[Path, ast.Module]:
    files = [file for folder in PACKAGES for file in sorted((ROOT / folder).rglob("*.py"))]
    return {file.relative_to(ROOT): ast.parse(file.read_text()) for file in files}


def identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, (ast.arg, ast.keyword)):
            yield node.arg or ""
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


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


@pytest.mark.parametrize("name", sorted(set(table()) - {"paceline.kernels.triton"}))
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


def test_words_that_were_given_up_do_not_come_back() -> None:
    back = [
        f"{file}: {name}"
        for file, tree in modules().items()
        for name in sorted(set(identifiers(tree)) & set(GIVEN_UP))
    ]
    for file in sorted((ROOT / "kernels").rglob("*.[ch]")):
        words = set(re.findall(r"\w+", file.read_text()))
        back += [f"{file.relative_to(ROOT)}: {name}" for name in sorted(words & set(GIVEN_UP))]
    assert not back, "see the table of words in CONTRIBUTING.md"


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


def test_fields_are_described_under_the_field() -> None:
    twice = [
        f"{file}: {node.name}"
        for file, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and "\nAttributes:" in (ast.get_docstring(node) or "")
        and node.name not in NO_STATEMENTS
    ]
    assert not twice, "a docstring under each field describes it, not one of the class"


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
