"""A target with recurrent states: tokens, prefix reuse and failing steps."""

import asyncio
import json
from pathlib import Path
from typing import Any

import drafters
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from verifier_support import CONTEXT, VOCAB, serving, text

from paceline.convert import load_decoder
from paceline.decoder import Decoder, LocalCache, UnsupportedModelError
from paceline.kernels import QueryBlock, plan_trees
from paceline.v1 import sampling_pb2

SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "T=0.7": {"temperature": 0.7, "seed": 3}}


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of the gated delta rule beside attention."""
    folder = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, max_position_embeddings=CONTEXT, initializer_range=0.3,
        eos_token_id=0, bos_token_id=1, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    )  # fmt: skip
    transformers.Qwen3_5ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def convolutions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short convolutions beside attention."""
    folder = tmp_path_factory.mktemp("convolutions")
    torch.manual_seed(0)
    config = transformers.Lfm2Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"], num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.3,
        block_auto_adjust_ff_dim=False, eos_token_id=0, bos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    transformers.Lfm2ForCausalLM(config).save_pretrained(folder)
    return folder


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
    model: str, weights: str, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder: Path = request.getfixturevalue(model)
    prompt, wanted = text(3, 300), fields(name, 40)
    options: dict[str, Any] = {"weights": weights, "kv_bytes": 1 << 26}
    async with serving(folder, tmp_path / "v.sock", **options) as client:
        plain = await client.generate(prompt, None, **wanted)
        for drafter, draw in drafters.all_of(plain, len(prompt)).items():
            assert await client.generate(prompt, draw, seed=5, **wanted) == plain, drafter
    async with serving(folder, tmp_path / "c.sock", prefill_token_limit=16, **options) as client:
        assert await client.generate(prompt, None, **wanted) == plain


async def test_prefixes_are_reused_where_their_states_are_kept(
    hybrid: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"kv_bytes": 1 << 26, "prefix_caching": True}
    wanted, prompt = fields("greedy", 30), text(9, 300)
    async with serving(hybrid, tmp_path / "v.sock", **options) as client:

        async def run(tokens: list[int]) -> tuple[int, list[int]]:
            created = await client.create(tokens, **wanted)
            output = [*created.first.tokens, *await client.rest(created.handle)]
            await client.release(created.handle)
            return created.reused_tokens, output

        reused, output = await run(prompt)
        assert reused == 0
        turn = [*prompt, *output, *text(10, 20)]
        assert await run(prompt) == (256, output), "the snapshot at the last border of the prompt"
        reused, continued = await run(turn)
        assert reused == len(prompt) + len(output) - 1
        assert (await run(prompt[:200]))[0] == 0, "no states are kept there"
        await client.service.check_integrity()
    async with serving(hybrid, tmp_path / "f.sock", kv_bytes=1 << 26) as client:
        assert await client.generate(turn, None, **wanted) == continued


async def test_prefixes_with_hidden_states_are_reused_where_both_are_kept(
    hybrid: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"kv_bytes": 1 << 26, "prefix_caching": True}
    wanted, prompt = fields("greedy", 20), text(9, 300)
    async with serving(hybrid, tmp_path / "v.sock", **options) as client:
        plain = await client.generate(prompt, None, **wanted)
        taps = {"drafter": await client.reader(0, 2), **wanted}
        for reused in (0, 256):
            created = await client.create(prompt, **taps)
            output = [*created.first.tokens, *await client.rest(created.handle)]
            assert (created.reused_tokens, output) == (reused, plain)
            await client.release(created.handle)


async def test_a_failed_step_leaves_the_states_as_they_were(
    hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second step of two texts fails after the model has run; each text then runs alone."""
    async with serving(hybrid, tmp_path / "v.sock", kv_bytes=1 << 26) as client:
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


def test_tensors_of_attention_in_a_layer_of_the_delta_rule_are_refused(
    hybrid: Path, tmp_path: Path
) -> None:
    config = json.loads((hybrid / "config.json").read_text())
    weights = load_file(hybrid / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    stray = "model.layers.0.self_attn.q_proj.weight"
    save_file(weights | {stray: torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=f"tensor '{stray}' is not part of"):
        load_decoder(tmp_path)
    del weights["model.layers.2.linear_attn.dt_bias"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"lacks tensor 'model.layers.2.*dt_bias"):
        load_decoder(tmp_path)


async def test_pages_are_refused(hybrid: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="paged_kv is not supported for 'qwen3_5_text'"):
        async with serving(hybrid, tmp_path / "v.sock", paged_kv=True, kv_bytes=1 << 26):
            pass


def test_a_pass_that_is_not_committed_changes_nothing(hybrid: Path) -> None:
    """A tree and a prompt run, as if the step failed behind them; then the text goes on."""
    decoder, prompt = load_decoder(hybrid), torch.tensor(text(1, 40))
    alone, cache = LocalCache(decoder.config), LocalCache(decoder.config)
    expected = append(decoder, alone, prompt)
    append(decoder, cache, prompt[:20])
    for parents, final in (((-1, 0, 0, 2), False), ((-1, -1, 1), False), (None, True)):
        length = len(parents or range(9))
        cache.reserve(length)
        block = QueryBlock(0, 20, parents, length, final=final)
        decoder.forward(prompt[:length], plan_trees([block]), [cache], logit_rows=None)
        if final:
            found = append(decoder, cache, prompt[20:])
            assert torch.equal(found, expected[20:])


def append(decoder: Decoder, cache: LocalCache, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of a chain that is committed."""
    count = len(tokens)
    cache.reserve(count)
    plan = plan_trees([QueryBlock(0, len(cache), None, count)])
    logits = decoder.forward(tokens, plan, [cache], logit_rows=None).logits
    cache.commit(range(count))
    return logits


def test_states_that_are_not_kept_are_named(hybrid: Path) -> None:
    decoder = load_decoder(hybrid)
    cache = LocalCache(decoder.config)
    for _ in range(3):
        append(decoder, cache, torch.arange(9))
    cache.truncate(4)
    with pytest.raises(ValueError, match="no recurrent states of position 4 are kept"):
        append(decoder, cache, torch.arange(1))
