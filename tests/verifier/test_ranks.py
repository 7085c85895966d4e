"""Several ranks share a model: all that they compute has the bits of one."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import drafters
import grpc
import pytest
import torch
from calls import until
from kv_support import caught_up, following
from torch import Tensor
from verifier_support import Client, make_model, serving, text

from paceline.decoder import RanksDiffer, RanksLost
from paceline.kernels.caches import span
from paceline.v1 import sampling_pb2
from paceline.verifier import VerifierOptions, build_service
from paceline.verifier import ranks as ranks_module

PROMPT = text(3, 300)
FIELDS: dict[str, Any] = {
    "sampling": sampling_pb2.SamplingParams(temperature=0.7, seed=3),
    "max_new_tokens": 12,
    "ignore_eos": True,
}
OPTIONS: dict[str, Any] = {"kv_bytes": 1 << 28, "threads": 1, "prefix_caching": True}


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that four ranks can share; its LM head has odd widths in each."""
    shape = {"num_key_value_heads": 4, "num_attention_heads": 8, "hidden_size": 128}
    folder = tmp_path_factory.mktemp("ranks") / "target"
    return make_model(folder, "Llama", dtype="bfloat16", vocab_size=68, **shape)


async def committed(client: Client, prompt: list[int], drafter: str) -> list[Any]:
    """A generation: what it reused, its tokens and their log-probabilities, and what drafters can
    read: keys and values of all heads, hidden states."""
    created = await client.create(prompt, drafter=drafter, top_logprobs=1, **FIELDS)
    (cache,) = [c for c in client.service.store if c.read_grant == created.read_grant]
    results = [
        created.first,
        *(r.result for r in await client.responses(created.handle, drafter=drafter)),
    ]
    segment, length = cache.sequence.kv, cache.sequence.committed
    keys = [span(plane, 0, length).clone() for layer in (0, 1) for plane in segment.layer(layer)]
    states = [] if segment.taps is None else segment.taps.copy([0, 1], length - 30, length)
    await client.release(created.handle)
    return [
        created.reused_tokens,
        [token for each in results for token in each.tokens],
        [logprob for each in results for logprob in each.logprobs],
        *keys,
        *states,
    ]


@pytest.mark.bits
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        (2, {"weights": "int8", "kv_cache_dtype": "int8"}),
        (2, {"paged_kv": True, "kv_bytes": 1 << 24}),
        (4, {"weights": "int4"}),
    ],
    ids=["bfloat16", "int8", "pages", "four"],
)
async def test_bits_of_one(
    ranks: int, options: dict[str, Any], target: Path, tmp_path: Path
) -> None:
    """A prompt in chunks, plain steps, trees whose accepted nodes move, a turn that reuses KV."""
    found: dict[int, list[list[Any]]] = {}
    for size in (1, ranks):
        options = {**OPTIONS, **options, "tensor_parallel": size, "prefill_token_limit": 200}
        async with serving(target, tmp_path / "v.sock", **options) as client:
            plain = await committed(client, PROMPT, await client.reader(0, 1))
            tokens = found[1][0][1] if found else plain[1]
            tree = await client.drafter_service.add(drafters.scattered(tokens, len(PROMPT)), 5)
            drafted = await committed(client, PROMPT, tree)
            turn = await committed(client, [*PROMPT, *tokens, *text(1, 20)], "none")
            found[size] = [plain, drafted, turn]
            assert drafted[1] == plain[1]
            assert turn[0] == len(PROMPT) + len(tokens) - 1
    for one, several in zip(found[1], found[ranks], strict=True):
        for a, b in zip(one, several, strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("policy", ["verified", "quest"])
async def test_positions_by_scores(policy: str, target: Path, tmp_path: Path) -> None:
    """Which positions a drafter reads follows from the heads of rank 0."""
    async with serving(target, tmp_path / "v.sock", **OPTIONS, tensor_parallel=2) as client:
        created = await client.create(PROMPT, **FIELDS)
        exchange, kv = await following(client, created, kv_policy=policy)
        await client.rest(created.handle)
        committed = len(PROMPT) + FIELDS["max_new_tokens"] - 1
        await caught_up(kv, committed)
        keys, values = kv.parts(kv.layers[0])[0]
        assert 0 < keys.shape[1] < committed, "only the positions of high scores are read"
        assert torch.cat([keys, values], -1).isfinite().all()
        await exchange.close()
        await client.release(created.handle)


async def test_a_rank_that_dies_ends_the_verifier(target: Path, tmp_path: Path) -> None:
    lost = pytest.raises(RanksLost, match="rank 1 of 2 has ended with exit status -9")
    with lost:
        async with serving(target, tmp_path / "v.sock", **OPTIONS, tensor_parallel=2) as client:
            created = await client.create(PROMPT, **FIELDS)
            ranks: Any = client.service._loaded.ranks
            ranks._children[0].kill()
            with pytest.raises(grpc.aio.AioRpcError):
                await client.rest(created.handle)
            await until(lambda: client.service.engine._lost.done())


def test_ranks_that_differ(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = ranks_module._start

    def other(target: Path, options: VerifierOptions, *rest: Any) -> BaseProcess:
        return start(target, replace(options, weights="int8"), *rest)

    monkeypatch.setattr(ranks_module, "_start", other)
    with pytest.raises(RanksDiffer, match="rank 1 has weights 'int8', and rank 0 has 'bfloat16'"):
        build_service(target, tensor_parallel=2, threads=1)


def test_a_model_that_cannot_be_split(models: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"4, which does not divide .* kv_heads \(2\), vocab_size"):
        build_service(models["Llama"], tensor_parallel=4, threads=1)
