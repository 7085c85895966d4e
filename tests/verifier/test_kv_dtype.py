"""Types of KV caches: what they take, and where they are refused."""

from pathlib import Path

import pytest
from verifier_support import serving, text

from paceline.convert import load_decoder
from paceline.kv.segment import HEADER_BYTES
from paceline.v1 import verifier_pb2
from paceline.verifier import build_service

FIELDS = {"max_new_tokens": 40, "ignore_eos": True}


async def test_8_bits_take_half_and_move_with_forks(
    models: dict[str, Path], tmp_path: Path
) -> None:
    sizes, told = {}, {}
    for kv in ("bfloat16", "int8"):
        async with serving(
            models["bf16"], tmp_path / "v.sock", kv_bytes=1 << 28, kv_cache_dtype=kv
        ) as client:
            parent = await client.create(text(1, 300), **FIELDS)
            (cache,) = client.service.store
            sizes[kv] = cache.sequence.kv.file_bytes - HEADER_BYTES
            told[kv] = (await client.stub.GetModel(verifier_pb2.GetModelRequest())).kv_cache_dtype
            prompt = [*text(1, 300), 7]
            fork = await client.create(prompt, parent_handle=parent.handle, **FIELDS)
            assert fork.reused_tokens == 300
            alone = await client.create(prompt, **FIELDS)
            assert fork.first == alone.first
            forked = list(client.service.store)[1].sequence.kv
            computed = list(client.service.store)[2].sequence.kv
            assert forked.kv[..., :301, :].equal(computed.kv[..., :301, :])
    assert sizes["int8"] / sizes["bfloat16"] == (16 + 4) / 32  # heads of 16 values, and a scale
    assert told == {"bfloat16": "bfloat16", "int8": "int8"}


def test_what_is_not_supported_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype is 'int7', expected one of auto, float32"):
        load_decoder(models["bf16"], kv_cache_dtype="int7")
    with pytest.raises(ValueError, match="supported on the CPU; with device 'cuda:0' use auto"):
        load_decoder(models["bf16"], device="cuda:0", kv_cache_dtype="int8")
    with pytest.raises(ValueError, match="'int8', expected auto: KV in pages"):
        build_service(models["bf16"], paged_kv=True, kv_cache_dtype="int8")
