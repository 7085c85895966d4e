"""Verifier and drafter in two network namespaces: a bad link between them changes no token."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean

import pytest
from certificates import Authority
from far import DOWN, DRAFTER, VERIFIER, FarApart, Link, NotPermitted
from system_support import EAGER, generate_and, make_prompts, write_layer

from paceline.client import Client, DraftOptions, GenerationResult, TlsOptions
from paceline.harness import ServiceProcess

TOKENS = 96
BUDGET = 64

LINKS = {
    "near": Link(),
    "20 ms": Link(delay=0.02),
    "5% lost": Link(delay=0.002, loss=0.05),
    "300 kB/s": Link(delay=0.002, rate=3e5),
}


@pytest.fixture(scope="module")
def apart() -> Iterator[FarApart]:
    try:
        with FarApart() as made:
            yield made
    except NotPermitted as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The authority, and one certificate of both services with its key."""
    authority = Authority(tmp_path_factory.mktemp("tls") / "authority")
    pair = authority.sign("services", VERIFIER, DRAFTER)
    return authority.cert, pair.cert, pair.key


@pytest.fixture(scope="module")
def services(
    apart: FarApart,
    certificate: tuple[Path, Path, Path],
    models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    """A verifier, and a drafter that follows its KV from the other namespace."""
    target, (authority, cert, key) = models["llama"], certificate
    layer = write_layer(target, tmp_path_factory.mktemp("longspec") / "layer")
    secure = ["--tls-cert", str(cert), "--tls-key", str(key)]
    environment = {"OMP_NUM_THREADS": "1", "PACELINE_TOKEN": "secret"}
    with ServiceProcess(
        "verifier",
        ["--target", str(target), *secure],
        address=f"{VERIFIER}:0",
        environment=environment,
        wrapper=apart.under(apart.verifier),
    ) as verifier:
        load = f"longspec=longspec:{layer},target={target},context={BUDGET}"
        known = ["--verifier", verifier.address, "--verifier-tls-ca", str(authority)]
        with ServiceProcess(
            "drafter",
            ["--load", load, *known, *secure],
            address=f"{DRAFTER}:0",
            environment=environment,
            wrapper=apart.under(apart.drafter),
        ) as drafter:
            yield verifier, drafter


@pytest.fixture
def client_of(
    services: tuple[ServiceProcess, ServiceProcess], certificate: tuple[Path, Path, Path]
) -> Callable[[DraftOptions], Client]:
    """Makes clients whose generations wait for their reader."""
    verifier, drafter = services

    def client(drafting: DraftOptions) -> Client:
        return Client(
            verifier.address,
            drafter=drafter.address,
            token="secret",
            tls=TlsOptions(ca=certificate[0]),
            drafting=drafting,
            unread_chunks=2,
        )

    return client


async def texts(
    client: Client, drafter: str, act: Callable[[], None] | None = None
) -> list[GenerationResult]:
    """Three sampled texts at once; ``act`` runs in the middle of each."""
    prompts = make_prompts(3, seed=4)
    return await asyncio.gather(
        *(generate_and(client, p * 8, drafter, TOKENS, act, n) for n, p in enumerate(prompts))
    )


@pytest.mark.parametrize("name", LINKS)
async def test_tokens_are_the_same_over_any_link(
    name: str,
    apart: FarApart,
    client_of: Callable[[DraftOptions], Client],
    record_property: Callable[[str, object], None],
) -> None:
    apart.link = LINKS[name]
    async with client_of(EAGER) as client:
        plain = await texts(client, "none")
        carried = apart.carried
        drafted = await texts(client, "longspec")
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    rounds = [r for result in drafted for r in result.stats.rounds if r.drafted]
    assert rounds, "nothing was drafted"
    bytes_a_round = mean(r.kv_bytes for r in rounds)
    assert bytes_a_round > 0
    record_property("kv_bytes_a_round", round(bytes_a_round))
    record_property("link_bytes_a_round", round((apart.carried - carried) / len(rounds)))
    print(f"{name}: {bytes_a_round:.0f} bytes of KV a round in {len(rounds)} rounds")


async def test_a_link_that_goes_down_and_comes_back(
    apart: FarApart, client_of: Callable[[DraftOptions], Client]
) -> None:
    """During generations, and before others begin."""
    apart.link = LINKS["near"]
    impatient = DraftOptions(timeout=1.0, first_delay=0.01, longest_delay=0.05, adaptive=False)
    async with client_of(impatient) as client:
        plain = [r.token_ids for r in await texts(client, "none")]

        def go_down() -> None:
            apart.link = DOWN

        assert [r.token_ids for r in await texts(client, "longspec", go_down)] == plain
        assert [r.token_ids for r in await texts(client, "longspec")] == plain
        apart.link = LINKS["near"]
        assert [r.token_ids for r in await texts(client, "longspec")] == plain
