"""A step that fails is run again for each of its jobs alone: only those at fault end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from verifier_support import CONTEXT, serving

from paceline.decoder import Decoder, DeviceLost
from paceline.kernels import SamplingParams
from paceline.kv.selection import AttentionScores
from paceline.tree import TokenTree
from paceline.v1 import verifier_pb2
from paceline.verifier.engine import engine as engine_module
from paceline.verifier.engine.engine import Engine
from paceline.verifier.engine.job import (
    Decode,
    Draft,
    DrafterVersion,
    EngineJob,
    GenerationParams,
    Prefill,
    Sequence,
    StepFailed,
)
from paceline.verifier.kv.base import KvLayout
from paceline.verifier.kv.segment import Segment

POISON = 59


class Poisoned:
    """A decoder whose passes raise, halfway through, if a token is among those they are given."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.passes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, tokens: torch.Tensor, plan: Any, caches: Any, **options: Any) -> Any:
        self.passes += 1
        if POISON in tokens:
            # As a fault in a late layer: keys, values and scores of the batch are written by then.
            self._decoder.forward(tokens, plan, caches, **options)
            raise RuntimeError("a bad token")
        return self._decoder.forward(tokens, plan, caches, **options)


class ByHand:
    """An engine without its thread: each step is a call. No sequence emits ``POISON``."""

    def __init__(self, decoder: Any) -> None:
        config = decoder.config
        self.layout = KvLayout(
            config.layers, config.kv_heads, config.head_dim, config.dtype, config.hidden
        )
        self.engine = Engine(decoder)
        self.sequences: list[Sequence] = []

    def sequence(self, *prompt: int, **sampling: Any) -> Sequence:
        params = SamplingParams(logit_bias=((POISON, -1e4),), **sampling)
        generation = GenerationParams(prompt, sampling=params, length_limit=CONTEXT)
        sequence = Sequence(generation, Segment(self.layout, CONTEXT))
        self.sequences.append(sequence)
        return sequence

    def step(self, *jobs: EngineJob) -> None:
        """One step of all of them."""
        for job in jobs:
            if isinstance(job, Prefill):
                self.engine.prefill(job)
            else:
                assert isinstance(job, Decode)
                self.engine.decode(job)
        self.engine._thread.run_commands(0.0)
        with torch.inference_mode():
            self.engine._step()


@pytest.fixture
def decoder(model: Path) -> Decoder:
    return Decoder.load(model)


@contextlib.contextmanager
def by_hand(decoder: Any) -> Iterator[ByHand]:
    hand = ByHand(decoder)
    try:
        yield hand
    finally:
        for sequence in hand.sequences:
            sequence.segment.close()


def drafting(sequence: Sequence, draft: list[int]) -> Decode:
    """One step with a chain."""
    job = Decode(sequence, credits=1)
    job.set_draft(Draft(TokenTree.chain(draft), DrafterVersion("test", "1", "replay")))
    return job


async def texts(
    decoder: Any, drafts: list[list[int]], *, poisoned: bool = False
) -> tuple[list[list[int]], list[list[float]]]:
    """What three sequences emit in a prefill, a step with ``drafts`` and five without, and the
    scores of their observers.

    Each begins in a batch of all of them; with ``poisoned``, a job that fails is in it too.
    """
    with by_hand(decoder) as hand:
        sequences = [
            hand.sequence(3, 1, 4, temperature=0.0),
            hand.sequence(1, 5, 9, 2, temperature=1.0, seed=4),
            hand.sequence(6, 5, 3, 5, temperature=0.7, seed=5, presence_penalty=1.0),
        ]
        for sequence in sequences:
            sequence.observers.append(AttentionScores(sequence.segment, [0, 1]))
        scores: list[list[float]] = []
        bad = hand.sequence(7, 7, 7, temperature=0.0)
        hand.step(Prefill(bad))
        before = [*bad.tokens], bad.committed, len(bad.history)

        def step(jobs: Items[EngineJob], wrong: EngineJob) -> None:
            hand.step(*jobs[:2], *([wrong] if poisoned else []), *jobs[2:])
            assert [job.error for job in jobs] == [None] * 3
            if poisoned:
                assert isinstance(wrong.error, StepFailed)
                assert "a bad token" in str(wrong.error)
            assert ([*bad.tokens], bad.committed, len(bad.history)) == before
            observed = [each.observers[0].scores for each in sequences]
            scores.extend(each.flatten().tolist() for each in observed if each is not None)

        step([Prefill(each) for each in sequences], Prefill(hand.sequence(POISON)))
        drafted = [drafting(*each) for each in zip(sequences, drafts, strict=True)]
        step(drafted, drafting(bad, [POISON]))
        assert all(not job.credits for job in drafted)
        plain = [Decode(each, credits=5) for each in sequences]
        step(plain, drafting(bad, [POISON]))
        while any(job.credits for job in plain):
            hand.step()
        for each in sequences:
            assert len(each.history) == len(each.tokens)
            assert each.committed == len(each.tokens) - 1
        assert len(scores) == 9
        return [each.tokens[len(each.generation.prompt) :] for each in sequences], scores


async def test_only_the_sequence_at_fault_ends(decoder: Decoder) -> None:
    plain, _ = await texts(decoder, [[], [], []])
    assert [len(text) for text in plain] == [7, 7, 7]
    drafts = [text[1:4] for text in plain]
    drafted, scores = await texts(decoder, drafts)
    assert [text[:7] for text in drafted] == plain
    poisoned = Poisoned(decoder)
    assert await texts(poisoned, drafts, poisoned=True) == (drafted, scores)
    # Three batches of four jobs failed and were run one by one; the rest as if nothing had been.
    assert poisoned.passes == 1 + 3 * (1 + 4) + 4


async def test_a_lost_device_ends_the_verifier(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed step the device is checked; health is NOT_SERVING before the server stops."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    lost = pytest.raises(DeviceLost, match="fails every call")
    with lost:
        async with serving(model, tmp_path / "v.sock", kv_bytes=1 << 28) as client:
            health = health_pb2_grpc.HealthStub(client.channel).Watch(
                health_pb2.HealthCheckRequest(service="paceline.v1.VerifierService")
            )
            assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
            monkeypatch.setattr(client.service.engine._decoder, "forward", fail)
            with pytest.raises(grpc.aio.AioRpcError, match="illegal memory access"):
                await client.create([3, 1, 4])
            call = client.stub.GetModel(verifier_pb2.GetModelRequest())
            assert (await call).name == "Llama", "a step may fail without the device"
            monkeypatch.setattr(
                engine_module, "device_lost", lambda device: DeviceLost("the GPU fails every call")
            )
            with pytest.raises(grpc.aio.AioRpcError):
                await client.create([3, 1, 4])
            assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_prefix_that_cannot_be_copied_is_an_answer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is told, and does not wait for ever; others are served."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no copy")

    async with serving(model, tmp_path / "v.sock", kv_bytes=1 << 28) as client:
        parent = await client.create([3, 1, 4])
        with monkeypatch.context() as broken:
            broken.setattr(Segment, "copy_prefix", fail)
            with pytest.raises(grpc.aio.AioRpcError, match="could not be prepared: no copy"):
                await client.create([3, 1, 5], parent_handle=parent.handle)
        await client.create([3, 1, 5], parent_handle=parent.handle)
