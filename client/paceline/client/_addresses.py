"""Lists of addresses of services, and the DNS names in them."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Callable
from time import monotonic
from typing import Generic, Protocol, TypeVar

from ._errors import InvalidRequestError, PacelineError, UnavailableError

logger = logging.getLogger("paceline.client")

_DNS = "dns:///"
_FORMS = re.compile(r"(unix|unix-abstract|ipv4|ipv6|vsock):.+|([\w.-]+|\[[\w.:%]+\]):([0-9]{1,5})")
# DNS names are resolved again after this time. Unit: seconds.
_MAX_AGE = 5.0


def parse_addresses(text: str, kind: str) -> tuple[str, ...]:
    """The entries of a list: "host:port", "unix:/path" or "dns:///name:port", comma-separated.

    Args:
        text: The list.
        kind: What the addresses are of, for the error: "verifier" or "drafter".

    Raises:
        InvalidRequestError: An entry is empty, repeated, or of another form.
    """
    param = {"param": f"{kind}_address"}
    # Another type may be an int with too many digits to print.
    given = text if isinstance(text, str) else f"<{type(text).__name__}>"
    entries = tuple(entry.strip() for entry in given.split(","))
    for entry in entries:
        form = _FORMS.fullmatch(entry.removeprefix(_DNS))
        if form is None or not 0 < int(form[3] or 1) < 2**16:
            raise InvalidRequestError(
                f"{entry!r} is not the address of a {kind}: give host:port with a port of 1 to "
                "65535, unix:/path or dns:///name:port, several separated by commas",
                metadata=param,
            )
    if len(set(entries)) < len(entries):
        raise InvalidRequestError(
            f"{text!r} has the address of a {kind} twice: give each once", metadata=param
        )
    return entries


def host_of(address: str) -> str:
    """The host of an address; "localhost" if it is on this machine."""
    address = address.removeprefix(_DNS)
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix"):
        return "localhost"
    try:
        return "localhost" if ipaddress.ip_address(host).is_loopback else host
    except ValueError:
        return host


class Member(Protocol):
    """A service in a `Pool`."""

    running: int
    """Number of generations that use it."""

    async def close(self) -> None:
        """Disconnects."""


M = TypeVar("M", bound=Member)


class Pool(Generic[M]):
    """The services behind a list of addresses, one for each.

    An entry "dns:///name:port" stands for all addresses of the name. It is resolved before the
    first use, again after `expire`, and every few seconds while the pool is in use.

    Args:
        make: Creates a service from its address and the DNS name that it was resolved from, which
            is empty for other addresses.
        entries: The list; see `parse_addresses`.
    """

    def __init__(self, make: Callable[[str, str], M], entries: tuple[str, ...]) -> None:
        self._make = make
        self._members: dict[str, M] = {}
        self._left: list[M] = []
        self._resolving: asyncio.Task[None] | None = None
        self._failures: dict[str, PacelineError] = {}
        self.set(entries)

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def members(self) -> tuple[M, ...]:
        """The services that the list names now."""
        return tuple(self._members.values())

    @property
    def failures(self) -> dict[str, PacelineError]:
        """DNS names that could not be resolved, and why."""
        return self._failures

    def set(self, entries: tuple[str, ...]) -> None:
        """Replaces the list."""
        self._entries = entries
        self._names = [entry for entry in entries if entry.startswith(_DNS)]
        self._resolved_at = float("-inf")
        if not self._names:
            self._become(dict.fromkeys(entries, ""))

    def expire(self) -> None:
        """Makes the next `update` resolve names again: a service failed."""
        self._resolved_at = float("-inf")

    async def update(self) -> None:
        """Resolves names again if that is due. Waits for it only if there is no service yet."""
        for member in [each for each in self._left if not each.running]:
            self._left.remove(member)
            await member.close()
        if not self._names or monotonic() - self._resolved_at < _MAX_AGE:
            return
        if self._resolving is None or self._resolving.done():
            self._resolving = asyncio.create_task(self._resolve())
        if not self._members:
            await asyncio.wait([self._resolving])

    async def close(self) -> None:
        """Disconnects from all services."""
        if self._resolving is not None:
            self._resolving.cancel()
        for member in (*self._members.values(), *self._left):
            await member.close()

    async def _resolve(self) -> None:
        entries, found = self._entries, dict[str, str]()
        failures: dict[str, PacelineError] = {}
        for entry in entries:
            try:
                found |= await addresses_of(entry)
            except OSError as error:
                failures[entry] = UnavailableError(f"the name cannot be resolved: {error}")
                logger.warning("%s cannot be resolved, its last addresses stay: %s", entry, error)
        if entries is not self._entries:
            return  # `set` replaced the list meanwhile
        self._resolved_at, self._failures = monotonic(), failures
        self._become((dict.fromkeys(self._members, "") if failures else {}) | found)

    def _become(self, addresses: dict[str, str]) -> None:
        """Adds and removes services. Generations of a removed one finish there."""
        self._left += [self._members[gone] for gone in self._members if gone not in addresses]
        self._members = {
            address: self._members.get(address) or self._make(address, name)
            for address, name in addresses.items()
        }


async def addresses_of(entry: str) -> dict[str, str]:
    """Addresses of an entry, with the DNS name that each was resolved from; empty for none.

    Raises:
        OSError: The name cannot be resolved.
    """
    if not entry.startswith(_DNS):
        return {entry: ""}
    name, _, port = entry.removeprefix(_DNS).rpartition(":")
    return dict.fromkeys(await _lookup(name.strip("[]"), int(port)), name)


async def _lookup(name: str, port: int) -> list[str]:
    """Addresses of a name, those of IPv4 if it has any. Raises OSError if it has none."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = [(family, address[0]) for family, *_, address in found]
    ipv4 = [f"{host}:{port}" for family, host in hosts if family == socket.AF_INET]
    return ipv4 or [f"[{host}]:{port}" for _, host in hosts]
