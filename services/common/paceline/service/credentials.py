"""TLS files read once into server credentials."""

from __future__ import annotations

from pathlib import Path

import grpc

from paceline.service.options import OptionsError, ServerOptions


def server_credentials(options: ServerOptions) -> grpc.ServerCredentials | None:
    """Credentials for `options`, or None where no TLS is asked for.

    Raises:
        OptionsError: if a file cannot be read or is not PEM.
    """
    if options.tls_cert is None or options.tls_key is None:
        return None
    pair = (_read(options.tls_key, "PRIVATE KEY"), _read(options.tls_cert, "CERTIFICATE"))
    if options.tls_client_ca is None:
        return grpc.ssl_server_credentials([pair])
    return grpc.ssl_server_credentials(
        [pair],
        root_certificates=_read(options.tls_client_ca, "CERTIFICATE"),
        require_client_auth=True,
    )


def _read(file: Path, kind: str) -> bytes:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise OptionsError(f"cannot read the TLS file {file}: {error}") from error
    if b"-----BEGIN " not in content or kind.encode() + b"-----" not in content:
        raise OptionsError(f"the TLS file {file} holds no PEM {kind}")
    return content
