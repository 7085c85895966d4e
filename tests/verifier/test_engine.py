"""Failing steps, draining, the model's description, and what comes out at temperature 1."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import drafters
import grpc
import numpy as np
import pytest
import torch
from verifier_support import CONTEXT, VOCAB, Client, Round, failure, reason_of, serving

from paceline.decoder import BatchInvariance, weights_fingerprint
from paceline.v1 import sampling_pb2, verifier_pb2
from paceline.verifier import build_service
from paceline.verifier.engine import acceptance

PROMPT = [3, 1, 4, 1, 5]
FIELDS: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}


async def test_a_failing_forward_fails_its_batch_only(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = await client.generate(PROMPT, drafters.nothing, **FIELDS)
    created = await client.create(PROMPT, **FIELDS)
    decoder = client.service.engine._decoder
    forward = decoder.forward

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(decoder, "forward", fail)
    stream = client.stub.Verify()
    await stream.write(Round.of(created.handle, 1, free_run_steps=11))
    error = await failure(stream)
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INTERNAL, "STEP_FAILED")
    call = client.stub.CreateCache(verifier_pb2.CreateCacheRequest(prompt_tokens=PROMPT))
    assert (await failure(call)).code() == grpc.StatusCode.INTERNAL
    monkeypatch.setattr(decoder, "forward", forward)
    stream = client.stub.Verify()
    await stream.write(Round.of(created.handle, 1, free_run_steps=11))
    tokens = list(created.first.tokens)
    while len(tokens) < len(plain):
        tokens += (await stream.read()).result.tokens
    assert tokens == plain
    await client.release(created.handle)


async def test_a_sequence_whose_acceptance_fails_fails_alone(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = await client.generate(PROMPT, drafters.nothing, **FIELDS)
    created = await client.create(PROMPT, **FIELDS)
    (cache,) = list(client.service.store)
    sampler = acceptance.Sampler

    class Broken(sampler):  # type: ignore[misc, valid-type]
        """Fails for one sequence after its first token of a walk."""

        def __call__(self, node: int) -> int:
            if self._sequence is cache.sequence and node >= 0:
                raise ValueError("cannot choose")
            return super().__call__(node)

    monkeypatch.setattr(acceptance, "Sampler", Broken)
    others = asyncio.gather(
        *(client.generate(PROMPT, drafters.random_tree, **FIELDS) for _ in range(3))
    )
    chain = (plain[1:4], [-1, 0, 1])
    stream = client.stub.Verify()
    await stream.write(Round.of(created.handle, 1, chain))
    assert (await failure(stream)).code() == grpc.StatusCode.INTERNAL
    assert await others == [plain] * 3
    monkeypatch.setattr(acceptance, "Sampler", sampler)
    stream = client.stub.Verify()
    await stream.write(Round.of(created.handle, 1, chain))
    assert list((await stream.read()).result.tokens) == plain[1:5]
    await client.release(created.handle)
    await client.service.check_integrity()


async def test_draining_lets_generations_end(client: Client) -> None:
    plain = await client.generate(PROMPT, drafters.nothing, **FIELDS)
    created = await client.create(PROMPT, **FIELDS)
    drain = asyncio.create_task(client.service.drain())
    await asyncio.sleep(0)
    call = client.stub.CreateCache(verifier_pb2.CreateCacheRequest(prompt_tokens=PROMPT))
    error = await failure(call)
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    stream = client.stub.Verify()
    await stream.write(Round.of(created.handle, 1, free_run_steps=5))
    tokens = list(created.first.tokens)
    while len(tokens) < 6:
        tokens += (await stream.read()).result.tokens
    assert not drain.done()
    await stream.write(Round.of(created.handle, 2, free_run_steps=50))
    while len(tokens) < 12:
        tokens += (await stream.read()).result.tokens
    await drain
    assert tokens == plain


async def test_model(client: Client, model: Path) -> None:
    got = await client.stub.GetModel(verifier_pb2.GetModelRequest())
    assert got.name == "Llama"
    assert got.architecture == "LlamaForCausalLM"
    assert (got.vocab_size, got.max_context, got.max_tree_nodes) == (VOCAB, CONTEXT, 255)
    assert (got.layers, got.kv_heads, got.head_dim, got.hidden_size) == (2, 2, 16, 48)
    assert (list(got.eos_token_ids), got.bos_token_id) == ([0], 1)
    assert got.dtype == "float32"
    assert got.target_fingerprint == weights_fingerprint(model)
    assert got.lease_ms == 30_000
    assert len(got.instance_id) == 32
    assert got.tokenizer_digest == ""
    assert got.chat_template == ""


@pytest.mark.bits
async def test_batch_invariance_holds(client: Client) -> None:
    got = await client.stub.GetModel(verifier_pb2.GetModelRequest())
    assert (got.batch_invariant, got.batch_invariance_reason) == (True, "")


async def test_why_batch_invariance_does_not_hold_is_told_and_logged(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = BatchInvariance(False, "a layer of 8 to 9 differs; do this")
    monkeypatch.setattr("paceline.verifier.model.check_batch_invariance", lambda decoder: found)
    async with serving(model, tmp_path / "v.sock", kv_bytes=1 << 28) as client:
        got = await client.stub.GetModel(verifier_pb2.GetModelRequest())
    assert (got.batch_invariant, got.batch_invariance_reason) == (False, found.reason)
    assert found.reason in caplog.text


async def test_tokenizer(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(model / name)
    raw = b'{"version": "1.0"}'
    (folder / "tokenizer.json").write_bytes(raw)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}))
    async with serving(folder, tmp_path / "v.sock", kv_bytes=1 << 28) as client:
        got = await client.stub.GetModel(verifier_pb2.GetModelRequest())
        digest = hashlib.sha256(raw).hexdigest()
        assert got.tokenizer_digest == digest
        assert gzip.decompress(got.tokenizer_gzip) == raw
        assert got.chat_template == "{{ x }}"
        for request in (
            verifier_pb2.GetModelRequest(known_tokenizer_digest=digest),
            verifier_pb2.GetModelRequest(omit_tokenizer=True),
        ):
            got = await client.stub.GetModel(request)
            assert (got.tokenizer_digest, got.tokenizer_gzip) == (digest, b"")
        request = verifier_pb2.GetModelRequest(known_tokenizer_digest="another")
        assert (await client.stub.GetModel(request)).tokenizer_gzip


@pytest.mark.parametrize(
    "options",
    [
        {"lease_seconds": 0},
        {"lease_seconds": float("nan")},
        {"kv_bytes": -1},
        {"max_context": CONTEXT + 1},
        {"max_context": 1},
        {"node_budget": 256},
        {"device": "cuda:99"},
        {"device": "tpu"},
        {"dtype": "int7"},
    ],
)
def test_bad_options(options: dict[str, Any], model: Path) -> None:
    with pytest.raises(ValueError, match="expected"):
        build_service(model, **options)


async def test_emitted_tokens_follow_the_softmax(client: Client, model: Path) -> None:
    """Pearson's chi-square over first and second tokens of many seeds, drafted for and not.

    With fixed seeds this is no gamble; for fresh seeds the false-alarm rate would be 1e-4 a test.
    """
    from transformers import AutoModelForCausalLM

    count = 600
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    parent = await client.create(PROMPT)
    bias = dict.fromkeys(range(6, VOCAB), -10000.0)  # six tokens are enough to count

    async def draw(seed: int) -> tuple[int, int]:
        fields = sampling_pb2.SamplingParams(temperature=1.0, seed=seed, logit_bias=bias)
        tree = drafters.nothing if seed % 2 else lambda *_: ([0, 1, 2, 3, 4, 5], [-1] * 6)
        first, second = await client.generate(
            PROMPT, tree, sampling=fields, max_new_tokens=2, ignore_eos=True,
            parent_handle=parent.handle,
        )  # fmt: skip
        return first, second

    drawn: list[tuple[int, int]] = []
    for start in range(0, count, 40):
        drawn += await asyncio.gather(*(draw(seed) for seed in range(start, start + 40)))
    await client.release(parent.handle)

    def softmax(context: list[int]) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            logits = hf(torch.tensor([context])).logits[0, -1, :6]
        return logits.double().softmax(0).numpy()

    first = softmax(PROMPT)
    joint = {
        (a, b): first[a] * second
        for a in range(6)
        for b, second in enumerate(softmax([*PROMPT, a]))
    }
    seen = Counter(drawn)
    # Rare pairs are counted together, so that every cell expects at least five.
    cells = [(seen[pair], p * count) for pair, p in joint.items() if p * count >= 5]
    rest = count - sum(n for n, _ in cells), count - sum(e for _, e in cells)
    cells += [rest] if rest[1] >= 5 else []
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    freedom = len(cells) - 1
    # Wilson-Hilferty: the 1 - 1e-4 quantile of chi-square.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert len(cells) >= 5
    assert statistic < limit, (statistic, limit)
