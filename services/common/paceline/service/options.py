"""Options of a server, as a dataclass and as command-line arguments."""

import argparse
import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from paceline.service.arguments import add_options, given_options, option

TOKEN_VARIABLE = "PACELINE_TOKEN"
TOKEN_FILE_VARIABLE = "PACELINE_TOKEN_FILE"
MEBIBYTE = 1 << 20


class OptionsError(ValueError):
    """Options that cannot be served."""


@dataclass(frozen=True)
class ServerOptions:
    """Validated options of one server.

    Raises:
        OptionsError: They contradict each other, or would serve other machines without TLS and a
            token.
    """

    address: str
    """`host:port` (port 0: any free one), `[v6]:port` or `unix:/path`."""
    tls_cert: Path | None = option(None, "PEM certificate chain of the server", metavar="PEM")
    tls_key: Path | None = option(None, "PEM private key of --tls-cert", metavar="PEM")
    tls_client_ca: Path | None = option(
        None,
        "PEM authorities of client certificates; if given, every client must present one (mTLS)",
        metavar="PEM",
    )
    token: str | None = None
    """Bearer token required of every call but health. None: no token is required."""
    max_message_bytes: int = 64 * MEBIBYTE
    """Largest message received or sent."""
    max_concurrent_streams: int = option(
        1024, "calls in flight on one connection; more of them wait in the client", metavar="N"
    )
    drain_seconds: float = option(
        30.0, "how long generations in flight may continue after SIGTERM", metavar="S"
    )
    metrics_address: str | None = option(
        None,
        "serve metrics for Prometheus at this address, under /metrics (default: none)",
        metavar="HOST:PORT",
    )
    insecure_metrics: bool = option(
        False, "serve metrics to everyone who reaches --metrics-address, without TLS and token"
    )

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionsError("TLS needs both a certificate and a key; only one was given")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise OptionsError("client authorities need TLS: give a certificate and a key too")
        if self.token is not None and (not self.token.isascii() or not self.token.isprintable()):
            raise OptionsError("the token holds characters that gRPC metadata cannot carry")
        if self.token is not None and not self.token.strip():
            raise OptionsError("the token is empty")
        if self.max_message_bytes < 4096 or self.max_message_bytes > 2**31 - 1:
            raise OptionsError("the message limit must lie between 4096 bytes and 2 GiB")
        if self.max_concurrent_streams < 1:
            raise OptionsError("at least one concurrent stream must be allowed")
        if not 0 <= self.drain_seconds < float("inf"):
            raise OptionsError("the drain time must be a finite number of seconds, 0 or more")
        secured = self.tls_cert is not None and self.token is not None
        if not secured and not stays_on_this_machine(self.address):
            raise OptionsError(
                f"refusing to listen on {self.address} without TLS and a token: give --tls-cert, "
                f"--tls-key and --token-file (or {TOKEN_VARIABLE}), or listen on 127.0.0.1 or "
                "unix:/path"
            )
        if self.metrics_address is not None:
            self._check_metrics(self.metrics_address, secured)
        elif self.insecure_metrics:
            raise OptionsError("--insecure-metrics has no effect without --metrics-address")

    def _check_metrics(self, address: str, secured: bool) -> None:
        if socket_path_of(address) is not None:
            raise OptionsError(f"metrics are served over TCP only: {address} is no host:port")
        local = stays_on_this_machine(address)
        if not (local or secured or self.insecure_metrics):
            raise OptionsError(
                f"refusing to serve metrics on {address} without TLS and a token: give --tls-cert, "
                f"--tls-key and --token-file (or {TOKEN_VARIABLE}), serve them on 127.0.0.1, or "
                "give --insecure-metrics if everyone who reaches that address may read them"
            )

    @property
    def metrics_host_and_port(self) -> tuple[str, int] | None:
        """Host and port to serve metrics at, if any."""
        return None if self.metrics_address is None else split_address(self.metrics_address)

    @property
    def socket_path(self) -> Path | None:
        """File of a unix socket; None for TCP."""
        return socket_path_of(self.address)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Options from `args.address` and what `add_server_arguments` parsed.

        Raises:
            OptionsError: As above, or the token file cannot be read.
        """
        return cls(
            address=args.address,
            token=read_token(args.token_file),
            max_message_bytes=args.max_message_mib * MEBIBYTE,
            **given_options(args, cls),
        )


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `ServerOptions.from_args` reads, without the address."""
    server = parser.add_argument_group("server")
    add_options(server, ServerOptions)
    server.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"file with the bearer token clients must send "
        f"(or set {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE})",
    )
    server.add_argument(
        "--max-message-mib",
        type=int,
        default=64,
        metavar="N",
        help="largest message, in MiB (default: %(default)s)",
    )


def read_token(file: Path | None) -> str | None:
    """The token from `file`, else from the environment or a file that it names, else None.

    Raises:
        OptionsError: The file cannot be read or holds no token.
    """
    return read_secret("token", file, TOKEN_VARIABLE, TOKEN_FILE_VARIABLE)


def read_secret(what: str, file: Path | None, variable: str, file_variable: str) -> str | None:
    """A secret from `file`, else from `variable`, else from the file in `file_variable`, else None.

    Raises:
        OptionsError: The file cannot be read or is empty; the message calls the secret `what`.
    """
    if file is None and (secret := os.environ.get(variable, "").strip()):
        return secret
    if file is None and (named := os.environ.get(file_variable)):
        file = Path(named)
    if file is None:
        return None
    try:
        secret = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionsError(f"cannot read the {what} file {file}: {error}") from error
    if not secret:
        raise OptionsError(f"the {what} file {file} is empty")
    return secret


def stays_on_this_machine(address: str) -> bool:
    """Whether only processes of this machine can reach an address.

    Raises:
        OptionsError: It is malformed, or its host cannot be resolved.
    """
    if socket_path_of(address) is not None:
        return True
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OptionsError(f"cannot resolve the host of address {address}: {error}") from error
    return all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in found)


def socket_path_of(address: str) -> Path | None:
    """File of a unix socket's address; None for TCP. Raises OptionsError if it is empty."""
    if not address.startswith("unix:"):
        return None
    path = address.removeprefix("unix:")
    path = path.removeprefix("//") if path.startswith("///") else path
    if not path or path.startswith("//"):
        raise OptionsError(f"address {address} has no socket path: write unix:/path")
    return Path(path)


def split_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of a TCP address. Raises OptionsError if malformed."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise OptionsError(f"address {address!r} is neither host:port, [v6]:port nor unix:/path")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise OptionsError(f"address {address!r} needs a port between 0 and 65535")
    return host[1:-1] if bracketed else host, int(port)
