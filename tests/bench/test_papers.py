"""`paceline bench papers`, with the smallest limits, and replays of recorded rounds."""

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch

from paceline.bench import experiment as harness
from paceline.bench import papers
from paceline.bench.cli import add_arguments
from paceline.bench.experiment import estimate, figures, samples
from paceline.bench.papers import EXPERIMENTS, BudgetDrafter, run
from paceline.bench.replay.run import judge
from paceline.bench.replay.simulation import Simulation
from paceline.bench.replay.traces import Replay, Round, Text, Traces
from paceline.bench.table.engines import Answer, AnswerRequest
from paceline.client import RoundStats, Stats
from paceline.drafter.methods.base import Budget, GenerationInfo, Update
from paceline.drafter.methods.lm import LmDrafter
from paceline.kernels import AttentionCall, Proposal, QueryBlock, plan_trees
from paceline.sampling import Sampling
from paceline.train.acceptance import TargetRecording, record
from paceline.tree import TokenTree as Tree
from paceline.tree import accepted_tokens

_DEMO = Path("models/demo")
_CODE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n"
_LIMITS = "--weights bfloat16 --texts 2 --tokens 16 --contexts 96"
_OPTIONS = {
    "table": "--speed",
    "attention": "--rows 3",
    "dspark": "--temperature 1",
    "load": "--users 2",
    "selection": "--ratios 0.3 --contexts 1100 --texts 1",
    "budget": "--budgets 16,64 --policies chunk_topk streaming",
    "triforce": "--budgets 16 --ratios 0.5",
}  # the smallest sizes
_FEW_ARMS = {
    "table": f"--drafter dspark=dspark:{_DEMO}/dspark,target={_DEMO}/target --drafter n=ngram "
    "--drafter r=recycle",
    "selection": "--policies streaming verified quest",
}


class Services:
    """Answers at once, as services would."""

    def __init__(self, _target: Path, _weights: str, specs: Any, **more: Any) -> None:
        always = more.get("always")
        self.modes = [f"{each} always" for each in specs] if always else ["none", *specs]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def answer(self, mode: str, request: AnswerRequest) -> Answer:
        reads, drafts = (RoundStats(3, 1, 2, ms, 2.0, 6.0, 0.0, 3) for ms in (900.0, 9.0))
        plain = RoundStats(0, 0, 2, 9.0, 0.0, 6.0, 0.0)
        rounds = [plain, reads, drafts, drafts] if "none" not in mode else [plain, plain]
        return Answer(request.tokens, 1.0, 2.0, 0.1, "", Stats(rounds))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_experiment_has_figures_of_every_arm(
    experiment: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its smallest size; `make papers-quick` has all arms, and services."""
    if not whole:
        monkeypatch.setattr(papers, "PacelineServices", Services)
    monkeypatch.setattr(harness, "cache_file", lambda kind, facts: tmp_path / f"{hash(facts)}.json")
    monkeypatch.setattr(sys, "argv", ["paceline", "bench", "papers", experiment])
    texts = tmp_path / "mine.jsonl"
    texts.write_text(f"{json.dumps({'text': _CODE})}\n" * 3)
    file = tmp_path / "found.json"
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["papers", experiment, "--models", _DEMO, "--prompts", texts, "--output", file]
    words += [*_LIMITS.split(), *_OPTIONS[experiment].split()]
    words += [] if whole else _FEW_ARMS.get(experiment, "").split()
    assert run(parser.parse_args([str(word) for word in words])) == 0
    results = json.loads(file.read_text())["results"]
    assert results
    for entry in results.values():
        assert entry["command"] == f"paceline bench papers {experiment}"
        assert entry["texts"] >= 1
        ends = [
            ends
            for kind in (entry["arms"], entry["over"])
            for measures in kind.values()
            for line in measures.values()
            for ends in line.values()
        ]
        assert ends
        if experiment == "triforce":
            stack = "TriForce, 16, 0.5"
            assert 1 <= entry["arms"][stack]["accepted length for sparse KV"]["96"][1] <= 6
            speeds = {
                arm: figures["tokens/s, calculated"]["96"][1]
                for arm, figures in entry["arms"].items() if arm != stack
            }  # fmt: skip
            assert max(speeds, key=speeds.__getitem__) == next(iter(entry["arms"]))
            assert entry["over"][stack]["tokens/s, calculated"]["96"]
        assert all(low <= value <= high for low, value, high in ends)
    # The same command measures nothing again.
    monkeypatch.setattr(harness, "figures", None)
    assert run(parser.parse_args([str(word) for word in words])) == 0


def test_a_document_is_read_once_for_all_contexts_and_budgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the texts and the drafts of prompts that are read each time."""
    monkeypatch.setattr(harness, "cache_file", lambda kind, facts: tmp_path / f"{hash(facts)}.json")
    (texts := tmp_path / "mine.jsonl").write_text(json.dumps({"text": _CODE * 9}))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = f"papers budget --weights int8 --tokens 24 --contexts 80,300 --prompts {texts}"
    bench = harness.Bench(parser.parse_args([*words.split(), "--output", str(tmp_path / "r.json")]))
    drafter = BudgetDrafter.of(f"lm:{_DEMO}/lm")
    for length, text in bench.continued(0).items():
        alone = record(bench.target, text.tokens[:length], 24)
        assert text.tokens == alone.tokens
        for policy, budget in (("chunk_topk", 32), ("streaming", 64), ("chunk_topk", 0)):
            drafter.under(policy, budget)
            own = BudgetDrafter.of(f"lm:{_DEMO}/lm")
            own.under(policy, budget)
            monkeypatch.setattr(own, "start", partial(LmDrafter.start, own))
            paths = ([each.tree for each in bench.path(one, text)] for one in (drafter, own))
            assert next(paths) == next(paths)
        assert length <= drafter.kv_slots < 2 * length + 512, "of the prompt that was read"


def test_a_small_model_drafts_for_the_chains_of_another_as_for_a_text() -> None:
    """As a sequence of its own does that reads the prompt, the text and the chain so far."""
    torch.manual_seed(0)
    drafter = BudgetDrafter.of(f"lm:{_DEMO}/lm")
    drafter.under("chunk_topk", 24)
    prompt = torch.randint(300, 3000, (90,)).tolist()
    whole = Budget(drafter.max_nodes, drafter.max_depth)

    def behind(tokens: list[int]) -> tuple[int, ...]:
        fresh = drafter.start(GenerationInfo(prompt, 89, 1 << 20, Sampling()))
        first = fresh.draft(whole)
        if tokens:
            fresh.extend(Update(tokens, committed_length=90))
        return (fresh.draft(whole) if tokens else first).tokens

    sequence = drafter.start(GenerationInfo(prompt, 89, 1 << 20, Sampling()))
    sequence.begin_round()
    text: list[int] = []
    for wrong in (0, 2, 5, 9):
        chain, expected, done = list(behind(text)), 0, 0
        chain += behind([*text, *chain])
        chain[min(wrong, len(chain) - 1)] += 1
        while done < len(chain):
            tree = Tree.chain(behind([*text, *chain[:done]]), [1.0] * 5)
            done += accepted_tokens(tree, chain[done:]) + 1
            expected += 1
        assert drafter.rounds_for(sequence, tuple(chain)) == expected
        emitted = chain[: wrong + 1]
        sequence.extend(Update(emitted, committed_length=90))
        sequence.warm(len(emitted))
        text += emitted
    assert sequence.draft(whole).tokens == behind(text)
    sequence.close()


@pytest.mark.parametrize("budget", [10, 40, 60, 999])
def test_quest_reads_the_pages_whose_keys_may_score_highest(budget: int) -> None:
    """Of each row and KV head by itself, and the newest page, which is not whole."""
    torch.manual_seed(0)
    start, rows, heads, group = 101, 3, 2, 2
    q, keys = torch.randn(heads, group, rows, 8), torch.randn(heads, start + rows, 8)
    block = QueryBlock(0, start, None, rows)
    packed = q.permute(2, 0, 1, 3).reshape(rows, -1, 8)
    call = AttentionCall(packed, [keys], [keys], plan_trees([block]), 1.0, None, packed)
    hidden = harness._QuestKernels(lambda length: budget).hidden(call, 0, q, keys)
    shown = ~hidden.expand(heads, group, rows, start + rows)
    assert shown[..., 96:start].all()
    assert shown[..., start:].equal(torch.ones(rows, rows).tril().bool().expand(2, 2, rows, rows))
    pages = shown[..., :96].unflatten(3, (6, 16))
    assert (pages.all(-1) == pages.any(-1)).all()
    read = pages.any(-1)
    assert (read.sum(-1) == min(6, (budget - 5) // 16)).all()
    side = keys[:, None, None, :96].unflatten(3, (6, 16)) * q.unsqueeze(3).unsqueeze(3)
    bounds = side.amax(4).sum(-1).sum(1, keepdim=True).expand_as(read)
    best = torch.where(read, bounds, torch.inf).amin(-1)
    assert (best >= torch.where(read, -torch.inf, bounds).amax(-1)).all()


def test_intervals_are_of_ratios_over_texts_and_arms_are_paired() -> None:
    short = [(2.0, 1.0), (30.0, 10.0), (12.0, 6.0)]
    low, value, high = estimate(short)
    assert value == round(44 / 17, 3)
    assert 2.0 <= low <= value <= high <= 3.0
    twice = [(2 * above, below) for above, below in short]
    assert estimate(twice, short) == [2.0, 2.0, 2.0]
    found = figures({"one": {"m": {1.0: short, 2.0: [(0, 0)]}}, "two": {"m": {1.0: twice}}})
    assert found["over"] == {"two": {"m": {"1": [2.0, 2.0, 2.0]}}}
    assert list(found["arms"]["one"]["m"]) == ["1"]


def test_calibration_is_of_tokens_that_are_reached() -> None:
    found = samples()
    paths = ([((0.9, 0.9, 0.5), 1), ((0.2,), 0), ((0.2,), 1)], [((0.95, 0.1), 1)])
    texts = [
        np.concatenate([
            papers._outcomes(harness.Round(Tree.chain([0] * len(said), said), accepted, 0.0))
            for said, accepted in rounds
        ])
        for rounds in paths
    ]  # fmt: skip
    papers._calibrate(found["drafter"], texts)
    arm = figures(found)["arms"]["drafter"]
    values = {name: {x: ends[1] for x, ends in line.items()} for name, line in arm.items()}
    assert values == {
        "acceptance by confidence": {"0.1": 0.0, "0.2": 0.5, "0.9": 0.667},
        "mean confidence by confidence": {"0.1": 0.1, "0.2": 0.2, "0.9": 0.917},
        "ECE": {"0": 0.242},  # (0.1 + 2 * 0.3 + 3 * 0.25) / 6
        "AUC within texts": {"0": 0.6},  # (1 + 1 / 2 + 0 + 1 / 2 + 1) / 5
    }


def test_rejection_sampling_is_judged_by_its_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2]] * 3), Proposal.checked([0, 2], [0.25, 0.75])
    chain = replace(Tree.chain([2, 0], [0.6, 0.7]), proposals=(q, q))
    text = TargetRecording([], 0, 3, Sampling(temperature=2.0, seed=1), None)  # type: ignore[arg-type]
    monkeypatch.setattr(harness, "_run_tree", lambda *_: 2 * p.log())
    chances = harness._chances(None, text, 1, chain)  # type: ignore[arg-type]
    assert chances == (pytest.approx((0.45, 0.2 / 0.75)), pytest.approx((0.45, 1.0)))
    rows = papers._outcomes(harness.Round(chain, 0, 0.0, chances))
    assert rows == pytest.approx(np.array([[0.6, 0.45, 1.0], [0.7, 0.45, 0.2 / 0.75]]))


STEP, DRAFT, LARGER = 2e-3, 5e-4, 3e-3
TABLE = {"tokens": (1, 5, 512), "seconds": (STEP, LARGER, 0.2)}


def traces(accepted: int, drafter: str = "some", tokens: int = 60) -> Traces:
    """Texts in which a chain of four nodes is accepted so far in every round.

    The verifier's own sources learn their confidences where trees are made; of a drafter's the
    scheduler learns what they are worth.
    """
    chance = 0.8 if accepted or drafter != "local" else 0.02
    plain = Text("chat", 30, [Round(1, 0.0, STEP)] * tokens)
    one = Round(accepted + 1, DRAFT, LARGER, (-1, 0, 1, 2), (chance,) * 4, tuple(range(accepted)))
    return Traces(
        drafter, TABLE, [plain] * 20, [Text("chat", 30, [one] * (tokens // (accepted + 1)))] * 20
    )


def test_a_tree_in_every_round_takes_what_was_recorded() -> None:
    recorded = traces(3)
    spent = Simulation(Replay(recorded, range(20)), 1, "always").run()
    per_round = {round(seconds / (tokens / 4), 6) for tokens, seconds in spent.values()}
    assert per_round == {round(DRAFT + LARGER, 6)}
    plain = Simulation(Replay(recorded, range(20)), 1, "plain").run()
    assert {round(seconds / tokens, 6) for tokens, seconds in plain.values()} == {STEP}


@pytest.mark.parametrize(("accepted", "better"), [(3, "always"), (0, "plain")])
@pytest.mark.parametrize("drafter", ["some", "local"])
def test_rules_are_compared_with_the_better_of_both(
    accepted: int, better: str, drafter: str
) -> None:
    figures = judge(traces(accepted, drafter), 1)["chat"]
    assert (figures["always"] > 1) == (better == "always")
    assert figures["over better"] == pytest.approx(
        figures["scheduled"] / max(1.0, figures["always"]), abs=2e-3
    )
    assert figures["over better"] > 0.9


def test_traces_come_back_from_their_file(tmp_path: Path) -> None:
    recorded = traces(2)
    recorded.save(tmp_path / "some.json.gz")
    again = Traces.load(tmp_path / "some.json.gz")
    assert judge(again, 1) == judge(recorded, 1)
    assert again.drafted[0].tokens == recorded.drafted[0].tokens
