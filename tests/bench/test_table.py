"""The results table: from runs to figures, and runs that go on where they were interrupted."""

import argparse
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.bench.baseline import MODES, Transformers
from paceline.bench.record import Book
from paceline.bench.served import Sample
from paceline.bench.setting import Bench
from paceline.bench.table.cells import PLAIN, Turn, decode_rate, described
from paceline.bench.table.groups import DEMO, FILES, Group, Models, groups, prompts
from paceline.bench.table.measure import measure
from paceline.bench.table.run import run
from paceline.bench.texts import packaged
from paceline.client import RoundStats, Stats

MODELS = Path(__file__).resolve().parents[2] / "models" / "demo"
NGRAM = "paceline ngram"


def sample(*rounds: tuple[int, int, float], tokens: list[int] | None = None) -> Sample:
    """Of rounds (drafted, emitted, ms), after a first token that took 10 ms."""
    stats = Stats(first_token_ms=10.0, total_ms=10.0 + sum(ms for _, _, ms in rounds))
    for drafted, emitted, ms in rounds:
        stats.add(RoundStats(drafted, emitted - 1, emitted, ms, 1.0, 2.0, 0.0))
    count = 1 + sum(emitted for _, emitted, _ in rounds)
    return Sample(tokens or [*range(count)], stats.total_ms / 1e3, stats)


def test_the_round_in_which_a_drafter_reads_the_prompt_is_no_decoding() -> None:
    assert decode_rate(sample((4, 2, 100.0), (4, 3, 10.0), (4, 1, 10.0))) == pytest.approx(200.0)
    assert decode_rate(sample((0, 8, 40.0))) == pytest.approx(200.0), "plain steps draft nothing"


def test_rows_are_medians_of_ratios_within_a_turn() -> None:
    turns = []
    for speed in (1.0, 2.0, 4.0):  # of the machine, which drifts
        rates = dict(zip(MODES, (10.0, 20.0, 5.0), strict=True)) | {PLAIN: 30.0, NGRAM: 60.0}
        drafted = sample((4, 2, 50.0), (4, 4, 10.0 / speed))
        turns.append(
            Turn(
                {name: rate * speed for name, rate in rates.items()},
                {PLAIN: sample((0, 6, 1.0)), NGRAM: drafted},
                {NGRAM: drafted},
            )
        )
    cell = described(turns)
    row = cell["rows"][NGRAM]
    assert (cell["runs"], cell["identical"]) == (3, True)
    assert (row["against_none"], row["against_transformers"]) == (2.0, 6.0)
    assert row["against_transformers_best"] == 3.0
    assert row["always"] == pytest.approx(400.0 / 30.0)
    assert (row["accepted_length"], row["accepted_length_without_bonus"]) == (3.0, 2.0)
    assert "accepted_length" not in cell["rows"][PLAIN]
    turns[1].always[NGRAM] = sample((4, 6, 1.0), tokens=[7] * 7)
    assert not described(turns)["identical"]


def test_prompts_leave_room_for_the_text(tmp_path: Path) -> None:
    long = prompts(Group(DEMO, FILES, 1024, 2, 1), MODELS, None, (), 64)
    assert [len(ids) for ids in long] == [960, 960]
    assert long[0] != long[1]
    file = tmp_path / "talk.jsonl"
    lines = [
        {"turns": ["def first():", "no"]},
        {"question": "a second one"},
        {"turns": ["def third():"]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    [own, *_] = groups(FILES, [file])
    assert (own.set, own.context) == ("talk", 0)
    assert len(prompts(own, MODELS, None, [file], 64)) == 3
    [piece] = packaged(MODELS, "paceline.bench", 200, 1)
    assert len(piece) == 200
    with pytest.raises(ValueError, match="no installed package"):
        packaged(MODELS, "no_such_package_here", 200, 1)


def bench(folder: Path, **more: Any) -> Bench:
    args = {"prompts": [], "package": None, "set": None, "tokens": None, "repeats": None}
    rest = {"texts": 1, "dtype": "bfloat16", "models": MODELS, "longspec": None}
    head = {"machine": {"kind": "cpu"}, "dtype": "bfloat16", "longspec": "ab", "dspark": "ef"}
    book = Book(folder / "table.json", head)
    console = Console(file=io.StringIO())
    return Bench(argparse.Namespace(**args | rest | more), folder, console, book)


def test_an_interrupted_run_goes_on_and_a_finished_one_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    async def pretend(group: Group, *_: object, **__: object) -> list[dict[str, Any]]:
        if len(measured) == 2 and group.name not in measured:
            measured.append("stopped")
            raise KeyboardInterrupt
        measured.append(group.name)
        return [{"group": group.name}]

    monkeypatch.setitem(run.__globals__, "measure", pretend)
    monkeypatch.setitem(run.__globals__, "fitted", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        run(bench(tmp_path))
    found = run(bench(tmp_path))
    assert found is not None
    names = [group.name for group in groups(FILES, [])]
    assert [cell["group"] for cell in found["cells"]] == names
    assert found["complete"]
    assert measured == [*names[:2], "stopped", *names[2:]]
    bench(tmp_path).book.add("table", found)
    run(bench(tmp_path))
    assert measured[-len(names) :] == names, "a finished run is not taken for its rest"
    bench(tmp_path).book.add("table", found)
    again = run(bench(tmp_path, set=[names[1]]))
    assert again is not None
    assert sorted(cell["group"] for cell in again["cells"]) == sorted(names)
    assert measured[-1] == names[1], "one group alone, and the others kept"


@pytest.mark.slow
def test_everybody_writes_after_the_same_prefilled_prompt(tmp_path: Path) -> None:
    target = MODELS / "target"
    dspark = f"dspark:{MODELS / 'dspark'},target={target}"
    group = Group(DEMO, FILES, 128, 1, 1)
    measuring = measure(
        group,
        Models(target, MODELS / "lm", {"ngram": "ngram", "dspark": dspark}),
        prompts(group, MODELS, None, (), 12),
        dtype="bfloat16",
        tokens=12,
        progress=lambda _: None,
    )
    greedy, sampled = uvloop.run(measuring)
    assert [greedy["temperature"], sampled["temperature"]] == [0.0, 1.0]
    for cell in (greedy, sampled):
        assert cell["identical"]
        assert list(cell["rows"]) == [*MODES, PLAIN, NGRAM, "paceline dspark"]
        assert all(row["tokens_per_second"] > 0 for row in cell["rows"].values())
        assert 1 <= cell["rows"]["paceline dspark"]["accepted_length"] <= 7


def test_transformers_goes_on_from_given_kv(tmp_path: Path) -> None:
    """Its assisted modes would read the prompt twice."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    for name in ("target", "small"):
        config = LlamaConfig(**shape, num_attention_heads=2, eos_token_id=None)
        LlamaForCausalLM(config).save_pretrained(tmp_path / name)
    models = Transformers(tmp_path / "target", tmp_path / "small", "float32")
    prompt = [*range(1, 30)] * 2
    cache, _ = models.prefill(prompt)
    for mode in models.modes():
        expected, _ = models.generate(mode, prompt, 12)
        output, rate = models.decode(mode, prompt, cache, 12, temperature=0.0, seed=0)
        assert output == expected
        assert rate > 0
        assert cache.get_seq_length() == len(prompt) - 1
    assert len(models.decode(MODES[2], prompt, cache, 12, temperature=1.0, seed=0)[0]) == 12
