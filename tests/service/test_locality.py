"""Which peers and addresses count as this machine."""

import pytest

from paceline.service.identity import is_local_address, is_local_peer


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("unix:", True),
        ("unix:/run/x.sock", True),
        ("ipv4:127.0.0.1:5000", True),
        ("ipv4:127.8.0.1:5000", True),
        ("ipv6:[::1]:5000", True),
        ("ipv6:%5B::1%5D:5000", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:5000", True),
        ("ipv4:10.0.0.1:5000", False),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5000", False),
        ("ipv6:%5Bfe80::1%5D:5000", False),
        ("ipv4:localhost:5000", False),
        ("vsock:1:2", False),
        ("", False),
    ],
)
def test_peers(peer: str, local: bool) -> None:
    assert is_local_peer(peer) is local


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("unix:/run/x.sock", True),
        ("127.0.0.1:7431", True),
        ("[::1]:7431", True),
        ("localhost:7431", True),
        ("10.0.0.1:7431", False),
        ("127.0.0.1", False),
        ("127.0.0.1.evil.example:7431", False),
        ("localhost.evil.example:7431", False),
        ("dns:///localhost:7431", False),
        ("ipv4:127.0.0.1:1,10.0.0.1:2", False),
        ("localhost:1,10.0.0.1:2", False),
        ("", False),
    ],
)
def test_addresses(address: str, local: bool) -> None:
    assert is_local_address(address) is local
