"""The settings that are measured, the choice, and the output."""

import io
import tomllib
from collections.abc import Mapping

from rich.console import Console

from paceline.cli.tune import (
    DEPTHS,
    NEIGHBOURS,
    RATIOS,
    TREES,
    TuningRun,
    to_table,
    to_toml,
    tune,
)


def machine(plain: float) -> tuple[list[dict[str, str]], object]:
    """Accepted lengths level off at a ratio of 0.07; time grows with ratio and drafted tokens."""
    measured: list[dict[str, str]] = []

    async def measure(options: Mapping[str, str]) -> TuningRun:
        measured.append(dict(options))
        if "widths" in options:
            return TuningRun(dict(options), 3.0, 100.0 - abs(int(options["max_nodes"]) - 12))
        ratio, depth = float(options["ratio"]), int(options["depth"])
        chance = 0.8 * min(1.0, ratio / 0.07)
        length = sum(chance**n for n in range(depth + 1))
        return TuningRun(dict(options), length, plain * length / (1 + depth * (0.1 + ratio)))

    return measured, measure


async def test_a_chain_is_tuned_in_three_steps() -> None:
    measured, measure = machine(50.0)
    first, second, third = await tune("selfspec", measure)  # type: ignore[arg-type]
    assert [t.options["ratio"] for t in first.runs] == [f"{ratio:.3g}" for ratio in RATIOS]
    assert {t.options["depth"] for t in first.runs} == {str(max(DEPTHS))}
    assert first.chosen.options["ratio"] == "0.07", "the least at which more brings nothing"
    assert [int(t.options["depth"]) for t in second.runs] == list(DEPTHS)
    assert {t.options["ratio"] for t in second.runs} == {"0.07"}
    speeds = [t.tokens_per_second for t in second.runs]
    assert second.chosen.tokens_per_second == max(speeds)
    assert speeds.index(max(speeds)) not in (0, len(speeds) - 1)
    assert {t.options["depth"] for t in third.runs} == {second.chosen.options["depth"]}
    assert third.chosen.tokens_per_second >= second.chosen.tokens_per_second
    assert len(measured) == len(RATIOS) + len(DEPTHS) + len(NEIGHBOURS)


async def test_trees_are_tuned_by_their_shape() -> None:
    measured, measure = machine(50.0)
    for method in ("longspec", "lm"):
        (step,) = await tune(method, measure)  # type: ignore[arg-type]
        assert step.chosen.options == {"widths": "8,8,8", "max_nodes": "12"}
    assert len(measured) == 2 * len(TREES)


async def test_what_is_written() -> None:
    _, measure = machine(50.0)
    steps = await tune("selfspec", measure)  # type: ignore[arg-type]
    load = 'a=selfspec:/x "y",depth=3'
    text = to_toml({"target": "/t", "share-weights": True}, load, steps, 50.0)
    assert tomllib.loads(text) == {
        "verifier": {"target": "/t", "share-weights": True},
        "drafter": {"load": [load]},
    }
    assert "does not pay" not in text
    assert "does not pay" in to_toml({}, load, steps, 1e6)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(*(to_table(step, 50.0) for step in steps))
    page = console.export_text()
    assert page.count("chosen") == 3
    assert f"{steps[-1].chosen.tokens_per_second:.1f}" in page
