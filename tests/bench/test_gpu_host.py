"""Host time of rounds and drafts with a GPU that is not there."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from paceline.bench.gpu import host
from paceline.drafter.growth.graphs import DraftGraphs


def test_every_case_has_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With few steps. Trees are verified, and drafts are those of graphs."""
    replayed: list[bool] = []
    run = DraftGraphs.run

    def noted(*args: object) -> object:
        found = run(*args)  # type: ignore[arg-type]
        replayed.append(found is not None)
        return found

    monkeypatch.setattr(DraftGraphs, "run", noted)
    monkeypatch.setattr(host, "STEPS", 6)
    monkeypatch.setattr(host, "WARM", 2)
    monkeypatch.setattr(host, "SEQUENCES", (1, 3))
    monkeypatch.setattr(sys, "argv", ["host", "cpu", "0"])
    host.main()
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    found = {name: figures for line in lines for name, figures in line.items()}
    kinds = ("plain", "trees", "longspec", "dspark")
    assert set(found) == {f"{texts} x {kind}" for texts in (1, 3) for kind in kinds}
    for name, figures in found.items():
        times = [value for key, value in figures.items() if key.endswith("_us")]
        assert len(times) == (2 if "nodes" in figures else 4)
        assert min(times) > 0, name
    emitted = [found[f"{texts} x {kind}"]["tokens"] for texts in (1, 3) for kind in kinds[:2]]
    assert emitted == [1, 4, 1, 4]
    assert all(found[f"3 x {kind}"]["nodes"] > 8 for kind in kinds[2:])
    assert replayed == [True] * 4 * host.STEPS
