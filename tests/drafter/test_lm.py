"""The tree drafter with a small model, against dense references."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.decoder import LocalCache
from paceline.drafter.methods.base import Budget, Generation, LoadError, Resources, Update
from paceline.drafter.methods.lm import LmDrafter
from paceline.drafter.methods.lm_sequence import LmSequence, chain_segments
from paceline.drafter.tree import Tree
from paceline.kernels import History, choose_token, filter_logits, gumbel_noise, plan_trees
from paceline.service.sampling import sampling_params
from paceline.v1 import sampling_pb2

from .conftest import drafting, failure
from .hashing import check_hashes, hashing_drafter
from .models import VOCAB, change_config, write_model

GREEDY = sampling_pb2.SamplingParams()
SAMPLINGS = {
    "greedy": GREEDY,
    "T=1": sampling_pb2.SamplingParams(temperature=1.0, seed=2**63 + 5),
    "filtered": sampling_pb2.SamplingParams(
        temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=3
    ),
    "penalised": sampling_pb2.SamplingParams(
        temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2,
        logit_bias={4: 2.0, 5: -3.0}, seed=9,
    ),
    "greedy penalised": sampling_pb2.SamplingParams(repetition_penalty=1.5, logit_bias={7: 1.0}),
}  # fmt: skip


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("lm") / "model")


def load(folder: Path, **options: str) -> LmDrafter:
    return LmDrafter.load(folder, options, Resources())


def text_of(length: int, seed: int = 0) -> list[int]:
    draws = random.Random(seed)
    return [draws.randrange(VOCAB) for _ in range(length)]


def start(
    drafter: LmDrafter, text: Sequence[int], sampling: sampling_pb2.SamplingParams = GREEDY
) -> LmSequence:
    return drafter.start(Generation(text, len(text), VOCAB, sampling))


class Oracle:
    """The model itself as the target, one token at a time by a fresh forward over the text."""

    def __init__(
        self, drafter: LmDrafter, prompt: Sequence[int], sampling: sampling_pb2.SamplingParams
    ) -> None:
        self.text = list(prompt)
        self._prompt = len(prompt)
        self._drafter = drafter
        self._params = sampling_params(sampling)

    def next_token(self, beyond: Sequence[int] = ()) -> int:
        text = [*self.text, *beyond]
        logits, _ = forward(self._drafter, text)
        history = History(text[: self._prompt], text[self._prompt :])
        return choose_token(logits, self._params, len(text), history)

    def verify(self, tree: Tree) -> list[int]:
        """Tokens a verifier would emit for this tree; they join the text."""
        node, emitted = -1, []
        while True:
            token = self.next_token(emitted)
            emitted.append(token)
            right = [child for child in tree.children(node) if tree.tokens[child] == token]
            if not right:
                break
            node = right[0]
        self.text += emitted
        return emitted


def forward(drafter: LmDrafter, text: Sequence[int]) -> tuple[torch.Tensor, LocalCache]:
    """Logits after the text, and its KV, by one pass over all of it."""
    cache = LocalCache(drafter.decoder.config)
    cache.reserve(len(text))
    plan = plan_trees(chain_segments(0, 0, len(text)))
    last = torch.tensor([len(text) - 1])
    return drafter.decoder.forward(torch.tensor(text), plan, [cache], logit_rows=last).logits[
        0
    ], cache


def dense_tree(
    model: Any, text: list[int], sampling: sampling_pb2.SamplingParams, widths: Sequence[int]
) -> dict[tuple[int, ...], float]:
    """Beam search with transformers, every path run alone: path to log survival."""
    params = sampling_params(sampling)
    tree: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 0.0}
    for level, width in enumerate(widths):
        found: dict[tuple[int, ...], float] = {}
        for path, score in frontier.items():
            so_far = [*text, *path]
            with torch.inference_mode():
                logits = model(torch.tensor([so_far])).logits[0, -1].float()
            history = History(text, path)
            scores = filter_logits(logits, params, history)
            if not params.greedy:
                scores = scores + gumbel_noise(params.seed, len(text) + level, VOCAB)
            logs = scores.log_softmax(0)
            for token in logs.topk(width).indices.tolist():
                found[(*path, token)] = score + float(logs[token])
        best = sorted(found, key=lambda path: -found[path])[:width]
        frontier = {path: found[path] for path in best}
        tree |= frontier
    return tree


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("widths", ["4,4,4", "2,5", "1,1,1,1", "1,1,3,2"])
def test_trees_equal_a_dense_beam_search(
    tmp_path_factory: pytest.TempPathFactory, family: str, name: str, widths: str
) -> None:
    folder = write_model(tmp_path_factory.mktemp("dense") / "model", family, seed=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    drafter = load(folder, widths=widths, min_survival="0", max_nodes="64")
    levels = [int(width) for width in widths.split(",")]
    for seed in range(2):
        text = text_of(37, seed)
        tree = start(drafter, text, SAMPLINGS[name]).draft(Budget(64, 64))
        tree.check(VOCAB)
        expected = dense_tree(model, text, SAMPLINGS[name], levels)
        assert {tree.path(node) for node in range(len(tree))} == set(expected)
        for node in range(len(tree)):
            assert tree.survival(node) == pytest.approx(
                torch.tensor(expected[tree.path(node)]).exp().item(), rel=1e-3, abs=1e-6
            )


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_perfect_drafter_gets_everything_accepted(folder: Path, name: str) -> None:
    """With the target's own weights and noise the verifier's choice is the first child."""
    drafter = load(folder, widths="1,1,1,1", min_survival="0", candidates=str(VOCAB))
    oracle = Oracle(drafter, text_of(20), SAMPLINGS[name])
    sequence = start(drafter, oracle.text, SAMPLINGS[name])
    for _ in range(10):
        emitted = oracle.verify(sequence.draft(Budget(4, 4)))
        assert len(emitted) == 5
        sequence.extend(Update(emitted))


def test_another_noise_accepts_less(folder: Path) -> None:
    drafter = load(folder, widths="1,1,1,1", min_survival="0", candidates=str(VOCAB))
    target = sampling_pb2.SamplingParams(temperature=1.0, seed=1)
    oracle = Oracle(drafter, text_of(20), target)
    other = sampling_pb2.SamplingParams(temperature=1.0, seed=2)
    sequence = start(drafter, oracle.text, other)
    accepted = 0
    for _ in range(15):
        emitted = oracle.verify(sequence.draft(Budget(4, 4)))
        accepted += len(emitted) - 1
        sequence.extend(Update(emitted))
    assert accepted < 30  # of 60


def random_rounds(
    sequence: LmSequence, rounds: int, most: int, draws: random.Random
) -> Iterator[int]:
    """Rounds that accept some path or nothing; yields after each how many drafted nodes stayed."""
    while rounds > 0 and len(sequence.text) < most:
        rounds -= 1
        tree = sequence.draft(Budget(draws.randint(0, 16), draws.randint(0, 5)))
        new = [draws.randrange(VOCAB) for _ in range(draws.randint(0, 3))]
        if tree and draws.random() < 0.8:
            new = [*tree.path(draws.randrange(len(tree))), draws.randrange(VOCAB)]
        text, before = [*sequence.text, *new], sequence.cached
        sequence.extend(Update(tuple(new)))
        assert sequence.text == text
        yield sequence.cached - before


@pytest.mark.parametrize("widths", ["4,4,4,4", "1,1,1", "1,3,3"])
def test_the_kv_stays_that_of_the_text(folder: Path, widths: str) -> None:
    """Bit by bit, with the real decoder."""
    drafter = load(folder, widths=widths, min_survival="0")
    sequence = start(drafter, text_of(200))
    assert sum(random_rounds(sequence, 80, 2000, random.Random(0))) > 20
    _, expected = forward(drafter, sequence.text)
    for layer in range(drafter.decoder.config.layers):
        for ours, theirs in zip(sequence.cache.layer(layer), expected.layer(layer), strict=True):
            assert torch.equal(ours[:, : sequence.cached], theirs[:, : sequence.cached])


@pytest.mark.parametrize(
    ("widths", "rounds"), [("4,4,4,4", 2000), ("1,1,1", 600), ("1,3,3", 600), ("8", 600)]
)
def test_after_thousands_of_rounds_the_kv_is_that_of_the_text(widths: str, rounds: int) -> None:
    """With a decoder whose KV is a hash of the text: any slot out of place shows."""
    drafter = hashing_drafter(widths=widths, min_survival="0")
    sequence = start(drafter, text_of(50))
    kept = 0
    for count, stayed in enumerate(random_rounds(sequence, rounds, 20_000, random.Random(1))):
        kept += stayed
        if count % 50 == 0:
            check_hashes(sequence)
    check_hashes(sequence)
    assert kept > rounds / 3 or widths == "8"  # a tree of one level feeds no node


def test_a_tree_does_not_depend_on_how_the_text_came(folder: Path) -> None:
    drafter = load(folder)
    text = text_of(900)
    at_once = start(drafter, text).draft(Budget(16, 4))
    in_parts = start(drafter, text[:5])
    for begin, end in ((5, 6), (6, 300), (300, 777), (777, 900)):
        in_parts.extend(Update(text[begin:end]))
        in_parts.warm(100)
        in_parts.draft(Budget(end % 3, 2))
    assert in_parts.draft(Budget(16, 4)) == at_once
    assert in_parts.draft(Budget(16, 4)) == at_once


def test_sequences_drafted_together_get_their_own_trees(folder: Path) -> None:
    drafter = load(folder)
    texts = [text_of(length, length) for length in (1, 3, 300, 40)]
    budgets = [Budget(16, 4), Budget(3, 4), Budget(16, 2), Budget(0, 4)]
    samplings = [GREEDY, SAMPLINGS["T=1"], SAMPLINGS["filtered"], GREEDY]
    alone = [
        start(drafter, text, sampling).draft(budget)
        for text, sampling, budget in zip(texts, samplings, budgets, strict=True)
    ]
    together = drafter.draft_many(
        [
            (start(drafter, text, sampling), budget)
            for text, sampling, budget in zip(texts, samplings, budgets, strict=True)
        ]
    )
    assert together == alone
    assert [bool(tree) for tree in together] == [True, True, True, False]


@pytest.mark.parametrize(("nodes", "depth"), [(1, 4), (5, 4), (16, 1), (16, 3), (7, 2)])
def test_budgets_are_kept_with_the_likeliest_nodes(folder: Path, nodes: int, depth: int) -> None:
    drafter = load(folder, min_survival="0")
    text = text_of(30)
    tree = start(drafter, text).draft(Budget(nodes, depth))
    tree.check(VOCAB)
    assert tree.depth <= depth
    whole = start(drafter, text).draft(Budget(16, depth))
    survivals = sorted((whole.survival(node) for node in range(len(whole))), reverse=True)
    got = [tree.survival(node) for node in range(len(tree))]
    assert got == sorted(got, reverse=True)
    assert got == pytest.approx(survivals[:nodes])
    siblings = [(p, t) for p, t in zip(tree.parents, tree.tokens, strict=True)]
    assert len(set(siblings)) == len(siblings)


def test_unlikely_nodes_get_no_children(folder: Path) -> None:
    tree = start(load(folder, min_survival="0.2"), text_of(30)).draft(Budget(16, 4))
    inner = {parent for parent in tree.parents if parent >= 0}
    assert all(tree.survival(node) >= 0.2 for node in inner)
    none = start(load(folder, min_survival="1"), text_of(30)).draft(Budget(16, 4))
    assert none.depth == 1


def test_a_deadline_cuts_the_tree_short(folder: Path) -> None:
    drafter = load(folder, min_survival="0")
    tree = start(drafter, text_of(30)).draft(Budget(16, 4, deadline=time.monotonic() - 1))
    assert tree.depth == 1


def test_texts_beyond_the_models_context_are_not_drafted(tmp_path: Path) -> None:
    drafter = load(write_model(tmp_path / "m", max_position_embeddings=64), min_survival="0")
    text = text_of(60)
    assert start(drafter, text).draft(Budget(16, 4)).depth == 4
    assert start(drafter, text[:2] * 31).draft(Budget(16, 4)).depth == 3
    assert start(drafter, text[:2] * 32).draft(Budget(16, 4)).depth == 1
    sequence = start(drafter, text)
    sequence.extend(Update(text[:5]))
    assert not sequence.draft(Budget(16, 4))
    assert sequence.backlog == 0


def test_kv_beyond_the_limit_is_given_up(folder: Path) -> None:
    drafter = load(folder, kv_gib="0.001")
    assert drafter.kv.limit == 2**30 // 1000 // drafter.decoder.config.kv_bytes_per_token
    drafter.kv.limit = limit = 2048
    first, second = start(drafter, text_of(1000)), start(drafter, text_of(1500, 1))
    assert first.draft(Budget(16, 4))
    assert drafter.kv.used == first.cache.capacity
    assert not second.draft(Budget(16, 4))
    second.extend(Update([1]))
    assert not second.draft(Budget(16, 4))
    assert 0 < drafter.kv.used <= limit
    first.extend(Update([1]))
    assert first.draft(Budget(16, 4))
    first.close()
    second.close()
    assert drafter.kv.used == 0


def test_foreign_ids_are_never_drafted(folder: Path) -> None:
    drafter = load(folder)
    tree = drafter.start(Generation([1, 2, 3], 3, 10, GREEDY)).draft(Budget(16, 4))
    assert len(tree) > 0
    assert max(tree.tokens) < 10


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"width": "4"}, "known are widths"),
        ({"widths": "4,x"}, "list of whole numbers"),
        ({"widths": "0"}, "out of range"),
        ({"widths": "64,64,64,64,64"}, "at most 256"),
        ({"dtype": "float16"}, "expected auto"),
    ],
)
def test_wrong_options_are_refused(folder: Path, options: dict[str, str], says: str) -> None:
    with pytest.raises(LoadError, match=says):
        load(folder, **options)


def test_only_safetensors_of_known_models_are_loaded(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    weights = (folder / "model.safetensors").read_bytes()
    for damaged in (weights[:-100], b"no weights at all", b""):
        (folder / "model.safetensors").write_bytes(damaged)
        with pytest.raises(LoadError, match="cannot load"):
            load(folder)
    (folder / "model.safetensors").write_bytes(weights)
    for wrong in ({"vocab_size": "many"}, {"vocab_size": None}, {"paceline": []}):
        change_config(folder, **{"vocab_size": VOCAB, "paceline": {}, **wrong})
        with pytest.raises(LoadError, match=r"config\.json"):
            load(folder)
    change_config(folder, vocab_size=VOCAB, paceline={}, model_type="gpt2")
    with pytest.raises(LoadError, match="not supported"):
        load(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"no \*.safetensors"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(LoadError, match="cannot read"):
        load(folder)


async def test_another_target_or_tokenizer_is_refused(tmp_path: Path, folder: Path) -> None:
    bound = write_model(tmp_path / "bound")
    change_config(bound, paceline={"target_fingerprint": "f" * 64})
    digest = load(folder).fit.tokenizer_digest
    async with drafting(f"free=lm:{folder}", f"bound=lm:{bound}") as service:
        stream = await service.attach([1, 2], vocab_size=VOCAB, tokenizer_digest=digest)
        assert len((await stream.round([3])).tree.tokens) > 0
        await stream.end()
        for fields, reason in (
            ({"tokenizer_digest": "0" * 64}, "TOKENIZER_MISMATCH"),
            ({"vocab_size": VOCAB + 1}, "TOKENIZER_MISMATCH"),
            ({"drafter": "bound", "target_fingerprint": "e" * 64}, "TARGET_MISMATCH"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await service.attach([1, 2], **{"vocab_size": VOCAB, **fields})
            assert failure(error) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
    (bound / "tokenizer.json").write_text("{}")
    change_config(bound, paceline={"tokenizer_digest": digest})
    with pytest.raises(LoadError, match="restore"):
        load(bound)


async def test_concurrent_generations_draft_as_if_alone(folder: Path) -> None:
    drafter = load(folder)
    texts = [text_of(length, length) for length in (2, 700, 30, 300, 5, 600)]
    expected = []
    for text in texts:
        sequence = start(drafter, text, SAMPLINGS["T=1"])
        trees = []
        for token in range(6):
            sequence.extend(Update([token]))
            trees.append(sequence.draft(Budget(16, 4)))
        expected.append(trees)

    async with drafting(f"lm:{folder}") as service:

        async def generation(text: list[int]) -> list[tuple[int, ...]]:
            stream = await service.attach(text, vocab_size=VOCAB, sampling=SAMPLINGS["T=1"])
            trees = [await stream.round([token]) for token in range(6)]
            await stream.end()
            return [tuple(tree.tree.tokens) for tree in trees]

        drafted = await asyncio.gather(*(generation(text) for text in texts))
    assert drafted == [[tree.tokens for tree in trees] for trees in expected]
