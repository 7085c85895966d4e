"""Bearer tokens: where they may be sent, and those that services of one user make for themselves.

`paceline serve` without a token makes one, in a file that only its user can read. Clients and
drafter services of this user find it by the address, so that other users of the machine cannot
call the services, or join them. Beside it lies a note of what the command runs. Used by clients and
services; imports nothing of the project.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

_DNS = "dns:///"
_UNIX = ("unix:", "unix-abstract:")
_MAX_CHARS = 4096


class TokenError(ValueError):
    """A token would travel unencrypted, or the folder of tokens cannot be trusted."""


def is_local(address: str) -> bool:
    """Return whether a connection to an address stays on this machine, without a look at DNS: the
    address is a Unix socket or of the loopback interface. `service.options.stays_on_this_machine`
    is for the address at which a server listens."""
    if address.startswith(_UNIX):
        return True
    host = re.sub(f"^({_DNS}|ipv[46]:)", "", address).rpartition(":")[0].strip("[]")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
    ip = getattr(ip, "ipv4_mapped", None) or ip
    # A connection to 0.0.0.0 or [::] is one to this machine.
    return ip.is_loopback or ip.is_unspecified


def certified_name(address: str) -> str:
    """Return the name in a Unix socket's certificate, where gRPC expects the path; else empty."""
    return "localhost" if address.startswith(_UNIX) else ""


def check_encrypted(address: str, token: str | None, *, tls: bool) -> None:
    """Raises ``TokenError`` if a token would travel to another machine without TLS."""
    if token and not tls and not is_local(address):
        raise TokenError(f"a token would travel to {address} unencrypted: use TLS for it")


def local_token(address: str) -> str | None:
    """Return the token that a service of this user made for an address of this machine, if any."""
    return _read(address, "token").strip() or None


@dataclass(frozen=True)
class Noted:
    """What a running `paceline serve` of this user has noted of itself."""

    pid: int  # its process
    services: tuple[str, ...]  # addresses of its verifier and its drafter service, if it runs one
    unused: str  # where it would run a drafter service; empty: it runs one
    ready: bool  # whether all answer, and the drafter has joined


def noted_services(verifier: str) -> Noted | None:
    """Return the note of the command whose verifier listens there; None: no such command runs."""
    try:
        noted = Noted(**json.loads(_read(verifier, "json")))
        os.kill(noted.pid, 0)
    except (ValueError, TypeError, OSError):
        return None
    return noted


@contextmanager
def note_services(services: Iterable[str], unused: str) -> Iterator[Callable[[], None]]:
    """Note for the body which services this process runs, as far as this can be written; yields a
    function that notes that they are ready. Arguments are as of :class:`Noted`."""
    noted = Noted(os.getpid(), tuple(services), unused, ready=False)
    file = _folder() / _name(noted.services[0], "json")

    def write(note: Noted) -> None:
        with suppress(OSError, TokenError):
            _make_folder()
            _write(file, json.dumps(asdict(note)))

    write(noted)
    try:
        yield lambda: write(replace(noted, ready=True))
    finally:
        if (stored := noted_services(noted.services[0])) and stored.pid == noted.pid:
            file.unlink(missing_ok=True)  # else of a later command


@contextmanager
def own_token(addresses: Iterable[str]) -> Iterator[Path]:
    """Make a token for services that will listen at addresses of this machine; yields its file,
    which is removed after the body. Raises ``TokenError`` if no folder can be trusted with it."""
    folder = _make_folder()
    token = secrets.token_hex(32)
    files = [folder / _name(address, "token") for address in addresses]
    try:
        for file in files:
            _write(file, token)
        yield files[0]
    finally:
        for file in files:
            with suppress(OSError):
                if file.read_text(encoding="ascii") == token:  # else of a later service
                    file.unlink()


def _folder() -> Path:
    """Return the folder of this user's tokens, which ends with the session or with the machine."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime, "paceline")
    return Path(f"/tmp/paceline-{os.getuid()}")  # whatever TMPDIR says: others must find it


def _make_folder() -> Path:
    """Return the folder, made if there is none. Raises ``TokenError``: it cannot be, or is not this
    user's alone."""
    folder = _folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise TokenError(f"no token can be kept in {folder}: {error}; give --token-file") from None
    return _trusted(folder)


def _trusted(folder: Path) -> Path:
    """Return the folder. Raises ``TokenError`` if others than this user can use it, ``OSError`` if
    there is none."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise TokenError(
            f"the folder of tokens {folder} must be this user's alone (mode 0700): remove it, set "
            "XDG_RUNTIME_DIR to another one, or give --token-file"
        )
    return folder


def _name(address: str, kind: str) -> str:
    """By the port, since a host has several names; by the path of a Unix socket."""
    if address.startswith(_UNIX):
        return f"{hashlib.sha256(address.encode()).hexdigest()[:32]}.{kind}"
    return f"{address.rpartition(':')[2]}.{kind}"


def _read(address: str, kind: str) -> str:
    """Return the file of an address of this machine; empty: there is none that can be trusted."""
    if not is_local(address):
        return ""
    try:
        file = _trusted(_folder()) / _name(address, kind)
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, TokenError):
        return ""
    with os.fdopen(descriptor, encoding="ascii", errors="replace") as opened:
        return opened.read(_MAX_CHARS)


def _write(file: Path, token: str) -> None:
    descriptor, name = tempfile.mkstemp(dir=file.parent)  # of mode 0600
    with os.fdopen(descriptor, "w", encoding="ascii") as opened:
        opened.write(token)
    os.replace(name, file)
