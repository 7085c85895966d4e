"""`paceline calibrate`: record, fit, measure on texts that were not fitted to, write."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.bench import machine, texts
from paceline.bench.acceptance import load_drafters
from paceline.bench.calibration.fit import (
    area_under_curve,
    calibrated,
    expected_error,
    fit,
    reliability,
)
from paceline.bench.calibration.picture import diagram
from paceline.bench.calibration.samples import Paths, collect
from paceline.decoder import Decoder
from paceline.drafter import Drafter, DrafterSpec
from paceline.drafter.acceptance import Recording, record, replay
from paceline.drafter.calibration import FILE, Calibration, Scaling
from paceline.drafter.recordings import read_recordings
from paceline.v1 import sampling_pb2

_CONTEXTS = (300, 1000)
_MODES = {"greedy": 0.0, "sampled": 1.0}
_FEWEST = 3  # texts: two to fit to, one to measure on


def run(args: argparse.Namespace) -> int:
    """Calibrate every drafter of `args.drafters`; 0 when all are written."""
    console = Console()
    specs = {DrafterSpec.parse(text).name: text for text in args.drafters}
    drafters = load_drafters(specs)
    layers = {n for drafter in drafters.values() for n in drafter.needs.hidden_state_layers}
    decoder = Decoder.load(args.target, args.dtype)
    rounds: dict[str, dict[str, list[list[Paths]]]] = {}
    for mode, heat in _MODES.items():
        for index, recording in enumerate(_recordings(args, decoder, layers, heat)):
            console.log(f"{mode} text {index + 1}, {len(recording.tokens)} tokens")
            for name, drafter in drafters.items():
                found = collect(drafter, [recording])
                rounds.setdefault(name, {}).setdefault(mode, []).append(found)
    results: dict[str, Any] = {"machine": machine.describe(), "dtype": args.dtype, "drafters": {}}
    for name, drafter in drafters.items():
        figures, scalings = _calibrate(rounds[name])
        path = _output(args, name, DrafterSpec.parse(specs[name]))
        notes = {"texts": {mode: len(each) for mode, each in rounds[name].items()}, **figures}
        _write(path, drafter, scalings, notes)
        results["drafters"][name] = figures
        console.log(f"written to {path}")
        if args.pictures is not None:
            args.pictures.mkdir(parents=True, exist_ok=True)
            _draw(args.pictures / f"reliability-{name}.svg", rounds[name], scalings)
    if args.results is not None:
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text(json.dumps(_with_earlier(results, args.results), indent=1) + "\n")
    console.print(_table(results["drafters"]))
    return 0


def _with_earlier(results: dict[str, Any], path: Path) -> dict[str, Any]:
    """With the drafters that the file has of the same machine and type."""
    if not path.exists():
        return results
    earlier = json.loads(path.read_text())
    if any(earlier.get(key) != results[key] for key in ("machine", "dtype")):
        return results
    return {**results, "drafters": {**earlier["drafters"], **results["drafters"]}}


def _recordings(
    args: argparse.Namespace, decoder: Decoder, layers: set[int], heat: float
) -> list[Recording]:
    """Texts of the target's own: those of a file, or written here after held-out prompts."""
    if args.recordings is not None:
        return [
            replay(decoder, each.prompt, each.tokens, each.sampling, layers)
            for each in read_recordings(args.recordings)
            if (each.temperature > 0) == (heat > 0)
        ]
    prompts = texts.load(args.models, args.texts, _CONTEXTS, ["heldout"])
    return [
        record(
            decoder,
            prompt.tokens,
            args.tokens,
            sampling_pb2.SamplingParams(temperature=heat, seed=seed),
            layers,
        )
        for seed, prompt in enumerate(prompts)
    ]


def _calibrate(
    modes: Mapping[str, Sequence[list[Paths]]],
) -> tuple[dict[str, Any], dict[str, tuple[Scaling, ...]]]:
    """Figures by mode, on every third text, and scalings fitted to the others.

    A mode with fewer than three texts is left as it is: recorded traffic may hold one mode only.
    """
    figures, scalings = {}, {}
    for mode, by_text in modes.items():
        if len(by_text) < _FEWEST:
            continue
        fitted, heldout = _split(by_text)
        alone = fit(fitted, shifts=False)
        scalings[mode] = fit(fitted)
        figures[mode] = {
            "fitted_paths": sum(len(level.stood) for level in fitted),
            "before": _figures(heldout),
            "temperatures_alone": _figures(calibrated(heldout, alone)),
            "after": _figures(calibrated(heldout, scalings[mode])),
        }
    return figures, scalings


def _split(by_text: Sequence[list[Paths]]) -> tuple[list[Paths], list[Paths]]:
    heldout = [each for index, each in enumerate(by_text) if index % 3 == 2]
    fitted = [each for index, each in enumerate(by_text) if index % 3 != 2]
    return _joined(fitted), _joined(heldout)


def _joined(parts: Sequence[list[Paths]]) -> list[Paths]:
    depth = max((len(part) for part in parts), default=0)
    levels = [[part[i] for part in parts if i < len(part)] for i in range(depth)]
    return [
        Paths(
            np.concatenate([each.confidences for each in level]),
            np.concatenate([each.stood for each in level]),
        )
        for level in levels
    ]


def _figures(levels: Sequence[Paths]) -> dict[str, Any]:
    survival = np.concatenate([level.survival for level in levels])
    stood = np.concatenate([level.stood for level in levels])
    return {
        "paths": len(stood),
        "expected_calibration_error": expected_error(survival, stood),
        "area_under_curve": area_under_curve(survival, stood),
        "by_depth": [
            {
                "paths": len(level.stood),
                "expected_calibration_error": expected_error(level.survival, level.stood),
                "area_under_curve": area_under_curve(level.survival, level.stood),
            }
            for level in levels
        ],
    }


def _output(args: argparse.Namespace, name: str, spec: DrafterSpec) -> Path:
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        return Path(args.output) / f"{name}.json"
    return spec.folder / FILE if spec.folder is not None else Path(f"{name}-{FILE}")


def _write(
    path: Path, drafter: Drafter, scalings: Mapping[str, tuple[Scaling, ...]], notes: Any
) -> None:
    greedy, sampled = (scalings.get(mode, ()) for mode in _MODES)
    Calibration(drafter.method, greedy, sampled).write(path, notes)


def _draw(
    path: Path,
    modes: Mapping[str, Sequence[list[Paths]]],
    scalings: Mapping[str, tuple[Scaling, ...]],
) -> None:
    panels = {}
    for mode, by_text in modes.items():
        if mode not in scalings:
            continue
        _, heldout = _split(by_text)
        curves = {"before": heldout, "after": calibrated(heldout, scalings[mode])}
        panels[mode] = {
            name: reliability(
                np.concatenate([level.survival for level in levels]),
                np.concatenate([level.stood for level in levels]),
            )
            for name, levels in curves.items()
        }
    path.write_text(diagram(panels), encoding="utf-8")


def _table(drafters: Mapping[str, Any]) -> Table:
    table = Table(title="held-out texts: expected calibration error (area under the curve)")
    for heading in ("drafter", "texts", "paths", "before", "temperatures alone", "after"):
        table.add_column(heading)
    for name, modes in drafters.items():
        for mode, figures in modes.items():
            cells = [
                f"{figures[key]['expected_calibration_error']:.3f} "
                f"({figures[key]['area_under_curve']:.2f})"
                for key in ("before", "temperatures_alone", "after")
            ]
            table.add_row(name, mode, f"{figures['before']['paths']:,}", *cells)
    return table
