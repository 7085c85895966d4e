"""Which verifiers a drafter service joins, when, and what it tells them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from calls import until
from fakes.exchange import CARRIERS, Peer, fake_verifier

from paceline.drafter import DrafterSpec
from paceline.drafter.service import build_service
from paceline.service import OptionsError
from paceline.v1 import drafter_pb2, drafter_pb2_grpc

from .conftest import Drafting, drafting, failure, load, running, unload

CODE = grpc.StatusCode


async def links(service: Drafting) -> list[drafter_pb2.VerifierLink]:
    response = await service.registry.ListDrafters(drafter_pb2.ListDraftersRequest())
    return list(response.verifiers)


async def join(registry: Any, address: str) -> drafter_pb2.VerifierLink:
    request = drafter_pb2.JoinVerifierRequest(address=address)
    return (await registry.JoinVerifier(request)).verifier


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_verifiers_are_listed_with_their_carrier(carrier: str) -> None:
    async with drafting("ngram", carrier=carrier) as service:
        await service.open([1])
        (link,) = await links(service)
        assert link.address == service.verifier.address
        assert (link.carrier, link.sequences, link.error) == (carrier, 1, "")
        service.verifier.refuse = True
        service.peer.leave.set()
        await service.peer.ended.wait()

        await until(lambda: "not today" in service.service.exchange.links()[0].error)
        (link,) = await links(service)
        assert (link.carrier, link.sequences) == ("", 0)


async def test_without_a_socket_that_opens_the_stream_is_used(short_folder: Path) -> None:
    async with fake_verifier(short_folder, "socket") as verifier:
        (short_folder / "exchange").unlink()
        service = build_service([DrafterSpec.parse("ngram")], verifiers=[verifier.address])
        async with running(service, f"unix:{short_folder}/drafter"):
            peer = await verifier.peer()
            assert peer.carrier == "stream"
            text = await peer.open([5, 6, 7, 5, 6])
            assert (await text.round()).tree.tokens[0] == 7


async def test_a_verifier_may_start_later(short_folder: Path) -> None:
    address = f"unix:{short_folder}/verifier"
    service = build_service([DrafterSpec.parse("ngram")], verifiers=[address])
    async with running(service, f"unix:{short_folder}/drafter"):
        await until(lambda: "UNAVAILABLE" in service.exchange.links()[0].error)
        async with fake_verifier(short_folder) as verifier:
            text = await (await verifier.peer()).open([5, 6, 7, 5, 6])
            assert (await text.round()).tree.tokens[0] == 7


def names(peer: Peer) -> list[tuple[str, str, float, bool]]:
    newest = peer.lists[-1]
    return [(d.name, d.version, d.traffic_share, d.draining) for d in newest.drafters]


async def test_changes_of_the_list_of_drafters_are_announced(tmp_path: Path) -> None:
    async with drafting("x=ngram", roots=[tmp_path]) as service:
        peer = service.peer
        assert names(peer) == [("x", "1", 1.0, False)]
        assert peer.lists[0].default_drafter == "x"
        text = await service.open([1], drafter="x")
        await load(service, "x", "fake", activate=True)
        assert names(peer) == [("x", "1", 0.0, False), ("x", "2", 1.0, False)]
        await unload(service, "x", "1")
        assert names(peer) == [("x", "1", 0.0, True), ("x", "2", 1.0, False)]
        await text.end()
        await until(lambda: names(peer) == [("x", "2", 1.0, False)])


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_a_change_is_answered_when_verifiers_list_it(carrier: str) -> None:
    """Those that have left are not waited for."""
    async with drafting("x=ngram", carrier=carrier) as service:
        peer = service.peer
        for change in (load(service, "y", "ngram"), unload(service, "y")):
            peer.takes_lists.clear()
            lists = len(peer.lists)
            answer = asyncio.create_task(change)
            await until(lambda lists=lists: len(peer.lists) > lists)
            await links(service)
            assert not answer.done()
            peer.takes_lists.set()
            await answer
        peer.takes_lists.clear()
        answer = asyncio.create_task(load(service, "y", "ngram"))
        await until(lambda: names(peer)[-1][0] == "y")
        peer.leave.set()
        await answer


async def test_folders_are_not_announced(folder: Path) -> None:
    async with drafting(f"x=lm:{folder}") as service:
        (info,) = service.peer.lists[0].drafters
        assert (info.method, info.folder) == ("lm", "")


async def test_a_verifier_is_joined_on_request_if_the_list_allows_it(short_folder: Path) -> None:
    service = build_service([DrafterSpec.parse("ngram")], verifiers=["unix:*", "127.0.0.1:*"])
    address = f"unix:{short_folder}/drafter"
    async with (
        fake_verifier(short_folder) as verifier,
        running(service, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        registry: Any = drafter_pb2_grpc.DrafterRegistryServiceStub(channel)
        assert service.exchange.links() == []
        both = await asyncio.gather(*(join(registry, verifier.address) for _ in range(2)))
        assert {(link.address, link.carrier) for link in both} == {(verifier.address, "socket")}
        await verifier.peer()
        assert len(verifier.peers) == 1
        for wrong in ("10.0.0.1:7431", "localhost:1", "", "unix:*", "127.0.0.1:*", "nonsense"):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await join(registry, wrong)
            assert failure(error) == (CODE.FAILED_PRECONDITION, "VERIFIER_NOT_ALLOWED")


async def test_a_verifier_that_does_not_answer_is_not_kept(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.drafter.exchange.REACH_SECONDS", 0.2)
    service = build_service([DrafterSpec.parse("ngram")], verifiers=["unix:*"])
    address = f"unix:{short_folder}/drafter"
    async with running(service, address), grpc.aio.insecure_channel(address) as channel:
        registry: Any = drafter_pb2_grpc.DrafterRegistryServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await join(registry, f"unix:{short_folder}/nobody")
        assert failure(error) == (CODE.UNAVAILABLE, "VERIFIER_UNREACHABLE")
        assert service.exchange.links() == []


@pytest.mark.parametrize("address", ["", "7431", "host", "host:", "host:x", "unix:", "dns:///a:1"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(OptionsError, match="expected host:port"):
        build_service([], verifiers=[address])
