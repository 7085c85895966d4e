"""Accepted lengths on recorded texts, against texts written token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafter.methods.base import Budget, GenerationInfo
from paceline.kernels import History, choose_token
from paceline.text import sampling_rules
from paceline.train.acceptance import accepted_per_round, record
from paceline.tree import TokenTree, accepted_tokens

from .models import (
    SAMPLINGS,
    VOCAB,
    forward,
    load,
    start,
    target_kv,
    text_of,
    write_longspec,
    write_model,
)

COUNT = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("acceptance") / "model")


@pytest.mark.parametrize("name", SAMPLINGS)
def test_rounds_are_those_of_the_target_s_text(folder: Path, name: str) -> None:
    """Of a drafter of other weights, so that some of its guesses fail; the text is written one
    token at a time, each by a pass over the whole text."""
    sampling, prompt = SAMPLINGS[name], text_of(20)
    decoder, history = load("lm", folder).decoder, History(prompt)
    drafter = load("lm", write_model(folder.parent / "other", seed=7), widths="4,4,4")
    text = list(prompt)
    for _ in range(COUNT):
        logits, _ = forward(decoder, text)
        text.append(choose_token(logits, sampling_rules(sampling), len(text), history))
        history.push(text[-1])
    recording = record(decoder, prompt, COUNT, sampling)
    assert recording.tokens == text
    length, expected = 21, []
    while length + 3 <= len(text):
        sequence = drafter.start(GenerationInfo(text[:length], 20, VOCAB, sampling))
        tree = sequence.draft(Budget(64, 3))
        expected.append(accepted_tokens(tree, text[length : length + 3]))
        length += expected[-1] + 1
    assert accepted_per_round(drafter, recording) == expected


def test_longspec_reads_what_was_recorded_up_to_the_anchor(tmp_path: Path) -> None:
    """The same layer over KV of a fresh pass that ends before the anchor."""
    target = write_model(tmp_path / "target")
    layer = write_longspec(tmp_path / "layer", target, window=16)
    drafter = load("longspec", layer, target, widths="4,4")
    decoder = load("lm", target).decoder
    recording = record(decoder, text_of(30), COUNT)
    expected, length = [], 31
    while length + 2 <= len(recording.tokens):
        text = recording.tokens[:length]
        kv = target_kv(target, drafter.shape, text)
        tree = start(drafter, text, kv).draft(Budget(64, 64))
        expected.append(accepted_tokens(tree, recording.tokens[length : length + 2]))
        length += expected[-1] + 1
    assert accepted_per_round(drafter, recording) == expected


def test_what_cannot_be_recorded_is_refused(folder: Path) -> None:
    decoder = load("lm", folder).decoder
    for prompt, count in (([], 5), (text_of(2000), 100)):
        with pytest.raises(ValueError, match="target's context"):
            record(decoder, prompt, count)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.data())
def test_accepted_length_is_the_longest_path_along_the_text(
    following: list[int], data: st.DataObject
) -> None:
    size = data.draw(st.integers(0, 12))
    tree = TokenTree(
        tuple(data.draw(st.integers(0, 3)) for _ in range(size)),
        tuple(data.draw(st.integers(-1, node - 1)) for node in range(size)),
    )
    prefixes = [tuple(following[:n]) for n in range(1, len(following) + 1)]
    held = [len(p) for p in prefixes if any(tree.path(node) == p for node in range(size))]
    assert accepted_tokens(tree, following) == max(held, default=0)
