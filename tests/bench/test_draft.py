"""Rounds of verifier and LongSpec drafter in one process."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from paceline.bench import draft, report
from paceline.bench.prompts import Prompt
from paceline.bench.rounds import continued
from paceline.decoder import Decoder
from paceline.drafter.acceptance import record
from paceline.drafter.methods.base import Resources
from paceline.drafter.methods.longspec import (
    LongSpecConfig,
    LongSpecModel,
    TargetRef,
    save_longspec,
)
from paceline.drafter.methods.longspec.drafter import LongSpecDrafter
from paceline.v1 import sampling_pb2

TARGET = Path(__file__).resolve().parents[2] / "models" / "demo" / "target"


@pytest.fixture(scope="module")
def random_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft") / "drafter"
    config = LongSpecConfig.for_target(TARGET)
    torch.manual_seed(0)
    weights = LongSpecModel(config).state_dict()
    save_longspec(folder, config, weights, TargetRef.of(TARGET))
    return folder


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_write_what_plain_steps_write(random_drafter: Path, temperature: float) -> None:
    target = Decoder.load(TARGET)
    drafter = LongSpecDrafter.load(random_drafter, {"target": str(TARGET)}, Resources())
    sampling = sampling_pb2.SamplingParams(temperature=temperature, seed=5)
    prompt = torch.arange(300).tolist()
    tokens, rounds = continued(target, drafter, prompt, 20, sampling)
    assert len(tokens) >= 20
    assert len(tokens) == 1 + sum(r.emitted for r in rounds)
    assert tokens == record(target, prompt, len(tokens), sampling).continuation
    assert all(r.nodes > 0 and min(r.draft_ms, r.target_ms, r.settle_ms) > 0 for r in rounds)


def test_tables_have_a_row_for_every_context_and_tree(random_drafter: Path, tmp_path: Path) -> None:
    """Contexts beyond the one that either model says it has, too."""
    contexts, trees = (300, 4500), (("1", 1), ("2,2", 3))
    by_context = draft.by_context(
        TARGET, random_drafter, tmp_path, "bfloat16", contexts=contexts, repeats=1
    )
    assert tuple(row["context"] for row in by_context) == contexts
    assert all(row["nodes"] > 4 for row in by_context)
    prompts = [Prompt("heldout", "a", [5, 6, 7]), Prompt("trained", "b", [8, 9])]
    by_tree = draft.by_tree(TARGET, random_drafter, prompts, "bfloat16", tokens=4, trees=trees)
    assert len(by_tree) == 2 * len(prompts) * len(trees)
    assert all(row["nodes"] <= row["max_nodes"] for row in by_tree)
    screen = io.StringIO()
    figures = {"threads": 2, "by_context": by_context, "by_tree": by_tree}
    report.show({"draft": figures}, Console(file=screen, width=160))
    shown = screen.getvalue()
    assert "4,500" in shown
    assert shown.count("2,2") == 2 * len(prompts)
