"""Which verifiers a drafter service joins, when, and what it tells them."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from calls import until
from fakes.exchange import CARRIERS, Peer, fake_verifier

from paceline.drafter import DrafterSpec
from paceline.drafter.service import build_service
from paceline.service import OptionsError
from paceline.v1 import drafter_pb2

from .conftest import Drafting, drafting, load, running, unload


async def links(service: Drafting) -> list[drafter_pb2.VerifierLink]:
    response = await service.registry.ListDrafters(drafter_pb2.ListDraftersRequest())
    return list(response.verifiers)


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


async def test_a_service_is_ready_when_each_verifier_was_tried(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.drafter.exchange.REACH_SECONDS", 60.0)
    (short_folder / "other").mkdir()
    async with (
        fake_verifier(short_folder) as verifier,
        fake_verifier(short_folder / "other") as refusing,
    ):
        refusing.refuse = True
        addresses = [verifier.address, refusing.address, f"unix:{short_folder}/nobody"]
        service = build_service([DrafterSpec.parse("ngram")], verifiers=addresses)
        async with running(service, f"unix:{short_folder}/drafter"):
            joined, refused, nobody = service.exchange.links()
    assert (joined.carrier, joined.error) == ("socket", "")
    assert "not today" in refused.error
    assert "UNAVAILABLE" in nobody.error


async def test_a_verifier_that_says_nothing_is_not_waited_for(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.drafter.exchange.REACH_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        service = build_service([DrafterSpec.parse("ngram")], verifiers=[address])
        async with running(service, f"unix:{short_folder}/drafter"):
            assert [link.error for link in service.exchange.links()] == ["not joined yet"]


@pytest.mark.parametrize(
    "address", ["", "7431", "host", "host:", "host:x", "host:*", "unix:", "dns:///a:1"]
)
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(OptionsError, match="expected host:port"):
        build_service([], verifiers=[address])
