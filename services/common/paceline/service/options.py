"""Options as fields of dataclasses and as command-line arguments, and every server's options."""

import argparse
import ipaddress
import os
import re
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, Self, get_args, get_type_hints

from paceline.service.files import read_text, user_path

TOKEN_VARIABLE = "PACELINE_TOKEN"
TOKEN_FILE_VARIABLE = "PACELINE_TOKEN_FILE"
MEBIBYTE = 1 << 20
_ARGUMENT_TYPES = {bool, int, float, str, Path}
_SIZE_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def option(default: Any, help: str, **argument: Any) -> Any:
    """Return a field of a dataclass that is also a command-line argument. The default is added to
    its description, ``help``, unless it is None or described there; ``argument`` are more arguments
    of `ArgumentParser.add_argument`, and `flag` the name, if it is not the field's."""
    return field(default=default, metadata={"help": help, **argument})


def add_options(
    group: argparse._ActionsContainer, options: type[Any], without: Collection[str] = ()
) -> None:
    """Add an argument for each `option` of a dataclass, but for the fields `without`.

    It has the field's type. A boolean is a flag that turns the default around: `--NAME`, or
    `--no-NAME` where the default is true. An argument that is not given has the value None.
    """
    types = get_type_hints(options)
    for entry in fields(options):
        if "help" not in entry.metadata or entry.name in without:
            continue
        name = _argument_of(entry)
        settings = {"default": None, "dest": name, **entry.metadata}
        settings.pop("flag", None)
        flag = name.replace("_", "-")
        (kind,) = {*get_args(types[entry.name]), types[entry.name]} & _ARGUMENT_TYPES
        if kind is bool and "action" not in settings:
            settings |= {"action": "store_const", "const": not entry.default}
            flag = f"no-{flag}" if entry.default else flag
        elif kind is not bool:
            settings.setdefault("type", kind)
            if entry.default not in (None, ()) and "default" not in settings["help"]:
                settings["help"] += f" (default: {entry.default})"
        group.add_argument(f"--{flag}", **settings)


def given_options(args: argparse.Namespace, options: type[Any]) -> dict[str, Any]:
    """Return the options of a dataclass that are in parsed arguments of `add_options`."""
    entries = [entry for entry in fields(options) if "help" in entry.metadata]
    given = {entry.name: getattr(args, _argument_of(entry)) for entry in entries}
    return {name: value for name, value in given.items() if value is not None}


def to_words(
    args: argparse.Namespace, options: type[Any], without: Collection[str] = ()
) -> list[str]:
    """Return the command line of the options of a dataclass that are in parsed arguments, but for
    the fields `without`."""
    entries = [entry for entry in fields(options) if "help" in entry.metadata]
    return words_of(args, [_argument_of(entry) for entry in entries if entry.name not in without])


def words_of(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return the command line of the named arguments that are not None; a list is repeated."""
    words = []
    for name in names:
        value, flag = getattr(args, name), name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [
                f"--{flag}={_word(item)}"
                for item in (value if isinstance(value, list) else [value])
            ]
    return words


def _word(value: object) -> str:
    """Return how a parsed value is written: names as `A,B` or `none`, numbers as `N:M`."""
    if not isinstance(value, tuple):
        return str(value)
    return (":" if value and isinstance(value[0], int) else ",").join(map(str, value)) or "none"


def _argument_of(entry: Field[Any]) -> str:
    return str(entry.metadata.get("flag", entry.name))


def byte_count(text: str) -> int:
    """Parse a size such as `4096`, `512MiB` or `1.5GiB`; an argparse type. Unit: bytes. Raises
    argparse.ArgumentTypeError: the text is not a size, or less than one byte."""
    match = _SIZE.fullmatch(text.strip())
    factor = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None or int(float(match[1]) * factor) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: give bytes, or a number with KiB, MiB, GiB or TiB"
        )
    return int(float(match[1]) * factor)


class OptionsError(ValueError):
    """Options that cannot be served."""


@dataclass(frozen=True)
class ServerOptions:
    """Validated options of one server. Raises ``OptionsError`` if they contradict each other, or
    would serve other machines without TLS and a token."""

    address: str  # `host:port` (port 0: any free one), `[v6]:port` or `unix:/path`
    tls_cert: Path | None = option(None, "PEM certificate chain of the server", metavar="PEM")
    tls_key: Path | None = option(None, "PEM private key of --tls-cert", metavar="PEM")
    tls_client_ca: Path | None = option(
        None,
        "PEM authorities of client certificates; if given, every client must present one (mTLS)",
        metavar="PEM",
    )
    token: str | None = None
    """Bearer token required of every call but health. None: no token is required."""
    max_message_bytes: int = 64 * MEBIBYTE  # largest message received or sent
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
        """Return options from `args.address` and what `add_server_arguments` parsed. Raises
        OptionsError: as above, or the token file cannot be read."""
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


def parse_environment(
    environ: Mapping[str, str], prefix: str, options: type[Any]
) -> argparse.Namespace:
    """Return the arguments of a server inside of another program, which has no command line of its
    own: ``address``, `add_server_arguments` and the fields of ``options``, each a variable of its
    name in capitals after a prefix. A flag is set by 1. Raises OptionsError: a variable is unknown
    or invalid."""
    parser = _OptionParser(add_help=False, allow_abbrev=False)
    parser.prefix = prefix
    add_server_arguments(parser)
    parser.add_argument("--address")
    add_options(parser, options)
    given = {name: value for name, value in environ.items() if name.startswith(prefix) and value}
    words = [
        f"--{name.removeprefix(prefix).lower().replace('_', '-')}={value}"
        for name, value in given.items()
    ]
    flags = {
        f"{flag}=1": flag
        for action in parser._actions
        if action.nargs == 0
        for flag in action.option_strings
    }
    return parser.parse_args([flags.get(word, word) for word in words])


class _OptionParser(argparse.ArgumentParser):
    """Raises what is wrong, in place of the end of the process."""

    prefix = ""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register("type", Path, user_path)

    def error(self, message: str) -> NoReturn:
        raise OptionsError(f"a variable {self.prefix}* of the environment is invalid: {message}")


def read_token(file: Path | None) -> str | None:
    """Return the token from `file`, else from the environment or a file that it names, else None.
    Raises OptionsError: the file cannot be read or holds no token."""
    return read_secret("token", file, TOKEN_VARIABLE, TOKEN_FILE_VARIABLE)


def read_secret(what: str, file: Path | None, variable: str, file_variable: str) -> str | None:
    """Return a secret from `file`, else from `variable`, else from the file in `file_variable`,
    else None. Raises OptionsError: the file cannot be read or is empty; the message calls the
    secret `what`."""
    if file is None and (secret := os.environ.get(variable, "").strip()):
        return secret
    if file is None and (named := os.environ.get(file_variable)):
        file = user_path(named)
    if file is None:
        return None
    try:
        secret = read_text(file).strip()
    except (OSError, ValueError) as error:
        raise OptionsError(f"cannot read the {what} file {file}: {error}") from error
    if not secret:
        raise OptionsError(f"the {what} file {file} is empty")
    return secret


def stays_on_this_machine(address: str) -> bool:
    """Return whether only processes of this machine can reach an address. Raises OptionsError if it
    is malformed or its host cannot be resolved."""
    if socket_path_of(address) is not None:
        return True
    host, port = split_address(address)
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OptionsError(f"cannot resolve the host of address {address}: {error}") from error
    return all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in resolved)


def socket_path_of(address: str) -> Path | None:
    """Return a Unix socket's file; None for TCP. Raises OptionsError if it is empty."""
    if not address.startswith("unix:"):
        return None
    path = address.removeprefix("unix:")
    path = path.removeprefix("//") if path.startswith("///") else path
    if not path or path.startswith("//"):
        raise OptionsError(f"address {address} has no socket path: write unix:/path")
    return Path(path)


def split_address(address: str) -> tuple[str, int]:
    """Return host (no brackets) and port of a TCP address. Raises OptionsError if malformed."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise OptionsError(f"address {address!r} is neither host:port, [v6]:port nor unix:/path")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise OptionsError(f"address {address!r} needs a port between 0 and 65535")
    return host[1:-1] if bracketed else host, int(port)
