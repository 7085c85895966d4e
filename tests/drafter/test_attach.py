"""Checks of an attach: the text, the sampling parameters and the target."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest

from paceline.v1 import drafter_pb2, sampling_pb2

from .conftest import VOCAB, Stream, drafting, failure
from .fakes import TARGET, TOKENIZER

CODE = grpc.StatusCode
ATTACH = {"tokens": [1, 2], "vocab_size": VOCAB, "prompt_length": 2}


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": sampling_pb2.SamplingParams(**fields)}


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"tokens": []}, CODE.INVALID_ARGUMENT, "EMPTY_TEXT"),
        ({"tokens": [1, VOCAB]}, CODE.INVALID_ARGUMENT, "TOKEN_OUT_OF_VOCABULARY"),
        ({"tokens": [1] * 5001}, CODE.INVALID_ARGUMENT, "TEXT_TOO_LONG"),
        ({"vocab_size": 0}, CODE.INVALID_ARGUMENT, "INVALID_VOCABULARY"),
        ({"prompt_length": 3}, CODE.INVALID_ARGUMENT, "INVALID_PROMPT_LENGTH"),
        (sampling(temperature=-1), CODE.INVALID_ARGUMENT, "INVALID_SAMPLING"),
        (sampling(temperature=math.nan), CODE.INVALID_ARGUMENT, "INVALID_SAMPLING"),
        (sampling(top_p=1.5), CODE.INVALID_ARGUMENT, "INVALID_SAMPLING"),
        (sampling(repetition_penalty=math.inf), CODE.INVALID_ARGUMENT, "INVALID_SAMPLING"),
        (sampling(logit_bias={VOCAB: 1.0}), CODE.INVALID_ARGUMENT, "INVALID_SAMPLING"),
        (sampling(logit_bias={1: math.nan}), CODE.INVALID_ARGUMENT, "INVALID_SAMPLING"),
        ({"drafter": "nobody"}, CODE.NOT_FOUND, "DRAFTER_NOT_FOUND"),
        ({"version": "99"}, CODE.NOT_FOUND, "DRAFTER_NOT_FOUND"),
    ],
)
async def test_an_invalid_attach_is_refused(
    fields: dict[str, Any], code: grpc.StatusCode, reason: str
) -> None:
    async with drafting("ngram", max_context=5000) as service:
        other = await service.attach([5, 6, 7, 8, 5, 6, 7])
        stream = Stream(service.drafter.Draft(), 2)
        attach = drafter_pb2.DraftAttach(**{**ATTACH, **fields})
        await stream.send(drafter_pb2.DraftRequest(attach=attach))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.read()
        assert failure(error) == (code, reason)
        assert list((await other.round()).tree.tokens)[:2] == [8, 5]
        await other.end()


async def test_a_mismatch_is_refused_with_both_digests() -> None:
    specs = (f"made=fake,target={TARGET},tokenizer={TOKENIZER}", "sized=fake,vocab=777")
    async with drafting(*specs) as service:
        right = {"target_fingerprint": TARGET, "tokenizer_digest": TOKENIZER}
        await (await service.attach([1], drafter="made", **right)).end()
        for wrong, reason, digests in (
            ({"target_fingerprint": "e" * 64}, "TARGET_MISMATCH", (TARGET, "e" * 64)),
            ({"target_fingerprint": ""}, "TARGET_MISMATCH", (TARGET, "unnamed")),
            ({"tokenizer_digest": "b" * 64}, "TOKENIZER_MISMATCH", (TOKENIZER, "b" * 64)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await service.attach([1], drafter="made", **{**right, **wrong})
            assert failure(error) == (CODE.FAILED_PRECONDITION, reason)
            assert all(digest in str(error.value.details()) for digest in digests)
        # Without digests on both sides the vocabulary's size decides.
        await (await service.attach([1], drafter="sized", vocab_size=777)).end()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await service.attach([1], drafter="sized", vocab_size=778)
        assert failure(error) == (CODE.FAILED_PRECONDITION, "TOKENIZER_MISMATCH")
        assert "777" in str(error.value.details())
        assert "778" in str(error.value.details())


async def test_with_the_same_tokenizer_the_smaller_vocabulary_is_the_limit() -> None:
    async with drafting(f"x=fake,tokenizer={TOKENIZER},vocab=10") as service:
        stream = await service.attach([9], vocab_size=12, tokenizer_digest=TOKENIZER)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.round([10])
        assert failure(error) == (CODE.INVALID_ARGUMENT, "TOKEN_OUT_OF_VOCABULARY")


async def test_hidden_states_are_listed_and_required() -> None:
    async with drafting("x=fake,hidden=yes") as service:
        listed = await service.registry.ListDrafters(drafter_pb2.ListDraftersRequest())
        assert list(listed.drafters[0].hidden_state_layers) == [1, 2]
        assert listed.drafters[0].hidden_state_window == 7
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await service.attach([1])
        assert failure(error) == (CODE.FAILED_PRECONDITION, "HIDDEN_STATES_NOT_SHARED")
