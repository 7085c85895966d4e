"""A cache of tokenizers, in memory and on disk."""

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
    """Tokenizers by the SHA-256 hex digest of their tokenizer.json.

    A file with the wrong digest is ignored, and so is a folder that cannot be written.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def find(self, digest: str) -> TextCodec | None:
        """The codec if it is cached. Reads and parses files: call it in a thread."""
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
        """Caches a gzip-compressed tokenizer.json from `GetModel` and returns its codec.

        Raises PreconditionError if the content does not have the digest.
        """
        content = gzip.decompress(packed)
        if hashlib.sha256(content).hexdigest() != digest:
            raise PreconditionError(
                f"the verifier's tokenizer does not have the digest {digest} of its model"
            )
        codec = _loaded[digest] = TextCodec(content)
        if self._folder is not None:
            _write_atomically(self._path(digest), packed)
        return codec

    def _path(self, digest: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{digest}.json.gz"


def _write_atomically(path: Path, content: bytes) -> None:
    """Writes a file such that no reader sees a part of it; does nothing if it cannot be written."""
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
