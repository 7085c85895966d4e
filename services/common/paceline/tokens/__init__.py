"""Bearer tokens: where they may be sent, and those that services of one user make for themselves.

`paceline serve` without a token makes one, in a file that only its user can read. Clients and
drafter services of this user find it by the address, so that other users of the machine cannot
call the services, or join them. Used by clients and services; imports nothing of the project.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DNS = "dns:///"
_UNIX = ("unix:", "unix-abstract:")
_MOST = 4096


class TokenError(ValueError):
    """A token would travel unencrypted, or the folder of tokens cannot be trusted."""


def is_local(address: str) -> bool:
    """Whether a connection to an address stays on this machine, without a look at DNS: that of a
    Unix socket or of the loopback interface. Of where a server listens
    `service.options.stays_on_this_machine` tells it."""
    if address.startswith(_UNIX):
        return True
    host = re.sub(f"^({_DNS}|ipv[46]:)", "", address).rpartition(":")[0].strip("[]")
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
    found = getattr(found, "ipv4_mapped", None) or found
    # A connection to 0.0.0.0 or [::] is one to this machine.
    return found.is_loopback or found.is_unspecified


def check_encrypted(address: str, token: str | None, *, tls: bool) -> None:
    """Raises ``TokenError`` if a token would travel to an address of another machine without
    TLS."""
    if token and not tls and not is_local(address):
        raise TokenError(f"a token would travel to {address} unencrypted: use TLS for it")


def local_token(address: str) -> str | None:
    """The token that a service of this user has made for an address of this machine; None: there
    is none. A file that others could have written is not read."""
    if not is_local(address):
        return None
    try:
        folder = _trusted(_folder())
        descriptor = os.open(folder / _name(address), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, TokenError):
        return None
    with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
        return file.read(_MOST).strip() or None


@contextmanager
def own_token(addresses: Iterable[str]) -> Iterator[Path]:
    """Make a token for services that will listen at addresses of this machine; yields its file,
    which is removed after the body. Raises ``TokenError``: the folder of tokens cannot be made, or
    is not this user's."""
    folder = _folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise TokenError(f"no token can be kept in {folder}: {error}; give --token-file") from None
    _trusted(folder)
    token = secrets.token_hex(32)
    files = [folder / _name(address) for address in addresses]
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
    """The folder of this user's tokens, which ends with the session or with the machine."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime, "paceline")
    return Path(f"/tmp/paceline-{os.getuid()}")  # whatever TMPDIR says: others must find it


def _trusted(folder: Path) -> Path:
    """The folder, if only this user can write to it. Raises ``TokenError`` otherwise, ``OSError``:
    there is none."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise TokenError(
            f"the folder of tokens {folder} must be this user's alone (mode 0700): remove it, set "
            "XDG_RUNTIME_DIR to another one, or give --token-file"
        )
    return folder


def _name(address: str) -> str:
    """By the port, since a host has several names; by the path of a Unix socket."""
    if address.startswith(_UNIX):
        return hashlib.sha256(address.encode()).hexdigest()[:32] + ".token"
    return address.rpartition(":")[2] + ".token"


def _write(file: Path, token: str) -> None:
    descriptor, name = tempfile.mkstemp(dir=file.parent)  # of mode 0600
    with os.fdopen(descriptor, "w", encoding="ascii") as opened:
        opened.write(token)
    os.replace(name, file)
