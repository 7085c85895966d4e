"""Calibration: fitted scalings, their figures, the file, and drafters that use it."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoder import Decoder
from paceline.drafter import DrafterSpec, LoadError, Resources
from paceline.drafter.calibration import Calibration, Scaling
from paceline.drafter.methods import method_class
from paceline.drafter.registry import Loader
from paceline.drafter.spec import Roots
from paceline.train.acceptance import record, replay
from paceline.train.calibration import (
    Paths,
    area_under_curve,
    calibrated,
    collect,
    expected_error,
    fit,
    run,
    scale,
)
from paceline.tree import TokenTree


def simulated(temperatures: list[float], count: int, seed: int) -> list[Paths]:
    """Chains whose logits are too large by the temperature of their depth."""
    draws = np.random.default_rng(seed)
    logits = draws.normal(1.0, 1.5, (count, len(temperatures)))
    confidences = 1 / (1 + np.exp(-logits * np.array(temperatures)))
    accepted = (draws.random(logits.shape) < 1 / (1 + np.exp(-logits))).cumprod(1).astype(bool)
    return [Paths(confidences[:, : d + 1], accepted[:, d]) for d in range(len(temperatures))]


def test_overconfidence_is_corrected_and_ranks_stay() -> None:
    """On other samples than those fitted to; a shift alone corrects a constant confidence."""
    true = [2.0, 3.0]
    scalings = fit(simulated(true, 4000, 1))
    before = simulated(true, 4000, 2)
    for depth, (raw, right) in enumerate(zip(before, calibrated(before, scalings), strict=True)):
        error = expected_error(right.survival, right.accepted)
        assert error < max(0.02, 0.5 * expected_error(raw.survival, raw.accepted)), depth
        order = raw.confidences[:, depth].argsort()
        assert (np.diff(right.confidences[order, depth]) >= 0).all()
    constant = [Paths(np.full((3000, 1), 0.5), np.random.default_rng(3).random(3000) < 0.2)]
    [right] = calibrated(constant, fit(constant))
    assert expected_error(right.survival, right.accepted) < 0.03


def test_a_depth_with_few_paths_gets_no_scaling_of_its_own() -> None:
    levels = [*simulated([2.0], 500, 4), Paths(np.full((20, 2), 0.9), np.zeros(20, bool))]
    assert len(fit(levels)) == 1
    assert calibrated(levels, fit(levels))[1].confidences.shape == (20, 2)
    assert calibrated(levels, ()) == levels


def test_figures() -> None:
    survival = np.array([0.05, 0.05, 0.95, 0.95])
    accepted = np.array([False, False, True, False])
    assert expected_error(survival, accepted) == pytest.approx((2 * 0.05 + 2 * 0.45) / 4)
    assert area_under_curve(survival, accepted) == pytest.approx((1 + 1 + 0.5) / 3)
    assert np.isnan(area_under_curve(survival, accepted & False))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.floats(0.1, 9), st.floats(-4, 4))
def test_a_drafter_s_calibration_is_the_fitted_one(
    confidences: list[float], temperature: float, shift: float
) -> None:
    """One by one on trees as in arrays, and always a confidence."""
    scaling = Scaling(temperature, shift)
    tree = Calibration("ngram", (scaling,)).apply(
        TokenTree.chain(range(len(confidences)), confidences), sampled=False
    )
    tree.check()
    expected = scale(np.array(confidences), scaling)
    assert tree.confidences == pytest.approx(expected.tolist())


def test_depths_and_modes() -> None:
    tree = TokenTree((1, 2, 3, 4), (-1, -1, 0, 2), (0.5, 0.5, 0.5, 0.5))
    calibration = Calibration("lm", (), (Scaling(1.0, 1.0), Scaling(1.0, -1.0)))
    assert calibration.apply(tree, sampled=False) is tree
    after = calibration.apply(tree, sampled=True).confidences
    assert after[0] == after[1] == pytest.approx(0.731, abs=1e-3)
    assert after[2] == after[3] == pytest.approx(0.269, abs=1e-3)
    bare = TokenTree((1,), (-1,))
    assert calibration.apply(bare, sampled=True) is bare


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    calibration = Calibration("ngram", (Scaling(2.0, -0.5),), ())
    calibration.write(path, {"paths": 9})
    assert Calibration.read(path, "ngram") == calibration
    with pytest.raises(LoadError, match="for the method 'ngram'"):
        Calibration.read(path, "lm")
    told = json.loads(path.read_text())
    for wrong in (
        {**told, "format": 9}, {**told, "greedy": [{"temperature": 0, "shift": 0}]},
        {**told, "sampled": [{}]}, [], {**told, "greedy": 3},
    ):  # fmt: skip
        path.write_text(json.dumps(wrong))
        with pytest.raises(LoadError, match="paceline calibrate"):
            Calibration.read(path, "ngram")


async def test_a_drafter_is_loaded_with_it(tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    Calibration("ngram", (Scaling(2.0),)).write(path, {})
    loader = Loader(Roots([tmp_path]), Resources())
    drafter = await loader.load(DrafterSpec.parse(f"ngram,calibration={path}"))
    assert drafter.calibration is not None
    assert (await loader.load(DrafterSpec.parse("ngram"))).calibration is None
    with pytest.raises(LoadError, match="not below"):
        await loader.load(DrafterSpec.parse("ngram,calibration=/etc/passwd"))


def test_the_command_writes_a_calibration_for_recorded_texts(tmp_path: Path) -> None:
    """Nodes are labelled by their paths: prompt lookup is right wherever the target repeats."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    decoder = Decoder.load(tmp_path, "float32")
    recording = record(decoder, [1, 2, 3] * 4, 60)
    again = replay(decoder, [1, 2, 3] * 4, recording.continuation)
    assert again.tokens == recording.tokens
    assert again.prompt_length == recording.prompt_length
    assert len(again.cache) == len(recording.cache)
    drafter = method_class("ngram").load(None, {"min_n": "1"}, Resources())
    levels = collect(drafter, recording)
    for depth, level in enumerate(levels, 1):
        assert level.confidences.shape == (len(level.accepted), depth)
    assert all(
        deeper.accepted.sum() <= level.accepted.sum()
        for level, deeper in itertools.pairwise(levels)
    )
    assert levels[0].accepted.sum() > 0
    texts = tmp_path / "texts.jsonl"
    line = {"prompt": [1, 2, 3] * 4, "tokens": recording.continuation, "temperature": 0, "seed": 0}
    texts.write_text(24 * (json.dumps(line) + "\n"))
    args = argparse.Namespace(
        drafters=["ngram,min_n=1"], target=tmp_path, dtype="float32", recordings=texts,
        output=tmp_path / "out",
    )  # fmt: skip
    assert run(args) == 0
    written = tmp_path / "out" / "ngram.json"
    assert Calibration.read(written, "ngram").greedy
    notes = json.loads(written.read_text())["notes"]
    assert notes["texts"]["greedy"] == 24
    assert notes["greedy"]["after"]["paths"] > 0
