"""Tokenizers by digest: once per process in memory, once per user on disk."""

from __future__ import annotations

import gzip
import hashlib
import os
import tempfile
from pathlib import Path

from ._errors import PreconditionError
from ._text import TextCodec

_loaded: dict[str, TextCodec] = {}


class TokenizerCache:
    """Finds a tokenizer by the SHA-256 hex digest of its tokenizer.json.

    A file whose content does not have its digest is ignored; a folder that cannot be written costs
    a transfer the next time, nothing else.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def find(self, digest: str) -> TextCodec | None:
        """The codec if memory or disk has it. Reads and parses files: call it in a thread."""
        codec = _loaded.get(digest)
        if codec is None and self._folder is not None and digest:
            try:
                content = gzip.decompress(self._path(digest).read_bytes())
            except (OSError, EOFError, ValueError):
                return None
            if hashlib.sha256(content).hexdigest() == digest:
                codec = _loaded[digest] = TextCodec(content)
        return codec

    def add(self, digest: str, packed: bytes) -> TextCodec:
        """The codec of a gzip-compressed tokenizer.json as `GetModel` serves it, now cached.

        Raises PreconditionError when the content is not what the digest says.
        """
        content = gzip.decompress(packed)
        if hashlib.sha256(content).hexdigest() != digest:
            raise PreconditionError(
                f"the verifier's tokenizer does not have the digest {digest} it is announced with"
            )
        codec = _loaded[digest] = TextCodec(content)
        if self._folder is not None:
            _write_atomically(self._path(digest), packed)
        return codec

    def _path(self, digest: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{digest}.json.gz"


def _write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that readers see whole or not at all; does nothing where that is impossible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    except OSError:
        return
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
