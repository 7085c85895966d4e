"""Training of a DSpark drafter: packing, loss, runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoder import load_config
from paceline.drafter.methods.dspark import DSparkConfig, DSparkModel, read_dspark
from paceline.train.checkpoint import save_model
from paceline.train.corpus import Corpus
from paceline.train.dspark import run as dspark_run
from paceline.train.dspark.blocks import Blocks
from paceline.train.dspark.heldout import accepted_length, conditional, draft_chains
from paceline.train.dspark.objective import weighted_loss
from paceline.train.dspark.preset import DSparkPreset
from paceline.train.dspark.run import train_dspark
from paceline.train.dspark.target import TappedTarget
from paceline.train.loop import Run
from paceline.train.model import build_model
from paceline.train.preset import Preset
from paceline.train.tokenizer import train_tokenizer

CONFIG = DSparkConfig(
    hidden=16, intermediate=24, layers=1, q_heads=2, kv_heads=1, head_dim=8, vocab_size=90,
    max_position=512, norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    taps=(0, 1), target_layers=3, block=4, mask_token=0, markov_rank=4, confidence=True,
    confidence_markov=True,
)  # fmt: skip
SMALL = DSparkPreset(
    taps=(0, -1), layers=1, block=3, markov_rank=8, minutes=60, steps=40, rows=2, length=48,
    anchors=12, muon_rate=0.02, adamw_rate=1e-2, window=16, own_texts=4, own_from=0.5, files=4,
)  # fmt: skip


@given(
    rows=st.integers(1, 3), length=st.integers(6, 40), window=st.sampled_from([0, 1, 5, 64]),
    count=st.integers(1, 60), seed=st.integers(0, 99), from_anchor=st.booleans(),
)  # fmt: skip
def test_blocks_are_whole_and_see_what_is_before_them(
    rows: int, length: int, window: int, count: int, seed: int, from_anchor: bool
) -> None:
    config = replace(CONFIG, window=window, from_anchor=from_anchor)
    torch.manual_seed(seed)
    tokens = torch.randint(0, 9, (rows, length))  # 0 ends texts
    blocks = Blocks.draw(config, tokens, count, separator=0)
    if blocks is None:
        return
    flat = tokens.flatten()
    for n, anchor in enumerate(blocks.anchors.tolist()):
        row = int(blocks.target[n, 0]) // length
        text = tokens[row]
        assert anchor >= 1
        inside = text[anchor : anchor + config.levels + 1]
        assert len(inside) == config.levels + 1
        assert (inside[:-1] != 0).all()  # the last may end the text
        assert blocks.fed[n].tolist() == [int(text[anchor])] + [0] * (config.block - 1)
        assert torch.equal(blocks.before[n], inside[:-1])
        assert torch.equal(blocks.wanted[n], inside[1:])
        assert torch.equal(flat[blocks.target[n]], inside[:-1])
        seen = blocks.used[blocks.seen[n][blocks.seen[n] >= 0]]
        begin = max(0, anchor - window) if window else 0
        assert sorted(seen.tolist()) == [row * length + p for p in range(begin, anchor)]
    pairs = list(zip(blocks.target[:, 0].tolist(), strict=True))
    assert len(set(pairs)) == len(pairs) <= rows * count


def test_cost_does_not_grow_with_the_text() -> None:
    """With a window: as many positions seen and used of 4,000 tokens as of 100."""
    config = replace(CONFIG, window=8)
    for length in (100, 4000):
        blocks = Blocks.at(
            config, torch.ones(1, length).long(), torch.zeros(3).long(), torch.tensor([20, 40, 60])
        )
        assert blocks.seen.shape == (3, 8)
        assert blocks.used.shape == (24,)


def test_the_loss_by_hand() -> None:
    preset = replace(SMALL, ce=0.1, tv=0.9, certainty=1.0)
    torch.manual_seed(0)
    draft, target = (torch.randn(2, 3, 5).log_softmax(-1) for _ in range(2))
    wanted, confidence = torch.randint(0, 5, (2, 3)), torch.randn(2, 3)
    expected = 0.0
    for block in range(2):
        for place in range(3):
            weight = torch.exp(torch.tensor(-place / 3))
            distance = (draft[block, place].exp() - target[block, place].exp()).abs().sum()
            label, said = 1 - distance / 2, confidence[block, place].sigmoid()
            entropy = -(label * said.log() + (1 - label) * (1 - said).log())
            loss = -0.1 * draft[block, place, wanted[block, place]] + 0.9 * distance + entropy
            expected += float(weight * loss) / 2
    assert float(weighted_loss(draft, target, wanted, confidence, preset)) == pytest.approx(
        expected
    )


def test_the_confidence_trains_the_backbone_but_not_its_label() -> None:
    preset = replace(SMALL, ce=0.0, tv=0.0)
    draft = torch.zeros(1, 2, 5, requires_grad=True)
    confidence = torch.zeros(1, 2, requires_grad=True)
    target = torch.randn(1, 2, 5).log_softmax(-1)
    loss = weighted_loss(
        draft.log_softmax(-1), target, torch.zeros(1, 2).long(), confidence, preset
    )
    loss.backward()
    assert confidence.grad is not None
    assert confidence.grad.abs().min() > 0
    assert draft.grad is None or not draft.grad.any()


def test_accepted_lengths() -> None:
    rounds = [0, 1, 3, 3]
    assert accepted_length(rounds) == 1 + 7 / 4
    assert [conditional(rounds, place) for place in (1, 2, 3)] == [3 / 4, 2 / 3, 1.0]


def test_chains_follow_the_sequential_head() -> None:
    """A head that only ever knows one successor decides, whatever the backbone says."""
    model = DSparkModel(replace(CONFIG, confidence=False, confidence_markov=False))
    head = model.markov_head
    assert head is not None
    with torch.no_grad():
        head.markov_w1.weight.zero_()
        head.markov_w2.weight.zero_()
        for number, (token, after) in enumerate([(5, 7), (7, 6), (6, 2), (2, 5)]):
            head.markov_w1.weight[token, number] = 1.0
            head.markov_w2.weight[after, number] = 100.0
        hidden, logits = torch.randn(1, 4, 16), torch.randn(1, 4, 90)
        chain = draft_chains(model, hidden, logits, torch.tensor([5]), torch.tensor([3]), None)
    assert chain.tolist() == [[7, 6, 2, 5]]


@pytest.fixture
def target(corpus: Corpus, preset: Preset, tmp_path: Path) -> Path:
    """A target of random weights."""
    texts = (document.text for document in corpus.train)
    tokenizer = train_tokenizer(texts, preset.vocabulary, 512)
    model = build_model(replace(preset, context=512), tokenizer.eos_token_id)
    save_model(tmp_path / "target", model, tokenizer)
    return tmp_path / "target"


def test_the_target_reads_as_a_verifier_would(target: Path) -> None:
    """Rows by themselves, longer than a chunk, and logits only where they are wanted."""
    reader = TappedTarget(target, "cpu", [0, 1])
    tokens = torch.randint(1, 300, (2, 300))
    places = torch.tensor([5, 299, 300, 455])
    taps, logits = reader.read(tokens, places)
    assert taps.shape == (600, 2 * load_config(target).hidden)
    assert logits.shape == (4, 320)
    alone, own = reader.read(tokens[1:, :156], torch.tensor([0, 155]))
    assert torch.equal(alone, taps[300:456])
    assert torch.equal(own, logits[2:])


def _run(folder: Path, steps: int) -> Run:
    return Run(folder, minutes=60, steps=steps, log_steps=4, bf16=False)


def test_the_loss_falls_and_the_folder_says_what_was_done(
    target: Path, corpus: Corpus, tmp_path: Path
) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    train_dspark(target, corpus, SMALL, _run(work, 40), out)
    log = torch.load(work / "run.pt", weights_only=True)["progress"]["log"]
    losses = [row["loss"] for row in log if "loss" in row]
    assert losses[-1] < 0.9 * losses[0]
    measured = [row for row in log if "heldout" in row][-1]
    assert measured["heldout"] >= 1
    assert {"place_1", "place_2", "place_3"} <= set(measured)
    config, _ = read_dspark(out)
    assert (config.taps, config.window, config.markov_rank) == ((0, 1), 16, 8)
    assert json.loads((out / "config.json").read_text())["paceline"]["training"]["steps"] == 40
    assert "| files | temperature | rounds |" in (out / "README.md").read_text()


def test_a_run_without_heads_is_dflash(target: Path, corpus: Corpus, tmp_path: Path) -> None:
    train_dspark(target, corpus, SMALL.without_heads(), _run(tmp_path / "work", 2), tmp_path / "o")
    described = json.loads((tmp_path / "o" / "config.json").read_text())
    assert described["speculators_model_type"] == "dflash"
    assert (described["markov_rank"], described["enable_confidence_head"]) == (0, False)


def test_an_interrupted_run_goes_on_bit_for_bit(
    target: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = train_dspark(target, corpus, SMALL, _run(tmp_path / "a", 12), tmp_path / "a-out")
    stop_at: Callable[[], None] = _stopping(7, monkeypatch)
    with pytest.raises(KeyboardInterrupt, match="stopped at step 7"):
        train_dspark(target, corpus, SMALL, _run(tmp_path / "b", 12), tmp_path / "b-out")
    stop_at()
    resumed = train_dspark(target, corpus, SMALL, _run(tmp_path / "b", 12), tmp_path / "b-out")
    for name, weights in straight.state_dict().items():
        assert torch.equal(weights, resumed.state_dict()[name]), name


def _stopping(step: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Send SIGTERM to ourselves in the loss of one step; returns what undoes it."""
    import os
    import signal

    plain, calls = dspark_run.BlockLoss.__call__, 0

    def call(self: object, *args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(dspark_run.BlockLoss, "__call__", call)
    return monkeypatch.undo
