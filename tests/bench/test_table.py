"""The table: from runs to figures, and the measurement with real services."""

from pathlib import Path

import pytest
import torch
import uvloop
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.bench.baseline import MODES, Transformers
from paceline.bench.models import Models
from paceline.bench.prompts import long_prompts
from paceline.bench.services import Sample
from paceline.bench.table.measure import measure
from paceline.bench.table.rows import PLAIN, Turn, decode_rate, summary
from paceline.client import RoundStats, Stats

DEMO = Path(__file__).parents[2] / "models" / "demo"
NGRAM = "paceline ngram"


def sample(*rounds: tuple[int, int, float], tokens: list[int] | None = None) -> Sample:
    """Of rounds (drafted, emitted, ms), after a first token that took 10 ms."""
    stats = Stats(first_token_ms=10.0, total_ms=10.0 + sum(ms for _, _, ms in rounds))
    for drafted, emitted, ms in rounds:
        stats.add(RoundStats(drafted, emitted - 1, emitted, ms, 1.0, 2.0, 0.0))
    count = 1 + sum(emitted for _, emitted, _ in rounds)
    return Sample(tokens or [*range(count)], stats.total_ms / 1e3, stats)


def test_the_round_in_which_a_drafter_reads_the_prompt_is_left_out() -> None:
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
    cell = summary(turns)
    row = cell["rows"][NGRAM]
    assert (cell["runs"], cell["identical"]) == (3, True)
    assert (row["against_none"], row["against_transformers"]) == (2.0, 6.0)
    assert row["against_transformers_best"] == 3.0
    assert row["always"] == pytest.approx(400.0 / 30.0)
    assert row["accepted_length"] == 3.0
    assert "accepted_length" not in cell["rows"][PLAIN]
    turns[1].always[NGRAM] = sample((4, 6, 1.0), tokens=[7] * 7)
    assert not summary(turns)["identical"]


@pytest.mark.slow
def test_all_rows_write_after_the_same_prefilled_prompt(tmp_path: Path) -> None:
    for name in ("lm", "dspark"):
        (tmp_path / name).symlink_to(DEMO / name)
    models = Models(tmp_path, DEMO / "target")
    prompts = long_prompts(DEMO / "prompts", models.target, 116, 1)
    measuring = measure(
        models, prompts, dtype="bfloat16", tokens=12, repeats=1, progress=lambda _: None
    )
    cells = uvloop.run(measuring)
    assert list(cells) == [0.0, 1.0]
    for cell in cells.values():
        assert cell["identical"]
        names = ("ngram", "lm", "dspark", "selfspec")
        assert list(cell["rows"]) == [*MODES, PLAIN, *(f"paceline {name}" for name in names)]
        assert all(row["tokens_per_second"] > 0 for row in cell["rows"].values())
        assert 1 <= cell["rows"]["paceline dspark"]["accepted_length"] <= 7


def test_transformers_continues_from_given_kv(tmp_path: Path) -> None:
    """Its assisted generation would read the prompt twice."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    for name in ("target", "small"):
        config = LlamaConfig(**shape, num_attention_heads=2, eos_token_id=None)
        LlamaForCausalLM(config).save_pretrained(tmp_path / name)
    models = Transformers(tmp_path / "target", tmp_path / "small", "float32")
    prompt = [*range(1, 30)] * 2
    cache, _ = models.prefill(prompt)
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "target")
    written = plain.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    expected = written[0, len(prompt) :].tolist()
    for mode in models.modes():
        output, rate = models.decode(mode, prompt, cache, 12, temperature=0.0, seed=0)
        assert output == expected
        assert rate > 0
        assert cache.get_seq_length() == len(prompt) - 1
    assert len(models.decode(MODES[2], prompt, cache, 12, temperature=1.0, seed=0)[0]) == 12
