"""MkDocs hooks: adds README, SECURITY and CONTRIBUTING as pages, and the help of each command.

Links from a page to other files of the repository become file names. A link to a missing file is a
warning, which fails the strict build.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from paceline.cli.main import COMMANDS, build_parser

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
}

_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
_log = logging.getLogger("mkdocs.hooks")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, and the reference of the command line."""
    files.append(File.generated(config, "cli.md", content=_command_line()))
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def _command_line() -> str:
    os.environ["COLUMNS"] = "96"
    parts = ["# Command line", "What `--help` prints."]
    for parser in _parsers(build_parser(COMMANDS)):
        text = parser.format_help().strip()
        parts.append(f"## {parser.prog}\n\n```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for each in action.choices.values():
                yield from _parsers(each)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links relative to the repository as links within the site."""
    uri = page.file.src_uri
    above = uri in PAGES.values()

    def moved(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        file = (ROOT if above else (ROOT / "docs" / uri).parent) / target
        path = file.resolve()
        if not path.exists():
            _log.warning("%s links to %s, which does not exist", uri, target)
        if path.is_relative_to(ROOT) and str(path.relative_to(ROOT)) in PAGES:
            return f"[{text}]({PAGES[str(path.relative_to(ROOT))]}{anchor})"
        if path.is_relative_to(ROOT / "docs"):
            return f"[{text}]({path.relative_to(ROOT / 'docs')}{anchor})"
        return f"{text} (`{path.relative_to(ROOT)}`)"

    return _LINK.sub(moved, markdown)
