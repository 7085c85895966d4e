"""A verifier keeps all its tensors on one device, and gives the tokens that it gives on the CPU.

Run by tests/drafter/test_methods.py, in a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import drafters
import numpy as np
import pytest
import torch
from torch import Tensor
from verifier_support import VOCAB, make_model, serving, text

from paceline.bench.reference import ReferenceKernels
from paceline.convert import load_decoder
from paceline.decoder import Decoder
from paceline.decoder import device as device_module
from paceline.kernels import Proposal, SamplingParams, devices
from paceline.kernels import sampling as sampling_module
from paceline.kv.policies import load_policy
from paceline.kv.selection import SelectionPolicy
from paceline.text import Text
from paceline.tree import TokenTree
from paceline.v1 import kv_pb2, kv_pb2_grpc, sampling_pb2
from paceline.verifier.engine.drafted import Draft
from paceline.verifier.engine.engine import Engine
from paceline.verifier.engine.job import CachedSequence, Decode, Prefill, Request
from paceline.verifier.grammar import Guide
from paceline.verifier.kv.base import KvLayout, TapLayout, Taps
from paceline.verifier.kv.pool import PagePool

sys.path.insert(0, str(Path(__file__).parent.parent))

from another_device import DEVICE, TRANSFERS, OnDevice, another_device, enter_thread

PERTURBED, ACCEPT_DRAFTS = sampling_module.perturbed_logits, sampling_module._accept_drafts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "mistral", "Mistral")


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name ``cuda`` means the device, in every thread that computes."""
    for kind in ("cpu", "other"):
        monkeypatch.setitem(devices.LOADED, kind, ReferenceKernels())
    wiring, engine = "paceline.verifier.wiring", "paceline.verifier.engine.engine"
    real = torch.device("cpu")
    monkeypatch.setattr(f"{wiring}.find_device", lambda name: DEVICE if name == "cuda" else real)
    for module in (wiring, engine):
        monkeypatch.setattr(
            f"{module}.use_device", lambda device: device == DEVICE and enter_thread()
        )


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3, "presence_penalty": 0.3}])
@pytest.mark.parametrize("top_logprobs", [0, 3])
async def test_same_tokens(
    folder: Path, tmp_path: Path, sampling: dict[str, Any], top_logprobs: int
) -> None:
    """Plain and in trees, with a fork of another text and hidden states that are kept."""
    prompt = text(3, 60)
    fields = {
        "sampling": sampling_pb2.SamplingParams(**sampling),
        "max_new_tokens": 12,
        "ignore_eos": True,
        "top_logprobs": top_logprobs,
        "prompt_logprobs": 1,
    }
    options: dict[str, Any] = {"kv_bytes": 1 << 24, "max_sequences": 8}
    async with serving(folder, tmp_path / "p.sock", **options) as client:
        plain = await client.generate(prompt, None, **fields)
    with another_device():
        async with serving(folder, tmp_path / "v.sock", device="cuda", **options) as client:
            pool = client.service._pool
            assert pool is not None
            assert isinstance(pool.kv, OnDevice)
            for drafter in (
                drafters.nothing,
                drafters.right(plain, len(prompt)),
                drafters.scattered(plain, len(prompt)),
            ):
                assert await client.generate(prompt, drafter, **fields) == plain
            parent = await client.create(prompt, max_new_tokens=5, drafter=await client.reader(0))
            fork = await client.create(
                [*prompt[:50], 1, 2], max_new_tokens=5, parent_handle=parent.handle
            )
            alone = await client.create([*prompt[:50], 1, 2], max_new_tokens=5)
            assert fork.first.tokens == alone.first.tokens


@pytest.mark.parametrize("policy", ["verified", "chunk_topk", "quest"])
async def test_followed_is_what_was_written(folder: Path, tmp_path: Path, policy: str) -> None:
    options: dict[str, Any] = {"kv_bytes": 1 << 24, "max_sequences": 8}
    with another_device():
        async with serving(folder, tmp_path / "p.sock", device="cuda", **options) as client:
            created = await client.create(text(1, 90), max_new_tokens=5, ignore_eos=True)
            stub: Any = kv_pb2_grpc.KvExchangeServiceStub(client.channel)
            stream = stub.FollowCache()
            subscribe = kv_pb2.FollowSubscribe(
                read_grant=created.read_grant,
                layers=[1],
                budget=40,
                policy=policy,
            )
            await stream.write(kv_pb2.FollowCacheRequest(subscribe=subscribe))
            await stream.read()
            update = await stream.read()
            (chunk,) = update.chunks
            (cache,) = client.service.store
            keys, _ = cache.sequence.kv.gather(1, torch.tensor(chunk.positions))
            assert chunk.keys == keys.contiguous().numpy().tobytes()


class EvenTokens(Guide):
    """A grammar that allows even tokens only, and its guide."""

    def __init__(self) -> None:
        """It has no matcher."""

    @contextmanager
    def turn(self) -> Iterator[bool]:
        yield True

    def begin(self) -> EvenTokens:
        return self

    def allowed(self) -> Any:
        return np.full(-(-VOCAB // 8), 0b01010101, np.uint8)

    def accepts(self, tokens: Sequence[int]) -> int:
        return next((at for at, token in enumerate(tokens) if token % 2), len(tokens))

    def push(self, token: int) -> None:
        assert token % 2 == 0

    def pop(self, tokens: int) -> None:
        pass


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": SamplingParams(temperature=0.0)},
    "sampled": {"sampling": SamplingParams(temperature=0.9, top_p=0.9, top_k=9, seed=3)},
    "penalised": {
        "sampling": SamplingParams(
            repetition_penalty=1.2, presence_penalty=0.5, logit_bias=((7, 2.0), (8, -1.0)), seed=5
        ),
    },
    "constrained": {"sampling": SamplingParams(temperature=0.0), "grammar": EvenTokens()},
}
SCORED = (
    "verified", "verified_weights", "verified_all", "verified_all_weights", "last_token",
    "chunk_topk", "quest",
)  # fmt: skip
LOGPROBS = {**KINDS["sampled"], "top_logprobs": 3}


@pytest.mark.parametrize("kind", [*KINDS, "logprobs"])
def test_a_step_waits_once_for_any_number_of_sequences(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Of drafted steps that keep nodes behind rejected ones, with hidden states for a drafter."""
    fields = LOGPROBS if kind == "logprobs" else KINDS[kind]
    waits: list[object] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append(None))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(sampling_module, "perturbed_logits", perturbed_on_device)
    monkeypatch.setattr(device_module, "ACCELERATORS", ("other",))
    with torch.inference_mode():
        decoder = load_decoder(folder)
        expected, states = stepped(decoder, pool_of(decoder), 5, [], 3, waits, fields)
    found = []
    with another_device(), torch.inference_mode():
        decoder = load_decoder(folder, device=DEVICE)
        for count in (1, 5):
            pool = pool_of(decoder)
            plain, kept = stepped(decoder, pool, count, [], 3, waits, fields)
            assert plain == expected[:count]
            assert torch.allclose(kept, states[:count], atol=1e-3)
            drafts = [
                TokenTree(((own[1] + 2) % VOCAB, own[1], own[1], own[2]), (-1, -1, -1, 1))
                for own in plain
            ]
            drafted, kept = stepped(decoder, pool, count, drafts, 1, waits, fields)
            assert [text[:3] for text in drafted] == [text[:3] for text in plain]
            assert torch.allclose(kept, states[:count, : kept.shape[1]], atol=1e-3)
            # Of the reference, one a sequence and layer; kernels have tables in the plan.
            masks = count * decoder.config.layers
            waits += [None] * TRANSFERS["waits"]
            found.append((TRANSFERS["device"] - masks, TRANSFERS["host"], len(waits)))
            pool.check_integrity()
    # To the device: tokens, positions, trees, places of hidden states; parameters; changes of
    # logits; rows for the host.
    more = {"greedy": 0, "sampled": 1, "penalised": 4, "constrained": 0, "logprobs": 1}[kind]
    assert found == [(4 + more, 1 + (kind == "logprobs"), 1)] * 2


def test_clients_are_answered_while_the_device_computes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[object] = []
    stream = SimpleNamespace(synchronize=lambda: order.append("wait"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(Engine, "_notify", lambda engine: order.append("answers"))
    monkeypatch.setattr(device_module, "ACCELERATORS", ("other",))
    with another_device(), torch.inference_mode():
        decoder = load_decoder(folder, device=DEVICE)
        stepped(decoder, pool_of(decoder), 2, [], 3, order, KINDS["greedy"])
    assert order == ["answers", "wait"] * 3


def test_rejection_sampling_waits_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chains, some tokens of which are accepted; the tokens are those of the CPU."""
    waits: list[object] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append(None))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(sampling_module, "perturbed_logits", perturbed_on_device)
    monkeypatch.setattr(sampling_module, "_accept_drafts", accepted_there)
    monkeypatch.setattr(device_module, "ACCELERATORS", ("other",))
    sampling = SamplingParams(
        temperature=4.0, top_k=50, presence_penalty=0.5, seed=3, rejection=True
    )
    fields: dict[str, Any] = {"sampling": sampling}
    weights = np.random.default_rng(0).random((4, VOCAB)).astype(np.float32)
    proposals = [Proposal.checked(range(VOCAB), (row / row.sum()).tolist()) for row in weights]
    tokens = tuple(each.draw(3, 4 + depth) for depth, each in enumerate(proposals))
    chain = TokenTree(tokens, (-1, 0, 1, 2), proposals=tuple(proposals))
    with torch.inference_mode():
        decoder = load_decoder(folder)
        expected, _ = stepped(decoder, pool_of(decoder), 5, [chain] * 5, 1, waits, fields)
    assert len({len(text) for text in expected}) > 1, "not all chains are rejected at once"
    found = []
    with another_device(), torch.inference_mode():
        decoder = load_decoder(folder, device=DEVICE)
        for count in (1, 5):
            texts, _ = stepped(decoder, pool_of(decoder), count, [chain] * count, 1, waits, fields)
            assert texts == expected[:count]
            masks = count * decoder.config.layers
            waits += [None] * (TRANSFERS["waits"] - count)
            found.append((TRANSFERS["device"] - masks, TRANSFERS["host"], len(waits)))
    # Tokens, positions, places of hidden states; parameters, changes of logits, drafts.
    assert found == [(6, 1, 1)] * 2


@pytest.mark.parametrize("policy", SCORED)
def test_scores_stay_on_the_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """A step copies as without; positions that are asked for are those of the CPU."""
    waits: list[object] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append(None))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(device_module, "ACCELERATORS", ("other",))
    fields: dict[str, Any] = {"sampling": SamplingParams(temperature=0.0)}
    with torch.inference_mode():
        decoder = load_decoder(folder)
        there = []
        stepped(decoder, pool_of(decoder), 2, [], 38, waits, fields, policy, there)
        expected = [[each.tolist() for each in chosen.choose(40, 25)] for chosen in there]
    with another_device(), torch.inference_mode():
        decoder = load_decoder(folder, device=DEVICE)
        stepped(decoder, pool_of(decoder), 2, [], 38, waits, fields)
        plain = TRANSFERS["host"], TRANSFERS["waits"], len(waits)
        there.clear()
        stepped(decoder, pool_of(decoder), 2, [], 38, waits, fields, policy, there)
        assert (TRANSFERS["host"], TRANSFERS["waits"], len(waits)) == plain
        assert isinstance(there[0].observer.scores, OnDevice)
        for chosen, positions in zip(there, expected, strict=True):
            TRANSFERS.clear()
            assert [each.tolist() for each in chosen.choose(40, 25)] == positions
            assert TRANSFERS["host"] == 1


def perturbed_on_device(logits: Tensor, *args: Any) -> Tensor:
    """As the GPU's kernels do it: tensors stay where they are, parameters are sent."""
    if not isinstance(logits, OnDevice):
        return PERTURBED(logits, *args)
    TRANSFERS["device"] += 1
    return OnDevice(PERTURBED(logits.inner, *args))


def accepted_there(scores: Tensor, tokens: Tensor, *args: Any) -> None:
    """Likewise."""
    if isinstance(scores, OnDevice):
        assert isinstance(tokens, OnDevice)
        TRANSFERS["device"] += 1
        scores, tokens = scores.inner, tokens.inner
    ACCEPT_DRAFTS(scores, tokens, *args)


def pool_of(decoder: Decoder) -> PagePool:
    config = decoder.config
    layout = KvLayout(config.layers, config.kv_heads, config.head_dim, config.dtype, config.hidden)
    return PagePool(layout, decoder.device, kv_bytes=1 << 22, max_sequences=10, max_context=512)


def stepped(
    decoder: Decoder,
    pool: PagePool,
    count: int,
    drafts: list[TokenTree],
    steps: int,
    waits: list[object],
    fields: dict[str, Any],
    policy: str = "streaming",
    policies: list[SelectionPolicy] | None = None,
) -> tuple[list[list[int]], Tensor]:
    """What sequences emit in a prefill and some steps; copies and waits are those of the steps.

    And the hidden states of the positions that all have committed, ``[sequences, n, 2 * hidden]``.
    Positions are scored for a policy, one of which for each sequence is added to ``policies``.
    """
    engine = Engine(decoder)
    sequences = []
    for index in range(count):
        sampling = fields.get("sampling", SamplingParams(temperature=0.0))
        text = Text((3, 1, 4 + index), limit=50, sampling=sampling)
        params = Request(text, fields.get("top_logprobs"), taps=Taps((0, 1)))
        taps = TapLayout.of(Taps((0, 1)), pool.layout, 256)
        sequences.append(CachedSequence(params, pool.allocate(256, taps)))
        chosen = load_policy(policy)(sequences[-1].kv, (0, 1))
        if policies is not None and chosen.observer is not None:
            policies.append(chosen)
            sequences[-1].observers.append(chosen.observer)
    for sequence in sequences:
        engine.prefill(Prefill(sequence))
    engine._thread.run_commands(0.0)
    engine._step()
    jobs = [Decode(sequence, credits=steps) for sequence in sequences]
    for job, tree in zip(jobs, drafts, strict=False):
        job.set_draft(Draft(tree, "test@1"))
    for job in jobs:
        engine.decode(job)
    engine._thread.run_commands(0.0)
    TRANSFERS.clear()
    waits.clear()
    for _ in range(steps):
        engine._step()
    made = TRANSFERS.copy()
    shortest = min(sequence.committed for sequence in sequences)
    kept = []
    for sequence in sequences:
        assert sequence.kv.taps is not None
        kept.append(torch.cat(sequence.kv.taps.copy((0, 1), 0, shortest), dim=1))
        sequence.kv.close()
    TRANSFERS.clear()
    TRANSFERS.update(made)
    return [sequence.tokens[3:].tolist() for sequence in sequences], torch.stack(kept)
