"""Text files that users write, on any system."""

from __future__ import annotations

import codecs
import os.path
from pathlib import Path

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins with the mark of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)  # byte order marks, which editors and shells of Windows write, and their encodings


def user_path(text: str) -> Path:
    """Return the path in a text, with the home folder in place of `~`: shells leave it in
    `--file=~/x`, config files and the environment. Command lines take it for `type=Path`."""
    return Path(os.path.expanduser(text))


def read_text(path: Path) -> str:
    """Return the text of a file, as of `decoded`. Raises OSError: it cannot be read; ValueError: it
    is no text."""
    return decoded(path.read_bytes(), str(path))


def decoded(content: bytes, name: str, encoding: str = "utf-8") -> str:
    """Return text that another program wrote in an encoding. A byte order mark at its begin names
    another encoding and is no part of the text. Line ends of Windows become "\\n". Raises
    ``ValueError``, with the name of the content, if it is not text in the encoding."""
    encoding = next((codec for mark, codec in _MARKS if content.startswith(mark)), encoding)
    try:
        return content.decode(encoding).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not text in {encoding.removesuffix('-sig').upper()}: byte {error.start} is "
            f"invalid ({error.reason}); save it in UTF-8"
        ) from None
