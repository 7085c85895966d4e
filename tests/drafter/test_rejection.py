"""Drafting for rejection sampling: chains of samples with their distributions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.drafter.methods.base import Budget, DraftSequence, Update
from paceline.kernels import History, Proposal, filter_logits
from paceline.sampling import Sampling
from paceline.text import sampling_rules
from paceline.tree import TokenTree

from .conftest import drafting
from .models import (
    VOCAB,
    DenseDSpark,
    load,
    made_up_states,
    start,
    text_of,
    write_drafter,
    write_model,
)

REJECTION = Sampling(
    temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=77, acceptance="rejection"
)


def check_draws(tree: TokenTree, text: list[int], candidates: int) -> None:
    tree.check(VOCAB)
    assert tree.parents == tuple(range(-1, len(tree) - 1))
    assert len(tree.proposals) == len(tree)
    for place, (token, proposal) in enumerate(zip(tree.tokens, tree.proposals, strict=True)):
        assert len(proposal.tokens) <= candidates
        assert proposal.draw(REJECTION.key, len(text) + place) == token
        assert tree.confidences[place] == pytest.approx((1 + proposal.peak) / 2)
        assert Proposal.checked(proposal.tokens.tolist(), proposal.probabilities.tolist())


def assert_truncated(proposal: Proposal, scores: torch.Tensor) -> None:
    """The proposal holds the likeliest tokens with the model's probabilities."""
    best = scores.topk(len(proposal.tokens))
    assert set(proposal.tokens.tolist()) == set(best.indices.tolist())
    odds = scores.softmax(0)[torch.from_numpy(proposal.tokens)]
    mine = torch.from_numpy(proposal.probabilities)
    torch.testing.assert_close(mine, odds / odds.sum(), rtol=1e-3, atol=1e-5)


def follow(
    sequence: DraftSequence, text: list[int], rounds: int, candidates: int
) -> list[TokenTree]:
    """Trees of several rounds, each of which accepts the first token."""
    trees = []
    for _ in range(rounds):
        tree = sequence.draft(Budget(6, 6))
        check_draws(tree, text, candidates)
        trees.append(tree)
        more = [tree.tokens[0], (tree.tokens[0] + 1) % VOCAB]
        text += more
        sequence.extend(Update(more))
    return trees


@pytest.mark.parametrize("candidates", [VOCAB, 8])
def test_lm_draws_from_its_own_distribution(tmp_path: Path, candidates: int) -> None:
    folder = write_model(tmp_path / "model", "llama", seed=1)
    drafter = load("lm", folder, widths="4,4,4,4", min_survival=0, candidates=candidates)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = text_of(20)
    prompt = list(text)
    sequence = start(drafter, list(text), sampling=REJECTION)
    for tree in follow(sequence, text, 3, candidates):
        assert len(tree) == 4
        path = list(prompt)
        for token, proposal in zip(tree.tokens, tree.proposals, strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([path])).logits[0, -1]
            history = History(text_of(20), path[20:])
            assert_truncated(proposal, filter_logits(logits, sampling_rules(REJECTION), history))
            path.append(token)
        prompt += [tree.tokens[0], (tree.tokens[0] + 1) % VOCAB]


def test_dspark_draws_with_its_heads(tmp_path: Path) -> None:
    """Each token from the block's logits and the Markov head after the one drawn before."""
    target = write_model(tmp_path / "target")
    folder = write_drafter("dspark", tmp_path / "drafter", target, markov_rank=8)
    drafter = load("dspark", folder, target, widths="4,8", min_survival=0)
    dense = DenseDSpark(folder, target)
    text = text_of(17)
    states = made_up_states(dense.config, len(text) - 1)
    tree = start(drafter, text, states, REJECTION).draft(Budget(8, 8))
    assert len(tree) == dense.config.levels
    hidden = dense.block(text, states)
    for place, proposal in enumerate(tree.proposals):
        path = list(tree.tokens[:place])
        with torch.inference_mode():
            logits, confidence = dense.at(hidden, [text[-1], *path])
        history = History(text)
        assert_truncated(proposal, filter_logits(logits, sampling_rules(REJECTION), history))
        assert proposal.draw(REJECTION.key, len(text) + place) == tree.tokens[place]
        assert tree.confidences[place] == pytest.approx(math.exp(confidence), rel=1e-3)


async def test_every_method_answers_with_chains() -> None:
    """Methods that do not sample, too: their tokens have probability 1."""
    async with drafting("ngram,continuations=4,min_survival=0") as service:
        tokens = [*([1, 2, 3] * 3), 1, 2, 4, 1, 2]
        for sampling, branches in ((None, True), (REJECTION.to_proto(), False)):
            text = await service.open(tokens, sampling=sampling)
            answer = await text.round()
            tree = TokenTree.from_proto(answer.tree)
            assert (len(set(tree.parents)) < len(tree)) == branches
            assert not answer.tree.distributions
            await text.end()
