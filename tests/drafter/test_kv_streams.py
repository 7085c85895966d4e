"""Sequences of methods that read the target's KV: mapped first, closed last, ended with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from calls import until
from certificates import Authority
from fakes.drafter import FakeDrafter, FakeSequence
from fakes.exchange import Refused, Text

from paceline.drafter.kv.exchange import VerifierAccess

from .conftest import Drafting, drafting
from .segments import COMMITTED, GRANT, HEADS, KvVerifier, change_layout, new_segment


@pytest.fixture
def kv() -> Iterator[KvVerifier]:
    with new_segment() as segment:
        yield KvVerifier(segment)


@pytest.fixture
async def service(kv: KvVerifier) -> AsyncIterator[Drafting]:
    """Drafters that read the first and the last layer, and one that reads none."""
    FakeDrafter.loaded.clear()
    async with drafting("x=fake,kv=0/-1", "ngram", share=kv.share) as served:
        yield served


def newest() -> FakeSequence:
    return FakeDrafter.loaded[0].sequences[-1]


async def closed(sequence: FakeSequence) -> None:
    """Until its mapping is closed; after it, as the sequence itself asserts."""
    await until(lambda: sequence.kv is not None and sequence.kv.closed)
    assert sequence.closed == 1


async def open_text(service: Drafting, **fields: Any) -> Text:
    return await service.open([5, 6, 7], **{"read_grant": GRANT, **fields})


async def test_a_method_reads_what_the_verifier_writes(service: Drafting, kv: KvVerifier) -> None:
    text = await open_text(service)
    assert text.opened.kv_transport == "map"
    sequence, segment = newest(), kv.segment
    await text.round()
    segment.kv[..., COMMITTED, :] = 9.0
    segment.publish(COMMITTED + 1)
    await text.round([8])
    for prefix, length in zip(sequence.prefixes, (COMMITTED, COMMITTED + 1), strict=True):
        for index, plane in enumerate(prefix):
            theirs = segment.layer((0, 2)[index // 2])[index % 2]
            assert torch.equal(plane, theirs[:, :length])
    await text.end()
    await closed(sequence)


async def test_sequences_end_in_any_way_and_leave_no_mapping(service: Drafting) -> None:
    texts = [await open_text(service) for _ in range(3)]
    sequences = list(FakeDrafter.loaded[0].sequences)
    await texts[0].end()
    with pytest.raises(Refused):
        await texts[1].round([2000])
    service.peer.leave.set()
    for sequence in sequences:
        await closed(sequence)


async def test_a_released_cache_ends_the_sequence(service: Drafting, kv: KvVerifier) -> None:
    text = await open_text(service)
    await text.round()
    kv.segment.close()
    with pytest.raises(Refused, match="KV_GONE"):
        await text.round([8])
    await closed(newest())


async def test_a_sequence_without_its_kv_is_refused(service: Drafting, kv: KvVerifier) -> None:
    """Others go on, and so does the same drafter once the KV is there."""
    for grant, message in ((b"", "no read_grant"), (bytes(16), "no cache has this read grant")):
        with pytest.raises(Refused, match=message) as error:
            await open_text(service, read_grant=grant)
        assert error.value.reason == "KV_NOT_SHARED"
    change_layout(kv.segment, heads=1 << 31)
    with pytest.raises(Refused, match="expected one inside bytes"):
        await open_text(service)
    change_layout(kv.segment, heads=HEADS)
    assert not FakeDrafter.loaded[0].sequences
    other = await open_text(service, drafter="ngram")
    await other.round()
    await (await open_text(service)).end()


async def test_a_verifier_that_never_shares_costs_a_bounded_time(
    service: Drafting, kv: KvVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.drafter.kv.exchange.CALL_SECONDS", 0.2)
    kv.hangs = True
    with pytest.raises(Refused, match="timed out") as error:
        await open_text(service)
    assert error.value.reason == "KV_NOT_SHARED"


async def test_a_verifier_that_leaves_while_its_kv_is_mapped_leaves_nothing(
    service: Drafting, kv: KvVerifier
) -> None:
    kv.hangs = True
    opening = asyncio.create_task(open_text(service))
    await until(lambda: bool(kv.requests))
    service.peer.leave.set()
    with pytest.raises(ConnectionError):
        await opening
    await service.verifier.peer(2)
    assert not FakeDrafter.loaded[0].sequences


async def test_token_and_tls_are_the_deployments(kv: KvVerifier, tmp_path: Path) -> None:
    """One certificate for both services, as `paceline serve` has it."""
    authority = Authority(tmp_path / "authority")
    own = authority.sign("server")
    pair = (own.key.read_bytes(), own.cert.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], authority.cert.read_bytes(), True)
    access = VerifierAccess(
        token="secret", tls_ca=authority.cert, tls_cert=own.cert, tls_key=own.key
    )
    async with drafting(
        "x=fake,kv=1", access=access, share=kv.share, credentials=credentials
    ) as service:
        await open_text(service)
        assert service.verifier.metadata[0]["authorization"] == "Bearer secret"
