"""Numerics that a device does not have are refused, and what is served is checked."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verifier_support import serving

from paceline.convert import open_model, prepare
from paceline.decoder import BatchInvariance, Decoder, ForwardResult, GraphRunner
from paceline.decoder.graphs import FIXED_SHAPES
from paceline.decoder.invariance import ServedForward, served_slots
from paceline.decoder.model import numerics_for
from paceline.decoder.products import FixedProducts
from paceline.kernels import PagedPlane, QueryBlock, _native, devices, plan_trees
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
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    level: str,
    weights: str,
    kv: torch.dtype,
    expected: list[str],
) -> None:
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


@pytest.mark.parametrize(("max_context", "window"), [(1024, 600), (256, 0)])
def test_the_window_that_a_text_reaches_is_passed(
    model: Path, monkeypatch: pytest.MonkeyPatch, max_context: int, window: int
) -> None:
    decoder = load_target(prepare(model), VerifierOptions(), CPU)
    decoder.config = dataclasses.replace(decoder.config, windows=(600, None))
    decoder.products = FixedProducts({}, "", "")
    pool = make_pool(decoder, max_context)
    given: list[Any] = []

    def record(forward: ServedForward, vocab_size: int, window: int) -> BatchInvariance:
        given.append((vocab_size, window))
        last = served_slots(window)[0] - 1
        assert forward([1], [QueryBlock(0, last, None, 1)]).shape == (1, vocab_size)
        return BatchInvariance(True)

    monkeypatch.setattr("paceline.verifier.model.check_served", record)
    with torch.inference_mode():
        assert check_steps(decoder, None, pool).holds
    assert given == [(decoder.config.vocab_size, window)]
    pool.check_integrity()


def test_a_check_leaves_no_page_taken(model: Path) -> None:
    decoder = load_target(prepare(model), VerifierOptions(), CPU)
    pool = make_pool(decoder, 1024)
    decoder.products = FixedProducts({}, "", "")
    graphs: GraphRunner | None = None
    found = check_steps(decoder, graphs, pool)
    assert "a tree across position 192" in found.reason, "torch's attention keeps no bits"
    pool.check_integrity()


@dataclasses.dataclass(frozen=True)
class Row:
    """The cache of a row of a pool's page tables."""

    pool: PagePool
    row: int
    table = None

    def layer(self, index: int) -> tuple[PagedPlane, PagedPlane]:
        return self.pool.layer(index, self.row)


@dataclasses.dataclass(frozen=True)
class MadeUpGraphs:
    """Runs what graphs replay, kernel by kernel. Those of 256 rows with hidden states change a bit
    of what ``changed`` names: logits or states."""

    decoder: Decoder
    pool: PagePool
    changed: str = ""
    captured: set[tuple[int, ...]] = dataclasses.field(default_factory=set)
    asked: list[int] = dataclasses.field(default_factory=list)
    shapes = FIXED_SHAPES

    def __len__(self) -> int:
        return len(self.captured)

    def warm_up(self, layers: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        self.captured.add(layers)
        yield 1, 1

    def forward(
        self,
        tokens: Sequence[int],
        blocks: Sequence[QueryBlock],
        rows: Sequence[int],
        taps: Sequence[int] = (),
    ) -> ForwardResult:
        caches: Any = [Row(self.pool, row) for row in rows]
        plan = plan_trees(blocks)
        found = self.decoder.forward(torch.tensor(tokens), plan, caches, logit_rows=None, taps=taps)
        if taps:
            self.asked.append(len(tokens))
        if taps and len(tokens) == 256:
            for each in {"logits": [found.logits], "states": found.taps[1:]}.get(self.changed, ()):
                each[-1, -1] *= 1 + 2**-20
        return found


@pytest.mark.parametrize("changed", ["", "logits", "states"])
async def test_new_graphs_with_hidden_states_are_checked(
    model: Path, tmp_path: Path, changed: str
) -> None:
    """They keep the bits of logits, and return those of hidden states, or no promise is left."""
    async with serving(model, tmp_path / "v.sock", kv_bytes=1 << 24, paged_kv=True) as client:
        service: Any = client.service
        graphs = service._graphs = MadeUpGraphs(service._decoder, service._pool, changed)
        for _ in range(2):  # a drafter that joins again needs no new graphs
            service._capture_taps((0, 1))
            await asyncio.gather(*service._captures)
        assert graphs.asked == list(FIXED_SHAPES[: 4 if changed else None])
        got = await client.stub.GetModel(verifier_pb2.GetModelRequest())
        assert got.batch_invariant == bool(got.numerics) == (not changed)
        assert ("a step of 256 rows" in got.batch_invariance_reason) == bool(changed)
        service._pool.check_integrity()


async def test_graphs_that_no_memory_is_left_to_check_are_told(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(model, tmp_path / "v.sock", kv_bytes=1 << 24, paged_kv=True) as client:
        service: Any = client.service
        pool = service._pool
        service._graphs = MadeUpGraphs(service._decoder, pool)
        taken = pool.take_pages(pool.free_pages)
        service._capture_taps((0, 1))
        await asyncio.gather(*service._captures)
        pool.free(pool.take_row(), taken)
        assert "missing, or not checked" in caplog.text
