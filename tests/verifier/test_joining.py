"""Join: services that join, leave, come back or break the protocol; others notice nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drafters
import grpc
import pytest
from calls import failure, reason_of, refusal, remaining, until
from fakes.exchange import DrafterService
from verifier_support import CARRIERS, PROMPT, VOCAB, Client, Serve, fallbacks_of, tokens_of

from paceline.service import OptionsError, ServiceError, limits
from paceline.service.exchange import request_files
from paceline.v1 import drafter_pb2, exchange_pb2, exchange_pb2_grpc, verifier_pb2
from paceline.verifier.rpc import exchange

FIELDS: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
INVALID = grpc.StatusCode.INVALID_ARGUMENT
pytestmark = pytest.mark.usefixtures("no_delays")


async def test_joined_services_are_listed(client: Client, far_service: DrafterService) -> None:
    service = far_service
    await client.drafter_service.join()
    name = await service.add(drafters.nothing)
    created = await client.create(PROMPT, **FIELDS)
    service.paused = []
    await client.begin(created.handle, credits=1, drafter=name)
    await until(lambda: bool(service.opened))
    told = await client.stub.GetModel(verifier_pb2.GetModelRequest())
    near, far = told.drafter_services
    assert [near.default_drafter, far.default_drafter] == ["test", "far"]
    assert (list(near.drafters), near.sequences) == (client.drafter_service.infos, 0)
    assert (list(far.drafters), far.sequences) == (service.infos, 1)
    assert near.carrier == verifier_pb2.CARRIER_SOCKET
    assert far.carrier == verifier_pb2.CARRIER_STREAM
    joined = service.joined
    assert joined is not None
    assert joined.vocab_size == VOCAB
    for name in ("target_fingerprint", "tokenizer_digest", "max_tree_nodes", "instance_id"):
        assert getattr(joined, name) == getattr(told, name)


async def test_a_service_that_comes_back_drafts_again(
    client: Client, service: DrafterService
) -> None:
    plain = await client.generate(PROMPT, None, **FIELDS)
    created = await client.create(PROMPT, **FIELDS)
    name = await service.add(drafters.wrong(plain, len(PROMPT)))
    call = await client.begin(created.handle, credits=2, drafter=name)
    responses = [await call.read() for _ in range(2)]
    await service.leave()
    responses.append(await call.step())
    await service.join()
    await call.write(verifier_pb2.GenerateRequest(credits=100))
    responses += await remaining(call)
    assert [*created.first.tokens, *tokens_of(responses)] == plain
    assert [bool(each.tree.tokens) for each in responses[:5]] == [True, True, False, True, True]
    assert fallbacks_of(responses) == ["drafter_unavailable"]
    assert responses[2].no_draft == verifier_pb2.NO_DRAFT_REASON_NOT_READY
    assert [each.sequence for each in service.opened] == [1, 1], "counted anew"
    assert list(service.opened[1].tokens) == [*PROMPT, *plain[:4]]


async def test_unloaded_drafters_close_their_sequences(
    client: Client, service: DrafterService
) -> None:
    """Others of the service go on; an empty list closes all."""
    await service.join()
    other = service.info("0", name="other")
    await service.update([*service.infos[:2], other])
    await service.add(drafters.nothing)
    handles = [(await client.create(PROMPT, **FIELDS)).handle for _ in range(2)]
    calls = [
        await client.begin(handle, drafter=name)
        for handle, name in zip(handles, ("test@0", "other"), strict=True)
    ]

    async def step() -> list[Any]:
        return [await call.step() for call in calls]

    empty = verifier_pb2.NO_DRAFT_REASON_EMPTY
    not_ready = verifier_pb2.NO_DRAFT_REASON_NOT_READY
    assert [each.no_draft for each in await step()] == [empty, empty]
    await service.update([other])
    found = await step()
    assert [each.no_draft for each in found] == [not_ready, empty]
    assert list(found[0].fallbacks) == ["drafter_unavailable"]
    await service.update([])
    assert [each.no_draft for each in await step()] == [not_ready, not_ready]
    await until(lambda: not service.sequences)


# Connections that break the protocol


async def begin(client: Client, **fields: Any) -> tuple[Any, exchange_pb2.Joined]:
    """A Join call that has announced a list of drafters, and what the verifier answered."""
    call = exchange_pb2_grpc.DraftExchangeServiceStub(client.channel).Join()
    await call.write(exchange_pb2.JoinRequest(drafters=exchange_pb2.DrafterList(**fields)))
    return call, (await call.read()).joined


async def socket_path(client: Client) -> str:
    """Of the verifier, as Linux names it."""
    call, joined = await begin(client)
    call.cancel()
    return str(joined.socket_path.replace("@", "\0", 1))


LONG = "x" * 257
LISTS: list[dict[str, Any]] = [
    {"drafters": [drafter_pb2.DrafterInfo(name="test")] * 257},
    {"drafters": [drafter_pb2.DrafterInfo(name=LONG)]},
    {"drafters": [drafter_pb2.DrafterInfo(name="test", version=LONG)]},
    {"drafters": [drafter_pb2.DrafterInfo(name="test", folder="x" * (1 << 20))]},
    {"default_drafter": LONG},
]


@pytest.mark.parametrize("fields", LISTS)
async def test_lists_that_are_too_long(fields: dict[str, Any], client: Client) -> None:
    assert await refusal(begin(client, **fields)) == (INVALID, "BAD_DRAFTERS")
    service = client.drafter_service
    await service.join()
    listed = exchange_pb2.DrafterList(**fields)
    await service.call.write(exchange_pb2.JoinRequest(drafters=listed))
    assert await service.error() == (INVALID, "BAD_DRAFTERS")


async def test_a_service_has_to_introduce_itself(client: Client) -> None:
    stub = exchange_pb2_grpc.DraftExchangeServiceStub(client.channel)
    call = stub.Join()
    await call.write(exchange_pb2.JoinRequest(use_stream=True))
    assert reason_of(await failure(call)) == "NOT_JOINED"
    call, _ = await begin(client)
    await call.write(exchange_pb2.JoinRequest())
    assert reason_of(await failure(call)) == "NOT_READY"
    call = stub.Join()
    await call.done_writing()
    assert [message async for message in call] == []
    assert not client.service.joined()


async def test_lists_are_answered_when_they_are_in_use(client: Client) -> None:
    infos = [client.drafter_service.info("0", name=name) for name in ("a", "b", "c")]
    call, _ = await begin(client, drafters=infos[:1])
    await call.write(exchange_pb2.JoinRequest(use_stream=True))
    for number, info in enumerate(infos, 1):
        assert await call.read() == exchange_pb2.JoinResponse(lists=number)
        (service,) = client.service.joined()
        assert list(service.drafters) == [info]
        listed = exchange_pb2.DrafterList(drafters=infos[number : number + 1])
        await call.write(exchange_pb2.JoinRequest(drafters=listed))
    call.cancel()
    await until(lambda: not client.service.joined())


async def test_a_socket_without_the_token_is_closed(client: Client) -> None:
    """And the service may use its stream then."""
    call, joined = await begin(client)
    path, right = joined.socket_path.replace("@", "\0", 1), joined.socket_token
    for frame in (b"\x10\0\0\0" + bytes(16), b"\xff" * 20, b"\x10\0\0\0" + right[:8], b""):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(frame)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
    await call.write(exchange_pb2.JoinRequest(use_stream=True))
    await until(lambda: bool(client.service.joined()))
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"\x10\0\0\0" + right)
    assert await reader.read() == b"", "the token has no use any more"
    writer.close()
    call.cancel()
    await until(lambda: not client.service.joined())


async def test_connections_that_say_nothing(client: Client) -> None:
    """Are closed when others come, however many they are; a service joins beside them."""
    path = await socket_path(client)
    silent = [await asyncio.open_unix_connection(path) for _ in range(2 * limits.HANDSHAKES)]
    await client.drafter_service.join()
    assert len(client.service.exchange._handshakes) <= limits.HANDSHAKES
    for reader, _ in silent[: limits.HANDSHAKES - 1]:
        assert await asyncio.wait_for(reader.read(), 60) == b""
    for _, writer in silent:
        writer.close()


async def test_services_join_after_any_error_of_accept(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as too many open files: then the oldest silent connection makes room."""
    path = await socket_path(client)
    reader, writer = await asyncio.open_unix_connection(path)
    await until(lambda: bool(client.service.exchange._handshakes))
    loop = asyncio.get_running_loop()
    accept = loop.sock_accept
    errors = [OSError(errno.EMFILE, "files"), OSError(errno.ECONNABORTED, "aborted")]

    async def failing(listener: socket.socket) -> Any:
        if errors:
            raise errors.pop(0)
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", failing)
    _, other = await asyncio.open_unix_connection(path)  # ends the wait of the real one
    assert await asyncio.wait_for(reader.read(), 60) == b""
    await client.drafter_service.join()
    assert not errors
    writer.close()
    other.close()


async def test_a_user_that_is_not_known_cannot_connect(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless calls need a token, which it then has. The log says it once."""
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(exchange, "_ROOT", 54321)
    path = await socket_path(client)
    for _ in range(3):
        reader, writer = await asyncio.open_unix_connection(path)
        assert await asyncio.wait_for(reader.read(), limits.HANDSHAKE_SECONDS / 2) == b""
        writer.close()
    assert sum("another user" in each.message for each in caplog.records) == 1
    monkeypatch.setattr(client.service.exchange, "_needs_token", True)
    await client.drafter_service.join()


async def test_a_name_is_not_taken_from_a_known_service(client: Client) -> None:
    service = client.drafter_service
    await service.join()
    servicer = client.service.exchange
    with pytest.raises(ServiceError, match="offers the drafter 'test'") as raised:
        servicer._check_names(exchange_pb2.DrafterList(drafters=service.infos[:1]), known=False)
    assert raised.value.reason == "NAME_TAKEN"
    servicer._check_names(exchange_pb2.DrafterList(drafters=service.infos[:1]), known=True)
    other = exchange_pb2.DrafterList(drafters=[service.info("0", name="another")])
    servicer._check_names(other, known=False)
    servicer._links[0].known = False
    servicer._check_names(exchange_pb2.DrafterList(drafters=service.infos[:1]), known=True)
    assert (await service.error())[1] == "NAME_TAKEN", "a known one takes it over"


async def test_a_socket_with_a_path(serve: Serve, tmp_path: Path) -> None:
    """Which replaces that of a verifier that was killed, and no other one."""
    path = tmp_path / "exchange"
    options: dict[str, Any] = {"kv_bytes": 1 << 28, "draft_socket": str(path)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(OptionsError, match="Address already in use"):
            async with serve(**options):
                pass
    async with serve(**options) as client:
        plain = await client.generate(PROMPT, None, **FIELDS)
        assert await client.generate(PROMPT, drafters.random_tree, **FIELDS) == plain
        joined = client.drafter_service.joined
        assert joined is not None
        assert joined.socket_path == str(path)
        created = await client.create(PROMPT)
        files = await asyncio.to_thread(request_files, str(path), created.read_grant, 60.0)
        (file,) = files
        os.close(file)
        await client.release(created.handle)
    assert not path.exists()


def opened_for(number: int) -> dict[str, Any]:
    return {"opened": [exchange_pb2.SequenceOpened(sequence=number)]}


def tree_for(number: int, round_: int) -> dict[str, Any]:
    return {"trees": [exchange_pb2.DraftedTree(sequence=number, round=round_)]}


VIOLATIONS: list[tuple[dict[str, Any] | bytes, str]] = [
    (opened_for(2), "UNKNOWN_SEQUENCE"),
    (opened_for(0), "UNKNOWN_SEQUENCE"),
    ({"refused": [exchange_pb2.SequenceRefused(sequence=2**64 - 1)]}, "UNKNOWN_SEQUENCE"),
    (tree_for(7, 1), "UNKNOWN_SEQUENCE"),
    (tree_for(1, 0), "WRONG_ROUND"),
    (tree_for(1, 2), "WRONG_ROUND"),
    ({"trees": [*tree_for(1, 1)["trees"]] * 2}, "WRONG_ROUND"),
    (opened_for(1), "OPENED_TWICE"),
    ({}, "EMPTY_MESSAGE"),
    (b"\0\0\0\0" * 5_000, "EMPTY_MESSAGE"),
    ({"use_stream": True}, "EMPTY_MESSAGE"),
    (b"\x04\0\0\0\xff\xff\xff\xff", "BAD_MESSAGE"),
    ((limits.FRAME_BYTES + 1).to_bytes(4, "little"), "DRAFTER_GONE"),
]


@CARRIERS
async def test_violations_end_the_connection(socket: bool, client: Client) -> None:
    plain = await client.generate(PROMPT, None, **FIELDS)
    for message, reason in VIOLATIONS:
        if socket or isinstance(message, dict):
            await violated(client, plain, message, reason, socket=socket)


async def violated(
    client: Client, plain: list[int], message: dict[str, Any] | bytes, reason: str, *, socket: bool
) -> None:
    """Generations of another service notice nothing, and its own go on without drafts."""
    async with client.new_drafter_service(socket=socket, name="bad") as bad:
        name = await bad.add(drafters.nothing)
        created, beside = [await client.create(PROMPT, **FIELDS) for _ in range(2)]
        good = await client.drafter_service.add(drafters.right(plain, len(PROMPT), depth=1))
        bad.paused = []
        victim = asyncio.create_task(client.responses(created.handle, drafter=name))
        other = asyncio.create_task(client.responses(beside.handle, drafter=good))
        await until(lambda: bool(bad.paused))
        if isinstance(message, bytes):
            assert bad.writer is not None
            bad.writer.write(message)
        else:
            await bad.send(**message)
        assert (await bad.error())[1] == reason, message
        theirs, others = await victim, await other
    assert [*created.first.tokens, *tokens_of(theirs)] == plain
    assert [*beside.first.tokens, *tokens_of(others)] == plain
    assert fallbacks_of(theirs) == ["drafter_unavailable"]
    assert fallbacks_of(others) == []
    assert all(each.tree.tokens for each in others[:-1])


@CARRIERS
@pytest.mark.parametrize("answer", [opened_for, lambda number: tree_for(number, 1)])
async def test_who_answers_closed_sequences_again_and_again_is_disconnected(
    client: Client, socket: bool, answer: Callable[[int], dict[str, Any]]
) -> None:
    """Three answers may have crossed the message that closed each of them."""
    plain = await client.generate(PROMPT, None, **FIELDS)
    async with client.new_drafter_service(socket=socket, name="bad") as bad:
        name = await bad.add(drafters.nothing)
        for _ in range(2):
            await client.rest((await client.create(PROMPT, **FIELDS)).handle, drafter=name)
        await until(lambda: not bad.sequences)
        for _ in range(6):
            await bad.send(**answer(1))
        assert await client.generate(PROMPT, drafters.random_tree, **FIELDS) == plain
        assert len(client.service.joined()) == 2
        await bad.send(**answer(2))
        assert await bad.error() == (grpc.StatusCode.INVALID_ARGUMENT, "CLOSED_SEQUENCE")
        assert await client.generate(PROMPT, drafters.random_tree, **FIELDS) == plain


async def test_lists_of_drafters_are_taken_one_at_a_time(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is work for all callers."""
    monkeypatch.setattr(limits, "LIST_SECONDS", 3600.0)
    service = client.drafter_service
    await service.joining()

    def names() -> list[str]:
        (joined,) = client.service.joined()
        return [each.name for each in joined.drafters]

    async def announce(name: str) -> None:
        drafter = drafter_pb2.DrafterInfo(name=name, traffic_share=1.0)
        listed = exchange_pb2.DrafterList(drafters=[drafter])
        await service.call.write(exchange_pb2.JoinRequest(drafters=listed))

    await announce("first")
    await until(lambda: names() == ["first"])
    await announce("second")
    await client.generate(PROMPT, None, **FIELDS)
    assert names() == ["first"]
