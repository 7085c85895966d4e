"""Tests of whether an end of a connection is on this machine."""

from __future__ import annotations

import ipaddress
from urllib.parse import unquote


def is_local_peer(peer: str) -> bool:
    """Whether a call's ``context.peer()`` is a caller on this machine.

    True for unix sockets and loopback addresses, so for a local proxy too.
    """
    kind, _, address = peer.partition(":")
    if kind in ("unix", "unix-abstract"):
        return True
    return kind in ("ipv4", "ipv6") and _is_loopback(unquote(address))


def is_local_address(address: str) -> bool:
    """Whether a target, ``unix:/path`` or ``host:port``, can only be on this machine.

    No host name but ``localhost`` counts: its address may change.
    """
    if address.startswith("unix:"):
        return True
    return address.rpartition(":")[0] == "localhost" or _is_loopback(address)


def _is_loopback(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return False
    try:
        ip = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback
