"""Errors as callers receive them, in all four kinds of call."""

import asyncio

import grpc
import pytest
from calls import details_of, failure, refusal
from google.rpc import error_details_pb2

from paceline.service import ServiceError
from paceline.v1 import kv_pb2, kv_pb2_grpc

from .conftest import Serve
from .toy import KINDS, SECRET, ask, echo, open_stream

CODE = grpc.StatusCode


@pytest.mark.parametrize("kind", KINDS)
async def test_a_service_error_arrives_with_reason_metadata_and_retry(
    serve: Serve, kind: str
) -> None:
    served = await serve()
    async with served.channel() as channel:
        error = await failure(ask(channel, kind, "fail"))
        aborted = await failure(ask(channel, kind, "abort"))
    assert (aborted.code(), aborted.details()) == (CODE.DATA_LOSS, "by itself")
    assert (error.code(), error.details()) == (CODE.RESOURCE_EXHAUSTED, "no room")
    info = details_of(error, error_details_pb2.ErrorInfo)
    assert (info.domain, info.reason, dict(info.metadata)) == ("paceline", "FULL", {"limit": "3"})
    retry = details_of(error, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 1500


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unexpected_error_has_an_id_and_no_cause(
    serve: Serve, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve()
    async with served.channel() as channel:
        error = await failure(ask(channel, kind, "bug"))
        assert await ask(channel, kind, "still there") == "still there"
    info = details_of(error, error_details_pb2.ErrorInfo)
    assert (error.code(), info.reason) == (CODE.INTERNAL, "INTERNAL_ERROR")
    assert SECRET not in repr(error)
    logged = [r for r in caplog.records if vars(r).get("error_id") == info.metadata["error_id"]]
    assert len(logged) == 1
    assert SECRET in str(logged[0].exc_info)


async def test_a_generated_base_class_says_that_it_is_not_built(serve: Serve) -> None:
    served = await serve()
    async with served.channel() as channel:
        stub = kv_pb2_grpc.KvExchangeServiceStub(channel)
        call = stub.FollowCache(iter([kv_pb2.FollowCacheRequest()]))
        assert await refusal(call) == (CODE.UNIMPLEMENTED, "NOT_BUILT")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x0a\x02\xc3\x28"], ids=["bytes", "utf8"])
async def test_a_malformed_message_fails_its_call_only(serve: Serve, kind: str, raw: bytes) -> None:
    served = await serve()
    async with served.channel() as channel:
        other = await open_stream(channel)
        malformed = (CODE.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
        assert await refusal(ask(channel, kind, raw)) == malformed
        await echo(other, "two")
        await other.done_writing()
        assert await other.read() is grpc.aio.EOF


@pytest.mark.parametrize("kind", KINDS)
async def test_a_message_over_the_limit_fails_its_call_only(serve: Serve, kind: str) -> None:
    served = await serve(max_message_bytes=4096)
    async with served.channel() as channel:
        other = await open_stream(channel)
        for order in ("x" * 8192, "big 8192"):
            error = await failure(ask(channel, kind, order))
            assert error.code() is CODE.RESOURCE_EXHAUSTED
        await echo(other, "two")
        other.cancel()


async def test_cancellation_reaches_the_handler_at_once(serve: Serve) -> None:
    served = await serve()
    async with served.channel() as channel:
        stream = await open_stream(channel)
        stream.cancel()
        async with asyncio.timeout(60):
            await served.toy.gate.drained()
    assert served.toy.events[-1] == "stream ended"


def test_over_long_and_unencodable_messages_still_make_a_status() -> None:
    error = ServiceError.invalid_argument("BAD", "\ud800" + "x" * 9000, value="y" * 9000)
    status = error.to_status()
    assert status.message.startswith("?x")
    assert status.ByteSize() < 4096
