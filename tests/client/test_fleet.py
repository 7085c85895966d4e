"""Several verifiers: the choice, moves, refusals, lists and DNS names. Tokens and TLS."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from certificates import Authority, Pair
from fakes.verifier import FakeVerifier, Service, World, continuation, status, verifier_service

from paceline.client import (
    Client,
    ClientClosedError,
    InvalidRequestError,
    RetryOptions,
    TlsOptions,
    UnavailableError,
)
from paceline.v1 import verifier_pb2_grpc

from .conftest import QUICK

PROMPT = [104, 105, 106]
SEED = 5


class Site:
    """Three fake verifiers on unix sockets."""

    def __init__(self, folder: Path) -> None:
        self.verifiers = [FakeVerifier() for _ in range(3)]
        self.services: list[Service] = []
        for index, verifier in enumerate(self.verifiers):
            verifier.instance = f"instance {index}"
            self.services.append(verifier_service(folder / f"v{index}", verifier))

    def addresses(self, *indices: int) -> str:
        return ",".join(self.services[index].address for index in indices)

    @property
    def made(self) -> list[int]:
        """Number of caches that each verifier has created."""
        return [verifier.made for verifier in self.verifiers]

    def busiest(self) -> int:
        (index,) = [i for i, verifier in enumerate(self.verifiers) if verifier.caches]
        return index


@pytest.fixture
async def site(short_folder: Path) -> AsyncIterator[Site]:
    site = Site(short_folder)
    for service in site.services:
        await service.start()
    yield site
    for service in site.services:
        await service.stop()


def client_of(site: Site, *indices: int, budget: float = 60) -> Client:
    return Client(
        site.addresses(*indices),
        cache_dir=None,
        retry=replace(QUICK, budget=budget),
        unread_chunks=2,
    )


# Lists of addresses.


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "a:1,", ",a:1", "a", "a:b", "a:1;b:2", "dns:///a", "dns:///:1", "a:1,a:1"),
        *("127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536"),
    ],
)
def test_a_bad_list_is_an_error(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="address of a verifier"):
        Client(text)


def test_a_good_list() -> None:
    client = Client("a:1, 10.0.0.1:2,[::1]:3,unix:/x/y")
    addresses = [each.address for each in client.verifiers()]
    assert addresses == ["a:1", "10.0.0.1:2", "[::1]:3", "unix:/x/y"]
    assert [each.address for each in Client().verifiers()] == ["127.0.0.1:7431"]


@pytest.mark.parametrize(
    "address",
    [
        *("10.0.0.1:7431", "example.com:7431", "127.0.0.1.evil.org:1", "unix.example.com:1"),
        *("unixes:1", "dns:///unix:1", "127.0.0.1:1,10.0.0.1:2"),
    ],
)
def test_no_entry_of_a_list_gets_the_token_unencrypted(address: str) -> None:
    with pytest.raises(InvalidRequestError, match="unencrypted"):
        Client(address, token="secret")
    Client(address, token="secret", tls=TlsOptions())
    client = Client("127.0.0.1:1", token="secret")
    with pytest.raises(InvalidRequestError, match="unencrypted"):
        client.set_verifiers("10.0.0.1:2")


async def test_a_dns_name_stands_for_its_addresses(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that it has when something changes: a verifier ends, and another one is added."""
    listed = [0, 1]

    async def lookup(name: str, port: int) -> list[str]:
        assert (name, port) == ("verifiers", 7431)
        return [site.services[index].address for index in listed]

    monkeypatch.setattr("paceline.client._transport._lookup", lookup)
    async with Client("dns:///verifiers:7431", cache_dir=None, retry=QUICK) as client:
        await generate(client, 4)
        assert site.made == [2, 2, 0]
        listed[:] = [1, 2]
        await site.services[0].stop()
        monkeypatch.setattr("paceline.client._fleet.MAX_AGE", 0.0)
        monkeypatch.setattr("paceline.client._fleet._NAMES_MAX_AGE", 0.0)
        await generate(client, 4)
        while not site.made[2]:
            await generate(client, 2)
        addresses = {each.address for each in client.verifiers()}
        assert addresses == {site.services[1].address, site.services[2].address}


async def test_a_name_without_addresses_is_an_error() -> None:
    address = "dns:///no-such-name.invalid:1"
    async with Client(address, cache_dir=None, retry=RetryOptions(budget=0)) as client:
        with pytest.raises(UnavailableError, match=r"no-such-name.*cannot be resolved"):
            await client.generate(PROMPT)


# Generations.


async def generate(client: Client, count: int, length: int = 20) -> None:
    """Concurrent generations, each compared with the text that it must be."""
    results = await asyncio.gather(
        *(client.generate(PROMPT, max_new_tokens=length, seed=seed) for seed in range(count))
    )
    for seed, result in enumerate(results):
        assert result.token_ids == continuation(PROMPT, length, seed)


async def test_generations_are_spread_by_load(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.client._fleet.MAX_AGE", 600.0)
    site.verifiers[2].others = 6
    async with client_of(site, 0, 1, 2) as client:
        await generate(client, 14)
        assert sum(site.made) == 14
        assert sorted(site.made) in ([0, 7, 7], [1, 6, 7])
        assert site.made[2] <= 1, "others keep it busy"
        assert not any(each.running for each in client.verifiers())


async def test_the_turns_of_a_chat_stay_on_a_verifier(site: Site) -> None:
    async with client_of(site, 0, 1, 2) as client:
        text = PROMPT * 30
        for _ in range(6):
            text += (await client.generate(text, max_new_tokens=40, seed=SEED)).token_ids
    assert sorted(site.made) == [0, 0, 6]


@pytest.mark.parametrize(
    ("others", "restarted", "stays"), [(4, False, True), (5, False, False), (1, True, False)]
)
async def test_a_prefix_counts_more_than_load_up_to_a_limit(
    site: Site, monkeypatch: pytest.MonkeyPatch, others: int, restarted: bool, stays: bool
) -> None:
    """And nothing once its process has restarted. Texts are compared in chunks of 64 tokens."""
    monkeypatch.setattr("paceline.client._fleet.MAX_AGE", 0.0)
    text = PROMPT * 30
    async with client_of(site, 0, 1) as client:
        await client.generate(text, max_new_tokens=2)
        (holder,) = [each for each in site.verifiers if each.made]
        holder.others = others
        if restarted:
            holder.restart()
        await client.generate(text, max_new_tokens=2)
    assert (holder.made == 2) == stays


async def disturbed(client: Client, site: Site, act: str, length: int = 400) -> tuple[int, int]:
    """Generates, does something to the verifier of the text in its middle, checks the tokens.

    Returns the index of the first and of the last verifier of the text.
    """
    generation = client.generate(PROMPT, max_new_tokens=length, seed=SEED)
    tokens: list[int] = []
    before = -1
    async for chunk in generation:
        tokens += chunk.token_ids
        if len(tokens) > 20 and before < 0:
            before = site.busiest()
            if act == "kill":
                await site.services[before].stop()
            elif act == "drain":
                site.verifiers[before].draining = True
            else:
                site.verifiers[before].restart()
                await site.services[before].stop()
                await site.services[before].start()
    result = await generation
    assert tokens == result.token_ids == continuation(PROMPT, length, SEED)
    assert result.stats.verifiers[0] == site.services[before].address
    after = [service.address for service in site.services].index(result.stats.verifiers[-1])
    assert result.stats.fallbacks["verifier_moved"] == (after != before)
    assert result.stats.same_numerics
    return before, after


async def test_a_verifier_with_equal_numerics_is_preferred_to_an_idle_one(site: Site) -> None:
    site.verifiers[1].others, site.verifiers[2].others = 9, 5
    site.verifiers[2].numerics = "amx"
    async with client_of(site, 0, 1, 2) as client:
        assert await disturbed(client, site, "kill") == (0, 1)


async def test_a_draining_verifier_finishes_its_texts_and_gets_no_other(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.client._fleet.MAX_AGE", 0.0)
    async with client_of(site, 0, 1) as client:
        before, after = await disturbed(client, site, "drain")
        assert before == after
        made = site.made[before]
        await generate(client, 4)
        assert site.made[before] == made
        (found,) = [each for each in client.verifiers() if each.address == site.addresses(before)]
        assert (found.state, found.reason) == ("unavailable", "it is draining")


async def test_a_restarted_verifier_is_used_again(site: Site) -> None:
    async with client_of(site, 0) as client:
        await disturbed(client, site, "restart")
    async with client_of(site, 0, 1) as client:
        await site.services[0].stop()
        await generate(client, 2)
        assert site.made[1] == 2
        await site.services[0].start()
        made = site.made[0]
        async with asyncio.timeout(60):
            while site.made[0] == made:
                await generate(client, 2)


async def test_a_list_can_be_replaced(site: Site) -> None:
    async with client_of(site, 0) as client:
        generation = client.generate(PROMPT, max_new_tokens=400, seed=SEED)
        first = await anext(aiter_ := aiter(generation))
        client.set_verifiers(site.addresses(1, 2))
        await generate(client, 4)
        assert site.made == [1, 2, 2]
        tokens = [*first.token_ids]
        async for chunk in aiter_:
            tokens += chunk.token_ids
        assert tokens == continuation(PROMPT, 400, SEED)
        assert (await generation).stats.verifiers == [site.addresses(0)]


@pytest.mark.parametrize("retry_after", [60, None])  # None: the text is too long for it
async def test_a_full_verifier_is_passed_over(site: Site, retry_after: float | None) -> None:
    for each in site.verifiers[:2]:
        each.full, each.retry_after = 10**6, retry_after
    async with client_of(site, 0, 1, 2) as client:
        await generate(client, 6)
    assert site.made == [0, 0, 6]


async def test_a_failed_step_is_tried_elsewhere(site: Site) -> None:
    failed = status(grpc.StatusCode.INTERNAL, "STEP_FAILED", "a bug there")
    site.verifiers[0].fail_at((2, failed))
    site.verifiers[1].others = 5
    async with client_of(site, 0, 1) as client:
        result = await client.generate(PROMPT, max_new_tokens=40, seed=SEED)
    assert result.token_ids == continuation(PROMPT, 40, SEED)
    assert result.stats.fallbacks == {"verifier_moved": 1}
    assert site.made[:2] == [1, 1]


async def test_all_down_names_each_and_why(site: Site) -> None:
    site.verifiers[0].draining = True
    await site.services[1].stop()
    async with client_of(site, 0, 1, budget=0.1) as client:
        with pytest.raises(UnavailableError) as caught:
            await client.generate(PROMPT)
        assert f"{site.addresses(0)}: it is draining" in caught.value.message
        assert f"{site.addresses(1)}: " in caught.value.message


@pytest.mark.parametrize("what", ["fingerprint", "context"])
async def test_a_verifier_of_another_target_is_refused(
    site: Site, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    if what == "fingerprint":
        site.verifiers[1].fingerprint = "0" * 64
    else:
        site.verifiers[1].max_context = 99
    async with client_of(site, 0, 1, budget=0.1) as client:
        for _ in range(3):
            await generate(client, 2)
        assert site.made[:2] == [6, 0]
        refusals = [record for record in caplog.records if "is not used" in record.message]
        assert len(refusals) == 1
        assert refusals[0].levelno == logging.ERROR
        assert site.addresses(1) in refusals[0].message
        assert [each.state for each in client.verifiers()] == ["serving", "refused"]
        await site.services[0].stop()
        with pytest.raises(UnavailableError, match=r"v0: .*v1: its context|v0: .*v1: it serves"):
            await client.generate(PROMPT)
        assert site.made[1] == 0, "the right target is down, but it is known"


async def test_other_numerics_are_told(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.verifiers[0].numerics = "amx"
    async with client_of(site, 0, 1) as client:
        for _ in range(3):
            await generate(client, 2)
        warnings = [record for record in caplog.records if "differ in numerics" in record.message]
        assert len(warnings) == 1
        generation = client.generate(PROMPT, max_new_tokens=400, seed=SEED)
        async for _ in generation:
            if len(generation.stats.verifiers) == 1 and generation.stats.rounds:
                for service, fake in zip(site.services, site.verifiers, strict=True):
                    if fake.caches and service.running:
                        await service.stop()
        stats = (await generation).stats
        assert stats.fallbacks["verifier_moved"] == 1
        assert stats.same_numerics is False
        assert stats.summary()["same_numerics"] is False


async def test_a_verifier_that_does_not_answer_is_not_waited_for_twice(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GetModel hangs there. Generations start elsewhere."""
    monkeypatch.setattr("paceline.client._fleet.PATIENCE", 0.05)
    answers = asyncio.Event()
    site.verifiers[0].may_answer = answers
    async with client_of(site, 0, 1) as client:
        await generate(client, 4)
        assert site.made[:2] == [0, 4]
        answers.set()
        async with asyncio.timeout(60):
            while not site.made[0]:
                await generate(client, 4)


async def test_a_fork_stays_with_its_parent_or_begins_anew(site: Site) -> None:
    async with client_of(site, 0, 1, 2) as client:
        parent = client.generate(PROMPT, max_new_tokens=20, seed=SEED, keep_cache=True)
        text = [*PROMPT, *(await parent).token_ids]
        holder = site.busiest()
        for _ in range(4):
            fork = await client.generate(text, max_new_tokens=5, seed=SEED, parent=parent)
            assert fork.stats.verifiers == [site.addresses(holder)]
            assert fork.usage.reused_tokens
        await site.services[holder].stop()
        fork = await client.generate(text, max_new_tokens=5, seed=SEED, parent=parent)
        assert fork.token_ids == continuation(text, 5, SEED)
        assert fork.stats.verifiers != [site.addresses(holder)]


ONCE = RetryOptions(budget=0.3, first_delay=0.05)


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
    async with Client("dns:///other.example:1", tls=tls, cache_dir=None, retry=ONCE) as client:
        with pytest.raises(UnavailableError):
            await client.generate(PROMPT)


async def test_every_call_carries_the_clients_name(world: World) -> None:
    names = set()
    for _ in range(2):
        world.verifier.clients.clear()
        async with Client(world.address, cache_dir=None) as client:
            await client.generate(PROMPT, max_new_tokens=4)
        called = {rpc for rpc, _ in world.verifier.clients}
        assert called >= {"CreateCache", "Generate", "ReleaseCache"}
        names.add(frozenset(name for _, name in world.verifier.clients))
    assert [*map(len, names)] == [1, 1]


async def test_a_closed_client_waits_for_no_verifier(short_folder: Path) -> None:
    retry = RetryOptions(budget=3600, max_delay=0.05)
    async with Client(f"unix:{short_folder}/none", cache_dir=None, retry=retry) as client:
        waiting = asyncio.create_task(client.model())
        await asyncio.sleep(0)  # it begins
        client.fail("it has ended")
    async with asyncio.timeout(60):
        with pytest.raises(ClientClosedError, match="it has ended"):
            await waiting
