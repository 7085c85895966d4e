"""Identity of callers, from client certificates and bearer tokens."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import grpc

LOCAL_OWNER = "local"
_BEARER = "bearer "
# New in every process: owner names may be logged, and a weak token must not be recoverable.
_KEY = secrets.token_bytes(32)
# Subject fields of a certificate, which stay the same when it is renewed.
_SUBJECT_KEYS = ("x509_subject", "x509_subject_alternative_name", "x509_common_name")


def owner_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Identity of the caller, stable for the life of this process.

    A keyed hash of the subject of a verified client certificate, else of the bearer token (also if
    the server requires none), else `"local"`.
    """
    return owner_from(context.invocation_metadata() or (), context.auth_context() or {})


def owner_from(
    metadata: Iterable[tuple[str, str | bytes]], auth: Mapping[str, Iterable[bytes]]
) -> str:
    """The same, of a call's metadata and its transport's auth context."""
    subject = [value for key in _SUBJECT_KEYS for value in auth.get(key, ())]
    if subject:
        return _name(b"subject\0" + b"\0".join(subject))
    token = bearer_token(metadata)
    return _name(b"token\0" + token.encode()) if token else LOCAL_OWNER


def bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Token of the `authorization: Bearer ...` metadata, or None."""
    for key, value in metadata:
        if key == "authorization" and isinstance(value, str) and value.lower().startswith(_BEARER):
            return value[len(_BEARER) :].strip()
    return None


def token_matches(given: str | None, expected: str) -> bool:
    """Compare tokens in constant time."""
    return given is not None and hmac.compare_digest(_digest(given), _digest(expected))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _name(fact: bytes) -> str:
    return hashlib.blake2b(fact, key=_KEY, digest_size=16).hexdigest()
