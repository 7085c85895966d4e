"""A target with recurrent states: tokens, prefix reuse and failing steps."""

import asyncio
from pathlib import Path
from typing import Any

import drafters
import pytest
import torch
from tiny_models import make_model
from verifier_support import CONTEXT, VOCAB, Serve, text

from paceline.decoder import Decoder
from paceline.v1 import sampling_pb2
from paceline.verifier import build_service

SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "T=0.7": {"temperature": 0.7, "seed": 3}}


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of the gated delta rule beside attention."""
    return make_model(
        tmp_path_factory.mktemp("hybrid"), "Qwen3_5",
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, max_position_embeddings=CONTEXT, initializer_range=0.3,
        eos_token_id=0, bos_token_id=1, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    )  # fmt: skip


@pytest.fixture(scope="session")
def convolutions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short convolutions beside attention."""
    return make_model(
        tmp_path_factory.mktemp("convolutions"), "Lfm2",
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"], num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.3,
        block_auto_adjust_ff_dim=False, eos_token_id=0, bos_token_id=1, pad_token_id=None,
    )  # fmt: skip


def fields(name: str, tokens: int) -> dict[str, Any]:
    sampling = sampling_pb2.SamplingParams(**SAMPLINGS[name])
    return {"sampling": sampling, "max_new_tokens": tokens, "ignore_eos": True}


@pytest.mark.parametrize(
    ("model", "weights", "name"),
    [("hybrid", "float32", "greedy"), ("hybrid", "float32", "T=0.7"),
     ("hybrid", "bfloat16", "T=0.7"), ("hybrid", "int8", "greedy"), ("hybrid", "int4", "greedy"),
     ("convolutions", "float32", "T=0.7"), ("convolutions", "bfloat16", "greedy"),
     ("convolutions", "int4", "T=0.7")],
)  # fmt: skip
async def test_same_tokens_with_every_drafter_and_in_any_chunks(
    serve: Serve, model: str, weights: str, name: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(model)
    prompt, wanted = text(3, 300), fields(name, 40)
    options: dict[str, Any] = {"weights": weights, "kv_bytes": 1 << 26}
    async with serve(folder, **options) as client:
        plain = await client.generate(prompt, None, **wanted)
        for drafter, draw in drafters.all_of(plain, len(prompt)).items():
            assert await client.generate(prompt, draw, seed=5, **wanted) == plain, drafter
    async with serve(folder, prefill_token_limit=16, **options) as client:
        assert await client.generate(prompt, None, **wanted) == plain


async def test_prefixes_are_reused_where_their_states_are_kept(serve: Serve, hybrid: Path) -> None:
    options: dict[str, Any] = {"kv_bytes": 1 << 26, "prefix_caching": True}
    wanted, prompt = fields("greedy", 30), text(9, 300)
    async with serve(hybrid, **options) as client:

        async def run(tokens: list[int]) -> tuple[int, list[int]]:
            output, _, created = await client.run(tokens, **wanted)
            return created.reused_tokens, output

        reused, output = await run(prompt)
        assert reused == 0
        turn = [*prompt, *output, *text(10, 20)]
        assert await run(prompt) == (256, output), "the snapshot at the last border of the prompt"
        reused, continued = await run(turn)
        assert reused == len(prompt) + len(output) - 1
        assert (await run(prompt[:200]))[0] == 0, "no states are kept there"
        await client.service.check_integrity()
    async with serve(hybrid, kv_bytes=1 << 26) as client:
        assert await client.generate(turn, None, **wanted) == continued


async def test_prefixes_with_hidden_states_are_reused_where_both_are_kept(
    serve: Serve, hybrid: Path
) -> None:
    options: dict[str, Any] = {"kv_bytes": 1 << 26, "prefix_caching": True}
    wanted, prompt = fields("greedy", 20), text(9, 300)
    async with serve(hybrid, **options) as client:
        plain = await client.generate(prompt, None, **wanted)
        taps = {"drafter": await client.reader(0, 2), **wanted}
        for reused in (0, 256):
            created = await client.create(prompt, **taps)
            output = [*created.first.tokens, *await client.rest(created.handle)]
            assert (created.reused_tokens, output) == (reused, plain)
            await client.release(created.handle)


async def test_a_failed_step_leaves_the_states_as_they_were(
    serve: Serve, hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second step of two texts fails after the model has run; each text then runs alone."""
    async with serve(hybrid, kv_bytes=1 << 26) as client:
        prompt, wanted = text(5, 90), fields("T=0.7", 40)
        plain = await client.generate(prompt, None, **wanted)
        forward, failed = Decoder.forward, list[int]()

        def failing(
            decoder: Decoder, tokens: torch.Tensor, plan: Any, caches: Any, **options: Any
        ) -> Any:
            output = forward(decoder, tokens, plan, caches, **options)
            if len(caches) > 1:
                failed.append(len(caches))
                raise RuntimeError("a step of several texts")
            return output

        monkeypatch.setattr(Decoder, "forward", failing)
        draw = drafters.scattered(plain, len(prompt))
        name = await client.drafter_service.add(draw)
        created = [await client.create(prompt, **wanted) for _ in range(2)]
        calls = [client.rest(each.handle, drafter=name) for each in created]
        rest = await asyncio.gather(*calls)
        assert [[*c.first.tokens, *r] for c, r in zip(created, rest, strict=True)] == [plain] * 2


def test_pages_are_refused(hybrid: Path) -> None:
    with pytest.raises(ValueError, match="paged_kv is not supported for 'qwen3_5_text'"):
        build_service(hybrid, paged_kv=True, kv_bytes=1 << 26)
