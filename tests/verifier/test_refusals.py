"""Malformed requests and those for which there is no room: a clear status, and others go on."""

from typing import Any

import grpc
import pytest
from calls import details_of, failure, reason_of, refusal
from google.rpc import error_details_pb2
from verifier_support import CONTEXT, PROMPT, VOCAB, Client, Serve

from paceline.v1 import sampling_pb2, verifier_pb2
from paceline.verifier import store as store_module

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def sampling(**fields: Any) -> dict[str, Any]:
    return {"prompt_tokens": PROMPT, "sampling": sampling_pb2.SamplingParams(**fields)}


CREATE: list[tuple[dict[str, Any], grpc.StatusCode, str]] = [
    ({"prompt_tokens": []}, INVALID, "PROMPT_EMPTY"),
    ({"prompt_tokens": [1] * CONTEXT}, INVALID, "PROMPT_TOO_LONG"),
    ({"prompt_tokens": [1] * 1_000_000}, INVALID, "PROMPT_TOO_LONG"),
    ({"prompt_tokens": [VOCAB]}, INVALID, "TOKEN_OUT_OF_VOCABULARY"),
    ({"prompt_tokens": [2**32 - 1]}, INVALID, "TOKEN_OUT_OF_VOCABULARY"),
    ({"prompt_tokens": PROMPT, "output_tokens": [VOCAB]}, INVALID, "TOKEN_OUT_OF_VOCABULARY"),
    ({"prompt_tokens": PROMPT, "stop_token_ids": [VOCAB]}, INVALID, "TOKEN_OUT_OF_VOCABULARY"),
    ({"prompt_tokens": PROMPT, "output_tokens": [1, 2], "max_new_tokens": 2}, INVALID,
     "NOTHING_LEFT"),
    ({"prompt_tokens": PROMPT, "stop_token_ids": [1] * 1025}, INVALID, "TOO_MANY_STOP_TOKENS"),
    ({"prompt_tokens": PROMPT, "top_logprobs": 21}, INVALID, "BAD_TOP_LOGPROBS"),
    ({"prompt_tokens": PROMPT, "prompt_logprobs": 21}, INVALID, "BAD_TOP_LOGPROBS"),
    ({"prompt_tokens": PROMPT, "parent_handle": b"short"}, INVALID, "BAD_HANDLE"),
    ({"prompt_tokens": PROMPT, "parent_handle": bytes(16)}, grpc.StatusCode.NOT_FOUND,
     "CACHE_NOT_FOUND"),
    ({"prompt_tokens": PROMPT, "drafter": "x" * 257}, INVALID, "BAD_DRAFTER"),
    (sampling(mode=77), INVALID, "INVALID_SAMPLING"),
    (sampling(temperature=-1), INVALID, "INVALID_SAMPLING"),
    (sampling(logit_bias={VOCAB: 1.0}), INVALID, "TOKEN_OUT_OF_VOCABULARY"),
]  # fmt: skip


async def test_creations(client: Client) -> None:
    plain = await client.generate(PROMPT, None, max_new_tokens=8)
    for fields, code, reason in CREATE:
        error = await failure(client.stub.CreateCache(verifier_pb2.CreateCacheRequest(**fields)))
        assert (error.code(), reason_of(error)) == (code, reason), fields
        info = details_of(error, error_details_pb2.ErrorInfo)
        assert info.domain == "paceline"
        assert len(error.details()) > 20, "the message says what was wrong"
    assert len(client.service.store) == 0
    assert await client.generate(PROMPT, None, max_new_tokens=8) == plain


@pytest.mark.parametrize("handle", [b"", b"short", bytes(17)])
async def test_handles_of_a_wrong_size(client: Client, handle: bytes) -> None:
    assert await client.refusal(handle) == (INVALID, "BAD_HANDLE")
    for call in (
        client.stub.RenewLease(verifier_pb2.RenewLeaseRequest(handle=handle)),
        client.stub.ReleaseCache(verifier_pb2.ReleaseCacheRequest(handle=handle)),
    ):
        assert await refusal(call) == (INVALID, "BAD_HANDLE")


async def test_a_handle_is_valid_for_its_owner_only(client: Client) -> None:
    created = await client.create(PROMPT)
    thief = (("authorization", "Bearer someone-else"),)
    start = verifier_pb2.GenerateStart(handle=created.handle, position=1)
    stream = client.stub.Generate(metadata=thief)
    await stream.write(verifier_pb2.GenerateRequest(start=start))
    fork = verifier_pb2.CreateCacheRequest(prompt_tokens=PROMPT, parent_handle=created.handle)
    renewal = verifier_pb2.RenewLeaseRequest(handle=created.handle)
    for call in (
        stream,
        client.stub.RenewLease(renewal, metadata=thief),
        client.stub.CreateCache(fork, metadata=thief),
    ):
        assert await refusal(call) == (grpc.StatusCode.NOT_FOUND, "CACHE_NOT_FOUND")
    release = verifier_pb2.ReleaseCacheRequest(handle=created.handle)
    assert not (await client.stub.ReleaseCache(release, metadata=thief)).released
    _, reason = await client.refusal(created.read_grant)
    assert reason == "CACHE_NOT_FOUND", "a read grant is no handle"
    assert await client.release(created.handle)


async def test_malformed_messages(client: Client) -> None:
    for method in ("CreateCache", "Generate"):
        call = client.channel.stream_stream(f"/paceline.v1.VerifierService/{method}")()
        await call.write(b"\xff\xff\xff")
        assert await refusal(call) == (INVALID, "MALFORMED_MESSAGE")


async def test_a_full_verifier_returns_a_retry_delay(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "WAIT_SECONDS", 0.0)
    # A text of 512 tokens: 2 layers x 2 kinds x 2 heads x 16 elements of 4 bytes each.
    one = 512 * 2 * 2 * 2 * 16 * 4
    async with serve(kv_bytes=2 * one + 1) as client:
        caches = [await client.create([1] * 500, max_new_tokens=12) for _ in range(2)]
        request = verifier_pb2.CreateCacheRequest(prompt_tokens=[1] * 500, max_new_tokens=12)
        error = await failure(client.stub.CreateCache(request))
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_FULL")
        retry = details_of(error, error_details_pb2.RetryInfo)
        assert retry.retry_delay.ToMilliseconds() > 0
        await client.release(caches[0].handle)
        caches[0] = await client.create([1] * 500, max_new_tokens=12)
        for cache in caches:
            await client.release(cache.handle)
        # The whole context never fits with its hidden states: the text goes on without them.
        await client.create([1] * 500, max_new_tokens=0, drafter=await client.reader(0, 1))
