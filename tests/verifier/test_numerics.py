"""Numerics and types of KV caches: what a device lacks is refused, what is served is checked."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from verifier_support import Serve, text

from paceline.convert import load_decoder, open_model, prepare
from paceline.cuda.graphs import GraphRunner
from paceline.decoder.linear import FixedProducts
from paceline.decoder.model import numerics_for
from paceline.device import CPU, device_of
from paceline.kernels import _native
from paceline.kernels._compile import LEVELS
from paceline.kv.segment import HEADER_BYTES
from paceline.v1 import verifier_pb2
from paceline.verifier.kv.base import KvLayout
from paceline.verifier.kv.pool import PagePool
from paceline.verifier.options import VerifierOptions
from paceline.verifier.served import check_steps
from paceline.verifier.wiring import load_target

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("numerics", "device", "reason"),
    [
        ("portable", GPU, "has the bits of its kind of GPU"),
        ("fast", torch.device("cpu"), "which is for GPUs; on a CPU auto"),
    ],
)
def test_numerics_of_other_devices_are_refused(
    model: Path, numerics: str, device: torch.device, reason: str
) -> None:
    """Before weights are loaded."""
    with pytest.raises(ValueError, match=reason):
        load_target(prepare(model), VerifierOptions(numerics=numerics), device_of(device))


@pytest.mark.parametrize(
    ("weights", "kv", "expected"),
    [
        ("float32", torch.float32, []),
        ("float32", torch.bfloat16, ["amx", "avx512_bf16"]),
        ("bfloat16", torch.bfloat16, ["amx", "avx512_bf16"]),
        ("bfloat16", torch.int8, ["amx"]),
        ("int8", torch.bfloat16, ["amx", "avx512_bf16"]),
        ("int4", torch.int8, []),
    ],
)
@pytest.mark.parametrize("level", [*LEVELS])
def test_auto_is_the_fastest_numerics_that_change_a_bit_of_the_model(
    model: Path, monkeypatch: pytest.MonkeyPatch, level: str, weights: str, kv: torch.dtype,
    expected: list[str],
) -> None:  # fmt: skip
    """Two verifiers whose bits are equal say so, whatever their processors are."""
    monkeypatch.setattr(_native, "cpu_kernels", lambda: SimpleNamespace(level=level))
    config = dataclasses.replace(open_model(model).config(), weights=weights, kv_dtype=kv)
    has = {"amx": ("amx", "avx512_bf16"), "avx512bf16": ("avx512_bf16",)}.get(level, ())
    chosen = [name for name in expected if name in has]
    assert numerics_for(config, "auto") == (chosen[0] if chosen else "portable")


def test_a_check_leaves_no_page_taken(model: Path) -> None:
    decoder = load_target(prepare(model), VerifierOptions(), CPU)
    layout = KvLayout.of(decoder.config)
    pool = PagePool(layout, CPU, kv_bytes=1 << 24, max_sequences=4, max_context=1024)
    decoder.products = FixedProducts({}, "", "")
    graphs: GraphRunner | None = None
    found = check_steps(decoder, graphs, pool)
    assert "a tree across position 192" in found.reason, "torch's attention keeps no bits"
    pool.check_integrity()


FIELDS = {"max_new_tokens": 40, "ignore_eos": True}


async def test_8_bits_take_half_and_move_with_forks(serve: Serve) -> None:
    sizes, told = {}, {}
    for kv in ("bfloat16", "int8"):
        async with serve("bf16", kv_cache_dtype=kv) as client:
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
