"""Tokens and TLS on the way to the services."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from certificates import Authority, Pair
from fakes.verifier import FakeVerifier, World, continuation

from paceline.client import Client, InvalidRequestError, RetryOptions, TlsOptions, UnavailableError
from paceline.v1 import verifier_pb2_grpc

PROMPT = [104, 105, 106]
QUICK = RetryOptions(budget=0.3, first_delay=0.05)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pair, Pair]:
    """An authority's certificate, and a server and a client that it signed."""
    authority = Authority(tmp_path_factory.mktemp("pki") / "authority")
    server = authority.sign("server", "DNS:verifier.example")
    return authority.cert, server, authority.sign("client")


@pytest.fixture
async def secure(pki: tuple[Path, Pair, Pair]) -> AsyncIterator[tuple[str, FakeVerifier]]:
    verifier, server = FakeVerifier(), grpc.aio.server()
    authority, pair, _ = pki
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(verifier, server)
    credentials = grpc.ssl_server_credentials(
        [(pair.key.read_bytes(), pair.cert.read_bytes())],
        root_certificates=authority.read_bytes(),
        require_client_auth=True,
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    yield f"127.0.0.1:{port}", verifier
    await server.stop(None)


async def test_mutual_tls_and_a_token(
    pki: tuple[Path, Pair, Pair], secure: tuple[str, FakeVerifier]
) -> None:
    (address, verifier), (authority, _, own) = secure, pki
    tls = TlsOptions(authority, own.cert, own.key, server_name="verifier.example")
    async with Client(address, tls=tls, token="secret", cache_dir=None) as client:
        result = await client.generate(PROMPT, max_new_tokens=20, seed=5)
    assert result.token_ids == continuation(PROMPT, 20, 5)
    assert verifier.metadata[0]["authorization"] == "Bearer secret"


async def test_a_resolved_address_must_have_the_certificate_of_its_name(
    pki: tuple[Path, Pair, Pair], secure: tuple[str, FakeVerifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    (address, _), (authority, _, own) = secure, pki

    async def lookup(name: str, port: int) -> list[str]:
        return [address]

    monkeypatch.setattr("paceline.client._transport._lookup", lookup)
    tls = TlsOptions(authority, own.cert, own.key)
    async with Client("dns:///verifier.example:1", tls=tls, cache_dir=None) as client:
        result = await client.generate(PROMPT, max_new_tokens=20, seed=5)
    assert result.token_ids == continuation(PROMPT, 20, 5)
    async with Client("dns:///other.example:1", tls=tls, cache_dir=None, retry=QUICK) as client:
        with pytest.raises(UnavailableError):
            await client.generate(PROMPT)


async def test_a_client_without_certificate_is_refused(
    pki: tuple[Path, Pair, Pair], secure: tuple[str, FakeVerifier]
) -> None:
    address, verifier = secure
    anonymous = TlsOptions(ca=pki[0], server_name="verifier.example")
    for tls in (None, anonymous):
        async with Client(address, tls=tls, cache_dir=None, retry=QUICK) as client:
            with pytest.raises(UnavailableError):
                await client.generate(PROMPT)
    assert not verifier.creates


@pytest.mark.parametrize(
    "address",
    [
        *("10.0.0.1:7431", "example.com:7431", "127.0.0.1.evil.org:1"),
        *("unix.example.com:1", "unixes:1", "dns:///unix:1"),
    ],
)
def test_a_token_is_not_sent_unencrypted(address: str) -> None:
    with pytest.raises(InvalidRequestError, match="unencrypted"):
        Client(address, token="secret")
    Client(address, token="secret", tls=TlsOptions())


def test_a_missing_certificate_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="cannot read a TLS file"):
        Client("127.0.0.1:1", tls=TlsOptions(ca=Path("/nowhere/ca.pem")))


@pytest.mark.parametrize("address", ["localhost:1", "127.0.0.1:1", "[::1]:1", "unix:/nowhere"])
async def test_a_token_may_be_sent_on_this_machine(address: str) -> None:
    async with Client(address, token="secret", cache_dir=None, retry=QUICK) as client:
        with pytest.raises(UnavailableError):
            await client.generate(PROMPT)


async def test_every_call_carries_the_clients_name(world: World) -> None:
    names = set()
    for _ in range(2):
        world.verifier.clients.clear()
        async with Client(world.address, cache_dir=None) as client:
            await client.generate(PROMPT, max_new_tokens=4)
        assert {rpc for rpc, _ in world.verifier.clients} >= {
            "CreateCache",
            "Generate",
            "ReleaseCache",
        }
        names.add(frozenset(name for _, name in world.verifier.clients))
    assert [len(each) for each in names] == [1, 1]
