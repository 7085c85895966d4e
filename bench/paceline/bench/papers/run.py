"""`paceline bench papers`: what the papers measured, on a target of one's own.

An experiment is a function here; it has cells, which a result file keeps. Cells that the file has
are not measured again, so the same command goes on where an earlier one stopped.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from paceline.bench.papers.attention import attention
from paceline.bench.papers.bench import LENGTH, Bench, Name, Samples, samples
from paceline.bench.prompts import needle_prompts
from paceline.bench.table.engines import NONE, AnswerRequest, PacelineServices
from paceline.bench.table.run import SHORT
from paceline.kv.policies import kv_policies

_BUCKET = 512  # tokens of output that `output` puts together
_BUDGETS = (64, 128, 256, 512, 1024, 2048)
_TRAINED_BUDGETS = (64, 128, 256, 512)  # a quarter of the paper's, as are texts and contexts
_SHORT = 512  # tokens of the longest text that `offset` trains on
_LONGSPEC = Path("models/smollm2/longspec")
_MIN_DISTINCT = 0.5  # share of different 4-grams in a block; below it, the text is a loop


def selfspec(bench: Bench, policy: str, ratio: float) -> str:
    """SpecAttn's drafter: chains of 7, never cut short."""
    options = f"kv_policy={policy},ratio={ratio:g},context=32,depth=7,min_survival=0"
    return f"selfspec:{bench.models.target},{options},weights={bench.weights}"


def _context(bench: Bench) -> None:
    """Accepted length by tokens of context; with `--speed` the services', and their speed."""
    target = bench.models.target
    shipped = Path("models/smollm2")
    default = {
        "longspec, 512 positions": f"longspec:{_LONGSPEC},target={target},context=512",
        "longspec, all": f"longspec:{_LONGSPEC},target={target},context=0",
        "dspark": f"dspark:{shipped}/dspark,target={target},widths=4,4,2,max_nodes=8",
        "ngram": "ngram",
        **{f"selfspec, {each}": selfspec(bench, each, 0.07) for each in kv_policies()},
    }
    drafters = bench.given(default)
    for length in bench.contexts():
        texts = bench.documents(length)
        specs = {(name, float(length)): spec for name, spec in drafters.items()}
        measure = partial(bench.lengths, "tokens of context", texts, specs)
        bench.cell(f"{bench.weights}, {length} tokens", bench.weights, measure)
        if bench.args.speed:
            title = f"{bench.weights}, {length} tokens, services"
            served = partial(_serve, bench, texts, drafters, length)
            bench.cell(title, f"services, {bench.weights}", served)


def _in_turn(arms: list[Name], number: int) -> list[Name]:
    """The arms, another one first for each text."""
    first = number % len(arms)
    return arms[first:] + arms[:first]


async def _serve(
    bench: Bench, prompts: Sequence[list[int]], specs: Mapping[str, str], x: float
) -> Samples:
    """Speed and accepted length where every round drafts, behind forks of a prefilled prompt."""
    found = samples()
    arms = [NONE, *specs]
    for arm in arms:
        found[arm] = found[arm]
    engine = PacelineServices(bench.models.target, bench.weights, specs, always=True, reuse=True)
    async with engine:
        for number, prompt in enumerate(prompts):
            for arm in _in_turn(arms, number):
                request = AnswerRequest(prompt, bench.args.tokens, bench.args.temperature, number)
                answer = await engine.answer(arm, request)
                mine = found[arm]
                mine["tokens/s"][x].append((answer.tokens - 1, answer.ended - answer.first))
                steps = max(1, answer.steps)
                mine["verify ms"][x].append((answer.verify_ms, steps))
                if arm != NONE:
                    mine["draft ms"][x].append((answer.draft_ms, steps))
                    mine[LENGTH][x].append((answer.drafted_tokens, answer.drafted_rounds))
            bench.console.log(f"text {number + 1} of {len(prompts)}")
    return found


def _load(bench: Bench) -> None:
    """Users at a time: without drafts, with the controller, with a tree in every round."""
    options = f"target={bench.models.target},widths=4,4,2,max_nodes=8,lookup=false"
    default = {"dspark": f"dspark:models/smollm2/dspark,{options}", "ngram": "ngram"}
    drafters = bench.given(default)
    for users in bench.args.users:
        measure = partial(_serve_users, bench, drafters, users)
        bench.cell(f"{bench.weights}, {users} users", bench.weights, measure)


async def _serve_users(bench: Bench, specs: Mapping[str, str], users: int) -> Samples:
    """Speed of all and of each, and drafted tokens that a step checks for a request."""
    found = samples()
    new = partial(PacelineServices, bench.models.target, bench.weights, specs)
    prompts = bench.prompts(*SHORT)
    groups = [prompts[at : at + users] for at in range(0, len(prompts) - users + 1, users)]
    async with new() as controlled, new(always=True) as always:
        arms = [(each, mode) for each in (controlled, always) for mode in each.modes]
        for _, arm in arms:
            found[arm] = found[arm]
        for number, group in enumerate(groups):
            sampling = bench.args.tokens, bench.args.temperature, number
            requests = [AnswerRequest(prompt, *sampling) for prompt in group]
            for engine, arm in _in_turn(arms, number):
                answers = await asyncio.gather(*(engine.answer(arm, each) for each in requests))
                mine = found[arm]
                seconds = max(each.ended for each in answers) - min(each.first for each in answers)
                mine["tokens/s"][users].append((sum(e.tokens - 1 for e in answers), seconds))
                rates = [(e.tokens - 1) / max(e.ended - e.first, 1e-9) for e in answers]
                mine["tokens/s a user"][users].append((sum(rates), users))
                checked, steps = sum(e.checked for e in answers), sum(e.steps for e in answers)
                mine["nodes a request and step"][users].append((checked, max(1, steps)))
            bench.console.log(f"prompts {number + 1} of {len(groups)}")
    return found


def _offset(bench: Bench) -> None:
    """LongSpec's anchor-offset indices, switched off alone, trained on short texts."""
    arms = {"LongSpec": "", "no offsets": "--no-offset"}
    short = {name: f"--max-length {_SHORT} {more}" for name, more in arms.items()}
    trained = bench.trained("longspec", short)
    for length in bench.contexts():
        specs = {(name, float(length)): spec for name, spec in trained.items()}
        measure = partial(bench.lengths, "tokens of context", bench.documents(length), specs)
        bench.cell(f"{length} tokens", "", measure)


def _noise(bench: Bench) -> None:
    """LongSpec's flash noisy training, switched off alone."""
    trained = bench.trained("longspec", {"LongSpec": "", "lag 1 only": "--no-noise"})
    _by_level(bench, "level", {name: f"{spec},depth=4" for name, spec in trained.items()})


def _dspark(bench: Bench) -> None:
    """Heads, layers and block of DSpark, EAGLE-3 and LongSpec after equal steps; chains, cut at
    thresholds of the confidence."""
    specs = bench.given({"shipped": f"dspark:models/smollm2/dspark,target={bench.models.target}"})
    if bench.args.steps:
        arms = {
            "DFlash": "--no-heads",
            "Markov": "",
            "Markov, 2 layers": "--layers 2",
            "Markov, block 6": "--block 6",
        }
        trained = bench.trained("dspark", arms)
        beams = bench.trained("eagle3", {"EAGLE-3": "", "EAGLE-3.1": "--norms"})
        beams |= bench.trained("longspec", {"LongSpec": ""})
        trained |= {name: f"{spec},depth=3" for name, spec in beams.items()}
        specs = trained | bench.given({})
    _by_level(bench, "position", specs)


def _by_level(bench: Bench, word: str, specs: Mapping[str, str]) -> None:
    """Acceptance by level of a chain where the level above was accepted; its time; thresholds."""
    specs = {name: f"{spec},widths=1,min_survival=0" for name, spec in specs.items()}

    def measure() -> Samples:
        found = samples()
        for _, name, path in bench.along(bench.prompts(*SHORT), specs):
            mine = found[name]
            mine[LENGTH][0].append((sum(each.accepted + 1 for each in path), len(path)))
            depth = bench.drafter(specs[name]).max_depth
            for level in range(1, depth + 1):
                reached = sum(each.accepted >= level - 1 for each in path)
                passed = sum(each.accepted >= level for each in path)
                mine[f"acceptance by {word}"][level].append((passed, reached))
            mine["draft ms"][0].append((float(np.median([each.ms for each in path])), 1))
            for threshold in np.arange(0.0, 1.0, 0.1):
                sent = [int((np.cumprod(e.tree.confidences) >= threshold).sum()) for e in path]
                kept = sum(min(e.accepted, count) for e, count in zip(path, sent, strict=True))
                shares = mine["accepted share by threshold"]
                shares[threshold].append((kept, sum(sent)))
                mine["tokens a round by threshold"][threshold].append((kept + len(path), len(path)))
        return found

    bench.cell(f"short prompts, {bench.weights}", "", measure)


def _selection(bench: Bench) -> None:
    """SpecAttn's rows and its rivals, by share of the KV; a table far behind, written again."""
    specs = {
        (policy, ratio): selfspec(bench, policy, ratio)
        for policy in bench.args.policies or kv_policies()
        for ratio in bench.args.ratios
    }
    for length in bench.contexts():
        texts = bench.documents(length)
        kinds = {"document": texts, "needle": needle_prompts(texts, bench.models.target)}
        for kind, prompts in kinds.items():
            measure = partial(bench.lengths, "share of the KV", prompts, specs)
            bench.cell(f"{kind}, {length} tokens", f"{kind} of {length}", measure)


def _budget(bench: Bench) -> None:
    """BudgetDraft: a LongSpec layer trained further with and without budgets, by its KV budget."""
    models = bench.given({"shipped": f"longspec:{_LONGSPEC}"})
    if bench.args.steps:
        several = ",".join(map(str, _TRAINED_BUDGETS))
        arms = {
            "full cache": "",
            "one budget": f"--budgets 0,{_TRAINED_BUDGETS[-2]}",
            "several budgets": f"--budgets 0,{several}",
            "sparse only": f"--budgets {several}",
        }
        further = {name: f"--from {_LONGSPEC} {more}" for name, more in arms.items()}
        models = {**bench.trained("longspec", further), **models}
    for length in bench.contexts():
        budgets = {each: each for each in _BUDGETS if each < length} | {length: 0}
        specs = {
            (f"{name}, {policy}", float(x)): f"{spec},kv_policy={policy},context={budget}"
            for name, spec in models.items()
            for policy in bench.args.policies or ("streaming", "chunk_topk")
            for x, budget in budgets.items()
        }
        measure = partial(bench.lengths, "budget", bench.documents(length), specs)
        bench.cell(f"{length} tokens", f"{length} tokens", measure)


def _output(bench: Bench) -> None:
    """Accepted length by tokens of output; what follows the begin of a loop is left out."""
    target = bench.models.target
    specs = bench.given({
        "longspec": f"longspec:{_LONGSPEC},target={target}",
        "dspark": f"dspark:models/smollm2/dspark,target={target},widths=4,4,2,max_nodes=8",
        "ngram": "ngram",
    })  # fmt: skip

    def measure() -> Samples:
        found = samples()
        for text, name, path in bench.along(bench.prompts("chat", "mathematics"), specs):
            end = _begin_of_loop(text.continuation)
            for begin in range(0, bench.args.tokens, _BUCKET):
                inside = [
                    e.accepted + 1 for e in path if begin <= e.place < min(end, begin + _BUCKET)
                ]
                line = found[name][f"{LENGTH} by tokens of output"]
                line[begin + _BUCKET].append((sum(inside), len(inside)))
        return found

    bench.cell(f"up to {bench.args.tokens} tokens, {bench.weights}", "", measure)


def _begin_of_loop(tokens: Sequence[int]) -> int:
    """Where the first block with few 4-grams that are new in the text begins."""
    seen: set[tuple[int, ...]] = set()
    for begin in range(0, len(tokens), _BUCKET // 4):
        end = min(begin + _BUCKET // 4, len(tokens))
        grams = {tuple(tokens[place - 4 : place]) for place in range(max(4, begin), end)}
        if len(grams - seen) < _MIN_DISTINCT * (end - begin - 4):
            return begin
        seen |= grams
    return len(tokens)


EXPERIMENTS: dict[str, Callable[[Bench], None]] = {
    "context": _context, "offset": _offset, "noise": _noise, "attention": attention,
    "dspark": _dspark, "load": _load, "selection": _selection, "budget": _budget,
    "output": _output,
}  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure and draw one experiment."""
    bench = Bench(args)
    EXPERIMENTS[args.experiment](bench)
    bench.draw()
    return 0
