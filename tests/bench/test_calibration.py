"""Calibration: what temperature scaling repairs, its figures, its file, its picture."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.calibration.fit import (
    area_under_curve,
    calibrated,
    expected_error,
    fit,
    reliability,
    scale,
)
from paceline.bench.calibration.picture import diagram
from paceline.bench.calibration.samples import Paths, collect
from paceline.decoder import Decoder
from paceline.drafter import DrafterSpec, LoadError, Resources
from paceline.drafter.acceptance import record, replay
from paceline.drafter.calibration import Calibration, Scaling
from paceline.drafter.checkpoint import read_calibration
from paceline.drafter.methods import method_class
from paceline.drafter.registry.loader import Loader
from paceline.drafter.spec import Roots
from paceline.drafter.tree import Tree, chain
from paceline.v1 import sampling_pb2


def made_up(temperatures: list[float], count: int, seed: int) -> list[Paths]:
    """Chains whose true logits are those told, over a temperature that grows with depth."""
    draws = np.random.default_rng(seed)
    logits = draws.normal(1.0, 1.5, (count, len(temperatures)))
    told = 1 / (1 + np.exp(-logits * np.array(temperatures)))
    stands = (draws.random(logits.shape) < 1 / (1 + np.exp(-logits))).cumprod(1).astype(bool)
    return [Paths(told[:, : d + 1], stands[:, d]) for d in range(len(temperatures))]


def test_overconfidence_is_repaired_and_ranks_stay() -> None:
    """On other samples than it was fitted to."""
    true = [2.0, 3.0, 1.0]
    scalings = fit(made_up(true, 4000, 1), shifts=False)
    assert [each.temperature for each in scalings] == pytest.approx(true, rel=0.3)
    before = made_up(true, 4000, 2)
    after = calibrated(before, scalings)
    for depth, (raw, right) in enumerate(zip(before, after, strict=True)):
        error = expected_error(right.survival, right.stood)
        assert error < max(0.02, 0.5 * expected_error(raw.survival, raw.stood)), depth
        last = slice(depth, depth + 1)
        order = raw.confidences[:, last].argsort(0)
        assert (np.diff(right.confidences[:, last][order[:, 0], 0]) >= 0).all()


def test_a_half_that_is_none_needs_a_shift() -> None:
    draws = np.random.default_rng(3)
    paths = [Paths(np.full((3000, 1), 0.5), draws.random(3000) < 0.2)]
    for shifts, bound in ((False, 0.25), (True, 0.03)):
        right = calibrated(paths, fit(paths, shifts=shifts))[0]
        assert (expected_error(right.survival, right.stood) < 0.03) == (bound == 0.03)


def test_too_few_paths_get_no_scaling_of_their_own() -> None:
    levels = [*made_up([2.0], 500, 4), Paths(np.full((20, 2), 0.9), np.zeros(20, bool))]
    assert len(fit(levels)) == 1
    assert calibrated(levels, fit(levels))[1].confidences.shape == (20, 2)
    assert calibrated(levels, ()) == levels


def test_figures() -> None:
    survival = np.array([0.05, 0.05, 0.95, 0.95])
    stood = np.array([False, False, True, False])
    assert expected_error(survival, stood) == pytest.approx((2 * 0.05 + 2 * 0.45) / 4)
    assert [each.count for each in reliability(survival, stood)] == [2, 2]
    assert area_under_curve(survival, stood) == pytest.approx((1 + 1 + 0.5) / 3)
    assert np.isnan(area_under_curve(survival, stood & False))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.floats(0.1, 9), st.floats(-4, 4))
def test_a_drafter_s_calibration_is_the_fitted_one(
    confidences: list[float], temperature: float, shift: float
) -> None:
    """One by one on trees as in arrays, and always a confidence."""
    scaling = Scaling(temperature, shift)
    tree = Calibration("ngram", (scaling,)).apply(
        chain(range(len(confidences)), confidences), sampled=False
    )
    tree.check()
    expected = scale(np.array(confidences), scaling)
    assert tree.confidences == pytest.approx(expected.tolist())


def test_depths_and_modes() -> None:
    tree = Tree((1, 2, 3, 4), (-1, -1, 0, 2), (0.5, 0.5, 0.5, 0.5))
    calibration = Calibration("lm", (), (Scaling(1.0, 1.0), Scaling(1.0, -1.0)))
    assert calibration.apply(tree, sampled=False) is tree
    after = calibration.apply(tree, sampled=True).confidences
    assert after[0] == after[1] == pytest.approx(0.731, abs=1e-3)
    assert after[2] == after[3] == pytest.approx(0.269, abs=1e-3)
    bare = Tree((1,), (-1,))
    assert calibration.apply(bare, sampled=True) is bare


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    calibration = Calibration("ngram", (Scaling(2.0, -0.5),), ())
    calibration.write(path, {"paths": 9})
    assert read_calibration(path, "ngram") == calibration
    with pytest.raises(LoadError, match="for the method 'ngram'"):
        read_calibration(path, "lm")
    told = json.loads(path.read_text())
    for wrong in (
        {**told, "format": 9}, {**told, "greedy": [{"temperature": 0, "shift": 0}]},
        {**told, "sampled": [{}]}, [], {**told, "greedy": 3},
    ):  # fmt: skip
        path.write_text(json.dumps(wrong))
        with pytest.raises(LoadError, match="paceline calibrate"):
            read_calibration(path, "ngram")


async def test_a_drafter_is_loaded_with_it(tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    Calibration("ngram", (Scaling(2.0),)).write(path, {})
    loader = Loader(Roots([tmp_path]), Resources())
    drafter = await loader.load(DrafterSpec.parse(f"ngram,calibration={path}"))
    assert drafter.calibration is not None
    assert (await loader.load(DrafterSpec.parse("ngram"))).calibration is None
    with pytest.raises(LoadError, match="not below"):
        await loader.load(DrafterSpec.parse("ngram,calibration=/etc/passwd"))
    await loader.close()


def test_nodes_are_labelled_by_their_paths(tmp_path: Path) -> None:
    """Whatever the target repeats, prompt lookup gets right."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    decoder = Decoder.load(tmp_path, "float32")
    recording = record(decoder, [1, 2, 3] * 4, 60)
    again = replay(decoder, [1, 2, 3] * 4, recording.continuation)
    assert again.tokens == recording.tokens
    assert again.prompt_length == recording.prompt_length
    assert len(again.cache) == len(recording.cache)
    sampled = sampling_pb2.SamplingParams(temperature=1.0, seed=1)
    drafter = method_class("ngram").load(None, {"min_n": "1"}, Resources())
    levels = collect(drafter, [recording, record(decoder, [1, 2, 3] * 4, 60, sampled)])
    for depth, level in enumerate(levels, 1):
        assert level.confidences.shape == (len(level.stood), depth)
    assert all(
        deeper.stood.sum() <= level.stood.sum() for level, deeper in itertools.pairwise(levels)
    )
    assert 0 < levels[0].stood.sum() < len(levels[0].stood)


def test_the_picture_is_one() -> None:
    paths = made_up([2.0], 300, 5)[0]
    curve = reliability(paths.survival, paths.stood)
    drawn = ElementTree.fromstring(diagram({"<greedy>": {"before": curve, "after": curve}}))
    tags = [each.tag.rpartition("}")[2] for each in drawn.iter()]
    assert tags.count("polyline") == 2
    assert tags.count("circle") == 2 * len(curve)
