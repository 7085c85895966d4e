"""Server credentials from TLS files."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from paceline.service.options import OptionsError, ServerOptions


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
