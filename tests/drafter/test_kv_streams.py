"""Streams of methods that read the target's KV: mapped first, closed last, ended with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from certificates import Authority

from paceline.drafter import VerifierAccess
from paceline.drafter.kv import exchange
from paceline.verifier.kv.segment import Segment

from .conftest import Drafting, drafting, failure, until
from .fakes import FakeDrafter, FakeSequence
from .kv_verifier import KvVerifier, kv_verifier
from .segments import COMMITTED, GRANT, new_segment

CODE = grpc.StatusCode
METHODS = ("fake", "inline-fake")


@pytest.fixture
def segment() -> Iterator[Segment]:
    with new_segment() as made:
        yield made


@pytest.fixture
async def verifier(segment: Segment, tmp_path: Path) -> AsyncIterator[KvVerifier]:
    async with kv_verifier(segment, tmp_path) as served:
        yield served


@pytest.fixture(params=METHODS)
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Drafting]:
    """Drafters that read the first and the last layer, and one that reads none."""
    FakeDrafter.loaded.clear()
    async with drafting(f"x={request.param},kv=0/-1", "ngram") as served:
        yield served


def newest() -> FakeSequence:
    return FakeDrafter.loaded[0].sequences[-1]


async def closed(sequence: FakeSequence) -> None:
    """Until its mapping is closed; after it, as the sequence itself asserts."""
    await until(lambda: sequence.kv is not None and sequence.kv.closed)
    assert sequence.closed == 1


async def attach(service: Drafting, verifier: KvVerifier, **fields: Any) -> Any:
    where = {"read_grant": GRANT, "verifier_address": verifier.address}
    return await service.attach([5, 6, 7], **{**where, **fields})


async def test_a_method_reads_what_the_verifier_writes(
    service: Drafting, verifier: KvVerifier
) -> None:
    stream = await attach(service, verifier)
    assert list(verifier.requests[0].layers) == [], "all: it alone knows which is the last"
    sequence, segment = newest(), verifier.segment
    await stream.round()
    segment.kv[..., COMMITTED, :] = 9.0
    segment.publish(COMMITTED + 1)
    await stream.round([8])
    for prefix, length in zip(sequence.prefixes, (COMMITTED, COMMITTED + 1), strict=True):
        for index, plane in enumerate(prefix):
            theirs = segment.layer((0, 2)[index // 2])[index % 2]
            assert torch.equal(plane, theirs[:, :length])
    await stream.end()
    await closed(sequence)


async def test_a_drafter_beside_its_verifier_asks_nobody_else(verifier: KvVerifier) -> None:
    FakeDrafter.loaded.clear()
    access = VerifierAccess(beside=verifier.address)
    async with drafting("x=fake,kv=0/-1", access=access) as service:
        stream = await attach(service, verifier, verifier_address="balancer.example:7431")
        assert len(verifier.requests) == 1
        await stream.round()
        await stream.end()


async def test_streams_end_in_any_way_and_leave_no_mapping(
    service: Drafting, verifier: KvVerifier
) -> None:
    streams = [await attach(service, verifier) for _ in range(3)]
    sequences = list(FakeDrafter.loaded[0].sequences)
    await streams[0].end()
    streams[1].call.cancel()
    with pytest.raises(grpc.aio.AioRpcError):
        await streams[2].round([2000])
    for sequence in sequences:
        await closed(sequence)


async def test_a_released_cache_ends_the_stream(service: Drafting, verifier: KvVerifier) -> None:
    stream = await attach(service, verifier)
    await stream.round()
    verifier.segment.close()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stream.round([8])
    assert failure(error) == (CODE.UNAVAILABLE, "KV_GONE")
    await closed(newest())


async def test_an_attach_without_its_kv_is_refused(service: Drafting, verifier: KvVerifier) -> None:
    """Others go on, and so does the same drafter once the KV is there."""
    for fields, message in (
        ({"read_grant": b""}, "attach with read_grant"),
        ({"verifier_address": ""}, "attach with read_grant"),
        ({"read_grant": bytes(16)}, "no cache has this read grant"),
        ({"verifier_address": "unix:/nowhere"}, "UNAVAILABLE"),
        ({"verifier_address": "10.0.0.1:7431"}, "not on this machine"),
        ({"verifier_address": service.address}, "UNIMPLEMENTED"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=message) as error:
            await attach(service, verifier, **fields)
        assert failure(error) == (CODE.FAILED_PRECONDITION, "KV_NOT_SHARED")
    verifier.change = lambda response: setattr(response.kv.layers[0], "key_offset", 1 << 40)
    with pytest.raises(grpc.aio.AioRpcError, match="expected it inside bytes") as error:
        await attach(service, verifier)
    assert failure(error) == (CODE.FAILED_PRECONDITION, "KV_NOT_SHARED")
    assert not FakeDrafter.loaded[0].sequences
    other = await attach(service, verifier, drafter="ngram")
    await other.round()
    await other.end()
    verifier.change = lambda response: None
    await (await attach(service, verifier)).end()


async def test_a_verifier_that_hangs_costs_a_bounded_time(
    service: Drafting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It takes connections and never answers."""
    monkeypatch.setattr(exchange, "CALL_SECONDS", 0.2)
    silent = await asyncio.start_unix_server(lambda *_: None, tmp_path / "silent")
    fields = {"read_grant": GRANT, "verifier_address": f"unix:{tmp_path}/silent"}
    async with silent:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await service.attach([5, 6, 7], **fields)
        assert failure(error) == (CODE.FAILED_PRECONDITION, "KV_NOT_SHARED")


async def test_a_client_that_leaves_while_it_maps_leaves_nothing(
    service: Drafting, tmp_path: Path
) -> None:
    asked = asyncio.Event()
    silent = await asyncio.start_unix_server(lambda *_: asked.set(), tmp_path / "silent")
    async with silent:
        fields = {"read_grant": GRANT, "verifier_address": f"unix:{tmp_path}/silent"}
        attaching = asyncio.create_task(service.attach([5, 6, 7], **fields))
        await asked.wait()
        attaching.cancel()
        await asyncio.gather(attaching, return_exceptions=True)
    assert not FakeDrafter.loaded[0].sequences


async def test_many_verifiers_take_few_connections(
    segment: Segment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MAX_CHANNELS", 2)
    kv = exchange.KvExchange(VerifierAccess())
    folders = [tmp_path / str(index) for index in range(4)]
    for folder in folders:
        folder.mkdir()
        async with kv_verifier(segment, folder) as served:
            for _ in range(2):
                (await kv.map_cache(served.address, GRANT, (1,))).close()
        assert [list(request.layers) for request in served.requests] == [[1], [1]]
        assert len(kv._channels) <= 2
    async with kv_verifier(segment, folders[-1]) as served:  # restarted where it was
        (await kv.map_cache(served.address, GRANT, (1,))).close()
    await kv.close()


async def test_token_and_tls_are_the_deployments(segment: Segment, tmp_path: Path) -> None:
    """One certificate for both services, as `paceline serve` has it."""
    authority = Authority(tmp_path / "authority")
    own = authority.sign("server")
    pair = (own.key.read_bytes(), own.cert.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], authority.cert.read_bytes(), True)
    access = VerifierAccess(
        token="secret", tls_ca=authority.cert, tls_cert=own.cert, tls_key=own.key
    )
    async with kv_verifier(segment, tmp_path, credentials) as verifier:
        async with drafting("x=fake,kv=1", access=access) as service:
            stream = await attach(service, verifier)
            assert verifier.metadata[0]["authorization"] == "Bearer secret"
            await stream.end()
        async with drafting("x=fake,kv=1") as service:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await attach(service, verifier)
            assert failure(error) == (CODE.FAILED_PRECONDITION, "KV_NOT_SHARED")
