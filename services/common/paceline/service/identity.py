"""Identity of callers, from client certificates, tokens and addresses; TLS files of the server."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import grpc

from paceline.service.options import OptionsError, ServerOptions

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


def server_credentials(options: ServerOptions) -> grpc.ServerCredentials | None:
    """Credentials for `options`, or None without TLS.

    Raises:
        OptionsError: A file cannot be read, is not PEM, needs a passphrase, or certificate and key
            are not a pair.
    """
    if options.tls_cert is None or options.tls_key is None:
        return None
    _check_pair(options.tls_cert, options.tls_key)
    pair = (options.tls_key.read_bytes(), options.tls_cert.read_bytes())
    if options.tls_client_ca is None:
        return grpc.ssl_server_credentials([pair])
    check_authorities(options.tls_client_ca)
    return grpc.ssl_server_credentials(
        [pair],
        root_certificates=options.tls_client_ca.read_bytes(),
        require_client_auth=True,
    )


def https_context(options: ServerOptions) -> ssl.SSLContext | None:
    """The same for HTTP. Call `server_credentials` before: it checks the files."""
    if options.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options.tls_cert, options.tls_key)
    if options.tls_client_ca is not None:
        context.load_verify_locations(options.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_pair(cert: Path, key: Path) -> None:
    # gRPC accepts wrong files and then fails each handshake without a log line.
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key, password=lambda: "")
    except OSError as error:
        raise OptionsError(
            f"the TLS files {cert} and {key} are not a PEM certificate and its key without a "
            f"passphrase: {error}"
        ) from error


def check_authorities(file: Path) -> None:
    """Check that a file holds certificates of authorities; gRPC does not.

    Raises:
        OptionsError: It cannot be read, or holds none.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(file)
    except OSError as error:
        raise OptionsError(f"{file} holds no PEM certificates of authorities: {error}") from error
