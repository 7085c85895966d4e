"""`paceline calibrate`: sequential temperature scaling of confidences (DSpark, section 3.2.1)."""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from paceline.decoder import Decoder
from paceline.drafter import Drafter, DrafterSpec, Resources
from paceline.drafter.calibration import FILE, Calibration, Scaling
from paceline.drafter.methods import method_class
from paceline.drafter.recordings import read_recordings
from paceline.train.acceptance import TargetRecording, record, replay, rounds
from paceline.train.corpus import load_corpus
from paceline.tree import TokenTree
from paceline.v1 import sampling_pb2

_BINS = 10
_TEMPERATURES = np.geomspace(0.25, 6.0, 41)
_SHIFTS = np.linspace(-3.0, 3.0, 61)
_CLIP = 1e-6  # confidences are kept this far from 0 and 1
_MIN_PATHS = 100  # a depth with fewer paths gets no scaling of its own


def expected_error(survival: Floats, accepted: NDArray[np.bool_]) -> float:
    """Expected calibration error over 10 equally wide bins of the predicted probability."""
    bins = np.minimum((survival * _BINS).astype(int), _BINS - 1)
    predicted = np.bincount(bins, survival, _BINS)
    actual = np.bincount(bins, accepted, _BINS)
    return float(np.abs(predicted - actual).sum()) / max(1, len(survival))


def area_under_curve(survival: Floats, accepted: NDArray[np.bool_]) -> float:
    """Area under the ROC curve; NaN where all paths were accepted or none was."""
    _, ranks, ties = np.unique(survival, return_inverse=True, return_counts=True)
    middle = ties.cumsum() - (ties - 1) / 2
    good = int(accepted.sum())
    bad = len(accepted) - good
    if not good or not bad:
        return float("nan")
    return float((middle[ranks][accepted].sum() - good * (good + 1) / 2) / (good * bad))


def scale(confidences: Floats, scaling: Scaling) -> Floats:
    """Apply a :class:`~paceline.drafter.calibration.Scaling` to an array of confidences."""
    clipped = confidences.clip(_CLIP, 1 - _CLIP)
    logits = np.log(clipped / (1 - clipped)) / scaling.temperature + scaling.shift
    scaled: Floats = 1 / (1 + np.exp(-logits))
    return scaled


def fit(levels: Sequence[Paths]) -> tuple[Scaling, ...]:
    """Fit one scaling per depth, from shallow to deep.

    Each minimizes the expected calibration error of the product along the path, with the scalings
    of shallower depths fixed. Fitting stops at the first depth with fewer than 100 paths.
    """
    found: list[Scaling] = []
    for level in levels:
        if len(level.accepted) < _MIN_PATHS:
            break
        above = np.prod(
            [scale(level.confidences[:, i], each) for i, each in enumerate(found)], axis=0
        )
        candidates = [Scaling(float(t), float(s)) for t in _TEMPERATURES for s in _SHIFTS]
        last = level.confidences[:, -1]
        errors = [expected_error(above * scale(last, each), level.accepted) for each in candidates]
        # Among candidates as good as the best up to one path, take the one closest to identity.
        limit = min(errors) + 1.0 / len(level.accepted)
        good = [each for each, error in zip(candidates, errors, strict=True) if error <= limit]
        found.append(min(good, key=lambda each: abs(math.log(each.temperature)) + abs(each.shift)))
    return tuple(found)


def calibrated(levels: Sequence[Paths], scalings: Sequence[Scaling]) -> list[Paths]:
    """The same paths with scaled confidences; the last scaling also applies to deeper levels."""
    if not scalings:
        return list(levels)
    return [
        Paths(
            np.stack(
                [
                    scale(level.confidences[:, i], scalings[min(i, len(scalings) - 1)])
                    for i in range(level.confidences.shape[1])
                ],
                axis=1,
            ),
            level.accepted,
        )
        for level in levels
    ]


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Paths:
    """All drafted nodes of one depth.

    Attributes:
        confidences: Of the nodes on each path, from the anchor's child down, ``[n, depth]``.
        accepted: Whether the whole path was accepted, ``[n]``.
    """

    confidences: Floats
    accepted: NDArray[np.bool_]

    @property
    def survival(self) -> Floats:
        """Predicted probability that each path is accepted, ``[n]``."""
        product: Floats = self.confidences.prod(axis=1)
        return product

    @classmethod
    def joined(cls, parts: Sequence[Paths]) -> Paths:
        """The paths of several texts, all of one depth."""
        return cls(
            np.concatenate([part.confidences for part in parts]),
            np.concatenate([part.accepted for part in parts]),
        )


def collect(drafter: Drafter, recording: TargetRecording) -> list[Paths]:
    """The paths of all rounds along a recorded text, by depth."""
    confidences: list[list[list[float]]] = []
    accepted: list[list[bool]] = []
    for tree, following in rounds(drafter, recording):
        for node, path in enumerate(_paths(tree)):
            depth = len(path)
            while len(confidences) < depth:
                confidences.append([])
                accepted.append([])
            confidences[depth - 1].append(path)
            accepted[depth - 1].append(list(tree.path(node)) == following[:depth])
    return [Paths(np.array(c), np.array(a)) for c, a in zip(confidences, accepted, strict=True)]


def _paths(tree: TokenTree) -> list[list[float]]:
    """Confidences from the anchor's child down to each node."""
    paths: list[list[float]] = []
    for parent, confidence in zip(tree.parents, tree.confidences, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else ()), confidence])
    return paths


_PROMPT_TOKENS = (300, 1000)
_MODES = {"greedy": 0.0, "sampled": 1.0}
_HELDOUT_FILES = 12  # as in every training preset
_MIN_TEXTS = 3  # two to fit, one to measure


def run(args: argparse.Namespace) -> int:
    """Calibrate every drafter of `args.drafters`; returns 0 when all files are written."""
    console = Console()
    specs = [DrafterSpec.parse(text) for text in args.drafters]
    drafters = {
        spec.name: method_class(spec.method).load(spec.folder, spec.options, Resources())
        for spec in specs
    }
    layers = {n for drafter in drafters.values() for n in drafter.needs.hidden_state_layers}
    decoder = Decoder.load(args.target, args.dtype)
    texts: dict[str, dict[str, list[list[Paths]]]] = defaultdict(lambda: defaultdict(list))
    for mode, temperature in _MODES.items():
        for index, recording in enumerate(_recordings(args, decoder, layers, temperature)):
            console.log(f"{mode} text {index + 1}, {len(recording.tokens)} tokens")
            for name, drafter in drafters.items():
                texts[name][mode].append(collect(drafter, recording))
    table = Table(title="held-out texts: expected calibration error (area under the ROC curve)")
    for heading in ("drafter", "texts", "paths", "before", "after"):
        table.add_column(heading)
    for spec in specs:
        figures, scalings = _calibrate(texts[spec.name])
        path = _output(args.output, spec)
        counts = {mode: len(each) for mode, each in texts[spec.name].items()}
        calibration = Calibration(spec.method, *(scalings.get(mode, ()) for mode in _MODES))
        calibration.write(path, {"texts": counts, **figures})
        console.log(f"written to {path}")
        for mode, measured in figures.items():
            cells = (_cell(measured["before"]), _cell(measured["after"]))
            table.add_row(spec.name, mode, f"{measured['before']['paths']:,}", *cells)
    console.print(table)
    return 0


def _recordings(
    args: argparse.Namespace, decoder: Decoder, layers: Collection[int], temperature: float
) -> Iterator[TargetRecording]:
    """The recorded texts of a file, or texts written here after held-out files of the corpus."""
    if args.recordings is not None:
        for text in read_recordings(args.recordings):
            if (text.temperature > 0) == (temperature > 0):
                yield replay(decoder, text.prompt, text.tokens, text.sampling, layers)
        return
    for seed, prompt in enumerate(_prompts(args.target, args.data, args.texts)):
        sampling = sampling_pb2.SamplingParams(temperature=temperature, seed=seed)
        yield record(decoder, prompt, args.tokens, sampling, layers)


def _prompts(target: Path, data: str, count: int) -> list[list[int]]:
    """`count` pieces of each length, one after the other from every file that is long enough."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    files = load_corpus(data, 0, _HELDOUT_FILES).heldout
    encoded = [tokenizer.encode(file.text).ids for file in files]
    prompts = []
    for length in _PROMPT_TOKENS:
        long = [ids for ids in encoded if len(ids) >= length]
        for index in range(count if long else 0):
            ids = long[index % len(long)]
            start = (len(ids) - length) * index // max(1, count - 1)
            prompts.append(ids[start : start + length])
    return prompts


def _calibrate(
    modes: Mapping[str, Sequence[list[Paths]]],
) -> tuple[dict[str, Any], dict[str, tuple[Scaling, ...]]]:
    """Scalings by mode, and their figures on every third text, which is not fitted to.

    A mode with fewer than three texts gets no scalings: recorded traffic may hold one mode only.
    """
    figures, scalings = {}, {}
    for mode, texts in modes.items():
        if len(texts) < _MIN_TEXTS:
            continue
        fitted = _by_depth([each for index, each in enumerate(texts) if index % 3 != 2])
        heldout = _by_depth(texts[2::3])
        scalings[mode] = fit(fitted)
        figures[mode] = {
            "fitted_paths": sum(len(level.accepted) for level in fitted),
            "before": _figures(heldout),
            "after": _figures(calibrated(heldout, scalings[mode])),
        }
    return figures, scalings


def _by_depth(texts: Sequence[list[Paths]]) -> list[Paths]:
    return [
        Paths.joined([paths for paths in level if paths is not None])
        for level in zip_longest(*texts)
    ]


def _figures(levels: Sequence[Paths]) -> dict[str, Any]:
    survivals = [level.survival for level in levels]
    outcomes = [level.accepted for level in levels]
    return {
        **_quality(np.concatenate(survivals), np.concatenate(outcomes)),
        "by_depth": [_quality(*each) for each in zip(survivals, outcomes, strict=True)],
    }


def _quality(survival: Floats, accepted: NDArray[np.bool_]) -> dict[str, float]:
    return {
        "paths": len(accepted),
        "expected_calibration_error": expected_error(survival, accepted),
        "area_under_curve": area_under_curve(survival, accepted),
    }


def _output(folder: Path | None, spec: DrafterSpec) -> Path:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{spec.name}.json"
    return spec.folder / FILE if spec.folder is not None else Path(f"{spec.name}-{FILE}")


def _cell(figures: Mapping[str, float]) -> str:
    return f"{figures['expected_calibration_error']:.3f} ({figures['area_under_curve']:.2f})"
