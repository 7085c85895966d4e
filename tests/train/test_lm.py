from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.train.corpus import Corpus
from paceline.train.lm import train_lm
from paceline.train.loop import Run
from paceline.train.model import build_model
from paceline.train.own_text import own_texts
from paceline.train.preset import Preset
from paceline.train.prompts import Prompt
from paceline.train.teacher import Opinions, opinions_of

MakeRun = Callable[..., Run]


def test_opinions_are_the_targets_best_tokens(preset: Preset, tmp_path: Path) -> None:
    target = build_model(preset, eos=0)
    stream = torch.tensor([0, 5, 6, 7, 0, 8, 9])
    path = tmp_path / "opinions.safetensors"
    opinions = opinions_of(target, stream, separator=0, kept=4, path=path)
    logits = target(stream[None, 4:]).logits[0]
    assert torch.equal(opinions.ids[4:].long(), logits.topk(4).indices)
    assert torch.allclose(opinions.weights.float().sum(-1), torch.ones(7), atol=2e-3)
    # Asked once, read afterwards.
    again = opinions_of(build_model(preset, eos=0, seed=1), stream, 0, 4, path)
    assert torch.equal(again.ids, opinions.ids)
    with pytest.raises(ValueError, match="speaks about 7 tokens"):
        opinions_of(target, stream[:4], 0, 4, path)


def test_a_long_document_is_asked_in_windows_with_context(preset: Preset, tmp_path: Path) -> None:
    target = build_model(replace(preset, context=2048), eos=0)
    stream = torch.cat([torch.zeros(1), torch.arange(2500) % 300 + 1]).long()
    opinions = opinions_of(target, stream, 0, 2, tmp_path / "long.safetensors")
    assert (opinions.weights.sum(-1) > 0.9).all()
    expected = target(stream[None, 768:1792]).logits[0, 256:].topk(2).indices
    assert torch.equal(opinions.ids[1024:1792].long(), expected)


def test_own_texts_go_on_from_the_corpus(preset: Preset, tmp_path: Path) -> None:
    target = build_model(replace(preset, context=512), eos=0)
    document = list(range(1, 301))
    path = tmp_path / "own.safetensors"
    texts = own_texts(target, [document], count=40, separator=0, path=path)
    assert len(texts) == 40
    for text in texts:
        assert text[:128] == list(range(text[0], text[0] + 128))
        assert 0 not in text
        assert len(text) <= 512
    assert own_texts(target, [], 40, 0, path) == texts
    with pytest.raises(ValueError, match="no document has 128 tokens"):
        own_texts(target, [[1, 2]], 1, 0, tmp_path / "other.safetensors")


def test_the_loss_is_least_where_student_and_target_agree() -> None:
    opinions = Opinions(torch.tensor([[3, 1]]).short(), torch.tensor([[0.75, 0.25]]).half())
    like = torch.full((1, 1, 5), -20.0)
    like[0, 0, 3], like[0, 0, 1] = torch.tensor([0.75, 0.25]).log()
    places = torch.tensor([[0]])
    assert opinions.loss(like, places) < opinions.loss(torch.zeros(1, 1, 5), places)
    assert opinions.loss(like, places).item() == pytest.approx(0.5623, abs=1e-3)  # the entropy


def test_a_drafter_shares_its_targets_tokenizer(
    target: Path, corpus: Corpus, preset: Preset, make_run: MakeRun, tmp_path: Path
) -> None:
    out = tmp_path / "lm"
    small = replace(preset, layers=1, focus_files=4, own_texts=2)
    prompts = [Prompt("sum", "heldout", "def add_1(a, b):\n")]
    train_lm(target, corpus, small, make_run("lm-run", steps=4), out, prompts)
    assert (out / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    card = (out / "README.md").read_text()
    assert "| files trained on to the end |" in card
    assert "after a prompt from held-out files" in card
    other = replace(small, vocabulary=4096)
    with pytest.raises(ValueError, match="vocabulary of 320"):
        train_lm(target, corpus, other, make_run("x", steps=1), tmp_path / "other")
