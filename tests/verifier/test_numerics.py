"""Numerics that a device does not have are refused, and what is served is checked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from verifier_support import serving

from paceline.decoder import BatchInvariance, GraphRunner, open_model
from paceline.decoder.model import numerics_for
from paceline.decoder.products import Products
from paceline.v1 import verifier_pb2
from paceline.verifier.model import check_steps
from paceline.verifier.options import VerifierOptions
from paceline.verifier.ranks import load_target

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
        load_target(open_model(model), VerifierOptions(numerics=numerics), device)


@pytest.mark.parametrize(
    ("weights", "kv", "expected"),
    [
        ("float32", torch.float32, {"portable"}),
        ("float32", torch.bfloat16, {"portable", "avx512_bf16"}),
        ("bfloat16", torch.bfloat16, {"portable", "avx512_bf16", "amx"}),
        ("bfloat16", torch.int8, {"portable", "amx"}),
        ("int8", torch.bfloat16, {"portable", "avx512_bf16"}),
        ("int4", torch.int8, {"portable"}),
    ],
)
@pytest.mark.parametrize("own", ["portable", "avx512_bf16", "amx"])
def test_auto_is_the_fastest_numerics_that_change_a_bit_of_the_model(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: str,
    weights: str,
    kv: torch.dtype,
    expected: set[str],
) -> None:
    """Two verifiers whose bits are equal say so, whatever their processors are."""
    monkeypatch.setattr("paceline.decoder.model.choose_numerics", lambda _: own)
    config = dataclasses.replace(open_model(model).config(), weights=weights, kv_dtype=kv)
    assert numerics_for(config, "auto") == (own if own in expected else "portable")


async def test_what_is_not_promised_is_told(model: Path, tmp_path: Path) -> None:
    """Libraries' own choice, a product that no rule mends, and what no memory is left to check."""
    async with serving(model, tmp_path / "v.sock", kv_bytes=1 << 24, paged_kv=True) as client:
        service: Any = client.service
        decoder, pool, info = service._decoder, service._pool, service._info

        async def checked(**facts: Any) -> str:
            decoder.products = Products(**facts) if facts else None
            found = await service.engine.between_steps(lambda: check_steps(decoder, None, pool))
            decoder.device, real = GPU, decoder.device
            info.set_invariance(dataclasses.replace(found), decoder)
            decoder.device = real
            got = await client.stub.GetModel(verifier_pb2.GetModelRequest())
            assert got.batch_invariant is not bool(got.batch_invariance_reason)
            return got.batch_invariance_reason or got.numerics

        assert "--numerics auto" in await checked()
        told = "a linear layer differs"
        assert await checked(rules={}, differs=told, digest="") == told
        taken = pool.take_pages(pool.free_pages)
        assert "no memory to check it" in await checked(rules={}, differs="", digest="")
        pool.free(pool.take_row(), taken)
        monkey = pytest.MonkeyPatch()
        monkey.setattr("paceline.verifier.model.check_served", lambda *_: BatchInvariance(True))
        monkey.setattr("paceline.verifier.model.describe_device", lambda device: "sm_90")
        rules = {"4x4": "64 rows"}
        found = await checked(rules=rules, differs="", digest="ab" * 32)
        assert found == f"sm_90, products of 64 rows: 4x4, digest {'ab' * 8}"
        monkey.undo()
        decoder.products = None


def test_a_check_leaves_no_page_taken(model: Path) -> None:
    from paceline.verifier.kv.base import KvLayout
    from paceline.verifier.kv.pool import PagePool

    cpu = torch.device("cpu")
    decoder = load_target(open_model(model), VerifierOptions(), cpu)
    layout = KvLayout.of(decoder.config)
    pool = PagePool(layout, cpu, kv_bytes=1 << 24, max_sequences=4, max_context=1024)
    decoder.products = Products({}, "", "")
    graphs: GraphRunner | None = None
    found = check_steps(decoder, graphs, pool)
    assert "a tree across position 192" in found.reason, "torch's attention keeps no bits"
    pool.check_integrity()
