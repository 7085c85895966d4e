"""Makes one site of what a repository keeps in several places.

README, SECURITY and CONTRIBUTING become pages. Links from a page to other files of the repository
become the files' names, and must name files that are there.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
}

_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
_log = logging.getLogger("mkdocs.hooks")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie above docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead the links of a page where they lead in the repository."""
    uri = page.file.src_uri
    above = uri in PAGES.values()

    def moved(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        file = (ROOT if above else (ROOT / "docs" / uri).parent) / target
        path = file.resolve()
        if not path.exists():
            _log.warning("%s has a link to %s, which is not there", uri, target)
        if path.is_relative_to(ROOT) and str(path.relative_to(ROOT)) in PAGES:
            return f"[{text}]({PAGES[str(path.relative_to(ROOT))]}{anchor})"
        if path.is_relative_to(ROOT / "docs"):
            return f"[{text}]({path.relative_to(ROOT / 'docs')}{anchor})"
        return f"{text} (`{path.relative_to(ROOT)}`)"

    return _LINK.sub(moved, markdown)
