"""Numerics that a device does not have are refused, and what is served is checked."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verifier_support import serving

from paceline.convert import open_model, prepare
from paceline.decoder import BatchInvariance, Decoder, GraphRunner
from paceline.decoder.model import numerics_for
from paceline.decoder.products import FixedProducts
from paceline.kernels import _native, devices
from paceline.kernels._compile import LEVELS
from paceline.v1 import verifier_pb2
from paceline.verifier.kv.base import KvLayout
from paceline.verifier.kv.pool import PagePool
from paceline.verifier.model import check_steps
from paceline.verifier.options import VerifierOptions
from paceline.verifier.wiring import load_target

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def make_pool(decoder: Decoder, max_context: int) -> PagePool:
    layout = KvLayout.of(decoder.config)
    return PagePool(layout, CPU, kv_bytes=1 << 24, max_sequences=4, max_context=max_context)


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
        load_target(prepare(model), VerifierOptions(numerics=numerics), device)


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


async def test_what_is_not_promised_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries' own choice, attention of other packages, a product that no rule mends, and what no
    memory is left to check."""
    async with serving(model, tmp_path / "v.sock", kv_bytes=1 << 24, paged_kv=True) as client:
        service: Any = client.service
        decoder, pool, info = service._decoder, service._pool, service._info
        real = decoder.device

        async def checked(attends: str = "triton", **facts: Any) -> str:
            monkeypatch.setitem(devices.LOADED, "cuda", SimpleNamespace(name=attends))
            decoder.products = FixedProducts(**facts) if facts else None
            decoder.device = GPU
            found = await service.engine.between_steps(lambda: check_steps(decoder, None, pool))
            info.set_invariance(dataclasses.replace(found), decoder)
            decoder.device = real
            got = await client.stub.GetModel(verifier_pb2.GetModelRequest())
            assert got.batch_invariant is not bool(got.batch_invariance_reason)
            assert got.batch_invariant == bool(got.numerics)
            return got.batch_invariance_reason or got.numerics

        assert "--numerics auto" in await checked()
        told = "a linear layer differs"
        fine: dict[str, Any] = {"rules": {"4x4": "64 rows"}, "differs": "", "digest": "ab" * 32}
        assert await checked(rules={}, differs=told, digest="") == told
        taken = pool.take_pages(pool.free_pages)
        assert "no memory to check it" in await checked(**fine)
        pool.free(pool.take_row(), taken)
        held = BatchInvariance(True)
        monkeypatch.setattr("paceline.verifier.model.check_served", lambda *_: held)
        monkeypatch.setattr("paceline.verifier.model.describe_device", lambda device: "sm_90")
        monkeypatch.setattr("paceline.verifier.model.describe_kernels", lambda: "kernels 1a")
        assert "flash-attn" in await checked("flash_attn", **fine)
        found = await checked(**fine)
        assert found == f"sm_90, kernels 1a, products of 64 rows: 4x4, digest {'ab' * 8}"
        decoder.products = None


def test_a_check_leaves_no_page_taken(model: Path) -> None:
    decoder = load_target(prepare(model), VerifierOptions(), CPU)
    pool = make_pool(decoder, 1024)
    decoder.products = FixedProducts({}, "", "")
    graphs: GraphRunner | None = None
    found = check_steps(decoder, graphs, pool)
    assert "a tree across position 192" in found.reason, "torch's attention keeps no bits"
    pool.check_integrity()
