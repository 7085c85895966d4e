"""`paceline bench papers`: what the papers measured, on a target of one's own.

An experiment is a function here. Accepted lengths are measured along texts that the target wrote
once, without services, so they do not depend on the machine's load. Nothing is looked up in earlier
texts.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paceline.bench.experiment import (
    LENGTH,
    QUEST,
    RECYCLE,
    Bench,
    Name,
    Pairs,
    Round,
    Samples,
    counted,
    estimate,
    samples,
)
from paceline.bench.prompts import needle_prompts
from paceline.bench.step.engines import PacelineEngine
from paceline.bench.table.engines import NONE, AnswerRequest, PacelineServices
from paceline.cli.shipped import smaller_model
from paceline.client import Stats
from paceline.decoder import DecoderConfig, LocalCache
from paceline.drafter import Drafter, DrafterSpec, Resources
from paceline.drafter.methods.base import Budget, GenerationInfo, Update
from paceline.drafter.methods.lm import LmDrafter, LmSequence
from paceline.kernels import (
    Executor,
    Heads,
    LayerTable,
    Pass,
    QueryBlock,
    Recorder,
    TreePlan,
    choose_numerics,
    plan_trees,
)
from paceline.kv.policies import kv_policies
from paceline.train.acceptance import TargetRecording, replay
from paceline.train.drafters import drafter_method
from paceline.tree import accepted_tokens

_REPEATS = 5  # times that attention is measured, of which the shortest counts
_PREFILL = 1024  # tokens of a prompt that a small model reads at once
_TENTHS = 10  # groups of confidences
_CALCULATED = "tokens/s, calculated"  # name of this measure
# Of each drafted token its confidence, the probability that it is accepted where it is reached, and
# that it is reached: `[n, 3]`.
Outcomes = NDArray[np.float64]


def _selfspec(bench: Bench, policy: str, ratio: float) -> str:
    """SpecAttn's drafter: chains of 7, never cut short."""
    options = f"ratio={ratio:g},context=32,depth=7,min_survival=0,weights={bench.weights}"
    if policy == QUEST:
        return f"{QUEST}:{bench.models.target},{options}"
    return f"selfspec:{bench.models.target},{options},kv_policy={policy}"


def _table(bench: Bench) -> None:
    """All drafters by tokens of context: accepted length, and with `--speed` also the services' and
    their speed beside plain decoding's, of those that a service runs."""
    drafters = bench.given(_untrained(bench) | _trained(bench))
    heat = f"T = {bench.args.temperature:g}"
    served = {
        name: spec for name, spec in drafters.items()
        if spec.partition(":")[0] not in (QUEST, RECYCLE)
    }  # fmt: skip
    for length in bench.contexts():
        texts, title = bench.documents(length), f"{bench.weights}, {length} tokens, {heat}"
        specs = {(name, float(length)): spec for name, spec in drafters.items()}
        measure = partial(bench.lengths, "tokens of context", texts, specs)
        bench.cell(title, f"{bench.weights}, {heat}", measure)
        if bench.args.speed:
            measured = partial(_serve, bench, texts, served, length)
            bench.cell(f"{title}, services", f"services, {bench.weights}, {heat}", measured)


def _untrained(bench: Bench) -> dict[str, str]:
    """Drafters of any target: look-up, Token Recycling, MagicDec and SpecAttn, and a small model
    with all KV and with 512 positions (BudgetDraft): the one beside the target, or it in 4 bits."""
    target = bench.models.target
    smaller = smaller_model(target)
    small = f"lm:{smaller}" if smaller else f"lm:{target},weights=int4"
    return {
        "ngram": "ngram", RECYCLE: RECYCLE, "lm": small,
        "lm-512": f"{small},context=512,keep=budget,kv_policy=chunk_topk",
        **{policy: _selfspec(bench, policy, 0.07) for policy in ("streaming", QUEST, "verified")},
    }  # fmt: skip


def _trained(bench: Bench) -> dict[str, str]:
    """Those that were trained for the target; LongSpec with the newest 512 positions too, and with
    the paper's tree."""
    options = {
        "longspec": {"": ",context=0", "-512": ",context=512",
                     "-paper-tree": ",context=0,widths=4,16,16,16,16,max_nodes=68"},
        "dspark": {"": ",widths=4,4,2,max_nodes=8"},
    }  # fmt: skip
    specs = dict[str, str]()
    if not bench.shipped.is_dir():
        bench.console.log(f"no drafters trained for SmolLM2: {bench.shipped} is not in this folder")
    for method in ("longspec", "dspark", "eagle3", "mtp"):
        folder = bench.shipped / method
        if folder.is_dir() and _made_for(folder, bench.models.target):
            for name, more in options.get(method, {"": ""}).items():
                specs[method + name] = f"{method}:{folder},target={bench.models.target}{more}"
    return specs


def _made_for(folder: Path, target: Path) -> bool:
    try:
        return bool(drafter_method(folder, target))
    except ValueError:
        return False


def _in_turn(arms: list[Name], number: int) -> list[Name]:
    """The arms, another one first for each text."""
    first = number % len(arms)
    return arms[first:] + arms[:first]


async def _serve(
    bench: Bench, prompts: Sequence[list[int]], specs: Mapping[str, str], x: float
) -> Samples:
    """Speed and accepted length where every round drafts, behind forks of a prefilled prompt.

    Rounds count from the second one with a draft: a drafter reads the prompt before the first.
    """
    measured = samples()
    arms = [NONE, *specs]
    for arm in arms:
        measured[arm] = measured[arm]
    engine = _services(bench, specs, always=True, reuse=True)
    async with engine:
        for number, prompt in enumerate(counted(prompts)):
            for arm in _in_turn(arms, number):
                request = AnswerRequest(prompt, bench.args.tokens, bench.args.temperature, number)
                answer = await engine.answer(arm, request)
                rounds, measures = answer.stats.rounds, measured[arm]
                read = next((n for n, stats in enumerate(rounds, 1) if stats.drafted), 0)
                part = Stats(rounds[read:])
                tokens = sum(stats.emitted for stats in part.rounds)
                measures["tokens/s"][x].append((1e3 * tokens, part.round_ms))
                measures["verify ms"][x].append((part.verify_ms, part.steps))
                if arm != NONE:
                    measures["draft ms"][x].append((part.draft_ms, part.steps))
                    drafted = tokens - part.free_run_tokens
                    measures[LENGTH][x].append((drafted, part.drafted_rounds))
    return measured


def _services(bench: Bench, specs: Mapping[str, str], **options: bool) -> PacelineServices:
    alone = ["--sources=none"]
    return PacelineServices(bench.models.target, bench.weights, specs, verifier=alone, **options)


def _load(bench: Bench) -> None:
    """Users at a time: without drafts, with the controller, with a tree in every round."""
    options = f"target={bench.models.target},widths=4,4,2,max_nodes=8"
    drafters = bench.given({"dspark": f"dspark:{bench.shipped}/dspark,{options}", "ngram": "ngram"})
    for users in bench.args.users:
        measure = partial(_serve_users, bench, drafters, users)
        bench.cell(f"{bench.weights}, {users} users", bench.weights, measure)


async def _serve_users(bench: Bench, specs: Mapping[str, str], users: int) -> Samples:
    """Speed of all and of each, and drafted tokens that a step checks for a request."""
    measured = samples()
    new = partial(_services, bench, specs)
    prompts = bench.prompts()
    groups = [prompts[at : at + users] for at in range(0, len(prompts) - users + 1, users)]
    async with new() as controlled, new(always=True) as always:
        known = {NONE, *specs, *always.modes}  # without local sources there is no other
        arms = [(e, mode) for e in (controlled, always) for mode in e.modes if mode in known]
        for _, arm in arms:
            measured[arm] = measured[arm]
        for number, group in enumerate(counted(groups)):
            sampling = bench.args.tokens, bench.args.temperature, number
            requests = [AnswerRequest(prompt, *sampling) for prompt in group]
            for engine, arm in _in_turn(arms, number):
                answers = await asyncio.gather(
                    *(engine.answer(arm, request) for request in requests)
                )
                measures = measured[arm]
                seconds = max(answer.ended for answer in answers) - min(
                    answer.first for answer in answers
                )
                measures["tokens/s"][users].append((sum(e.tokens - 1 for e in answers), seconds))
                rates = [(e.tokens - 1) / max(e.ended - e.first, 1e-9) for e in answers]
                measures["tokens/s a user"][users].append((sum(rates), users))
                checked = sum(answer.stats.checked for answer in answers)
                steps = sum(answer.stats.steps for answer in answers)
                measures["nodes a request and step"][users].append((checked, max(1, steps)))
    return measured


def _dspark(bench: Bench) -> None:
    """Acceptance of chains by position where the token before was accepted, by thresholds of the
    confidence, and how well this is calibrated: by equality, as it is served, and above T = 0 also
    by rejection sampling, which is the confidence's label."""
    shipped = f"dspark:{bench.shipped}/dspark,target={bench.models.target}"
    given = bench.given({"shipped": shipped})
    specs = {name: f"{spec},widths=1,min_survival=0" for name, spec in given.items()}

    def measure(rejection: bool) -> Samples:
        measured, chains = samples(), defaultdict[str, list[Outcomes]](list)
        for name, path in bench.along(bench.prompts(), specs, rejection=rejection):
            if not path:
                continue  # the answer ended before a draft
            rounds = [_outcomes(draft) for draft in path]
            chains[name].append(np.concatenate(rounds))
            measures = measured[name]
            measures["draft ms"][0].append((float(np.median([draft.ms for draft in path])), 1))
            kept = [outcomes[:, 1] * outcomes[:, 2] for outcomes in rounds]
            measures[LENGTH][0].append((len(path) + float(np.concatenate(kept).sum()), len(path)))
            for level in range(bench.drafter(specs[name]).max_depth):
                passed, reached = (
                    sum(float(values[level]) for values in lines if len(values) > level)
                    for lines in (kept, [outcomes[:, 2] for outcomes in rounds])
                )
                measures["acceptance by position"][level + 1].append((passed, reached))
            for threshold in np.arange(0.0, 1.0, 0.1):
                sent = [int((np.cumprod(outcomes[:, 0]) >= threshold).sum()) for outcomes in rounds]
                pairs = zip(kept, sent, strict=True)
                accepted = float(sum(shares[:count].sum() for shares, count in pairs))
                measures["accepted share by threshold"][threshold].append((accepted, sum(sent)))
                tokens = accepted + len(path), len(path)
                measures["tokens a round by threshold"][threshold].append(tokens)
        for name, texts in chains.items():
            _calibrate(measured[name], texts)
        return measured

    heat = bench.args.temperature
    title = f"short prompts, {bench.weights}" + (f", T = {heat:g}" if heat else "")
    bench.cell(title, "", partial(measure, False))
    if heat:
        bench.cell(f"{title}, rejection", "rejection", partial(measure, True))


def _outcomes(chain: Round) -> Outcomes:
    reached, rows = 1.0, []
    for level, confidence in enumerate(chain.tree.confidences):
        if chain.chances:
            accepted, token = chain.chances[level]
        else:
            accepted = token = float(level < chain.accepted)
        rows.append((confidence, accepted, reached))
        reached *= token
    return np.array(rows).reshape(-1, 3)


def _calibrate(measures: dict[str, dict[float, Pairs]], texts: Sequence[Outcomes]) -> None:
    """Add the acceptance of tokens by tenths of the confidence, the expected calibration error over
    these, and the area under the ROC curve within texts."""
    gaps = np.zeros((len(texts), _TENTHS))
    for number, (said, right, weight) in enumerate(text.T for text in texts):
        tenth = np.minimum(said * _TENTHS, _TENTHS - 1).astype(int)
        counts = np.bincount(tenth, weight, _TENTHS)
        for measure, values in (("acceptance", right), ("mean confidence", said)):
            for at, total in enumerate(np.bincount(tenth, values * weight, _TENTHS)):
                line = measures[f"{measure} by confidence"]
                line[at / _TENTHS].append((float(total), float(counts[at])))
        gaps[number] = np.bincount(tenth, (said - right) * weight, _TENTHS)
        good, bad = right * weight, (1 - right) * weight
        above = (said[:, None] > said) + (said[:, None] == said) / 2
        np.fill_diagonal(above, 0)  # a token is not compared with itself
        pairs = good.sum() * bad.sum() - good @ bad
        measures["AUC within texts"][0].append((float(good @ above @ bad), float(pairs)))
    signs = np.sign(gaps.sum(0))
    for text, gap in zip(texts, gaps, strict=True):
        measures["ECE"][0].append((float(gap @ signs), float(text[:, 2].sum())))


def _selection(bench: Bench) -> None:
    """SpecAttn's rows and its rivals, by share of the KV; a table far behind, written again."""
    specs = {
        (policy, ratio): _selfspec(bench, policy, ratio)
        for policy in bench.args.policies or (*kv_policies(), QUEST)
        for ratio in bench.args.ratios
    }
    for length in bench.contexts():
        texts = bench.documents(length)
        kinds = {"document": texts, "needle": needle_prompts(texts, bench.models.target)}
        for kind, prompts in kinds.items():
            measure = partial(bench.lengths, "share of the KV", prompts, specs)
            bench.cell(f"{kind}, {length} tokens", f"{kind} of {length}", measure)


class BudgetDrafter(LmDrafter):
    """Drafts under one KV budget after the other, and reads a prompt once for all of them."""

    _read: LmSequence | None = None  # the newest prompt

    @classmethod
    def of(cls, spec: str) -> Self:
        """A small model that drafts chains of 5, never cut short. Raises ``ValueError``: it is none
        of `lm`."""
        given = DrafterSpec.parse(f"drafter={spec}")
        if given.method != cls.method:
            raise ValueError(f"--drafter {spec}: expected NAME=lm:DIR, a small language model")
        chain = {"widths": "1", "depth": "5", "min_survival": "0"}
        return cast(Self, cls.load(given.folder, chain | dict(given.options), Resources()))

    def under(self, policy: str, budget: int) -> None:
        """Set the budget of the texts that start from now on; 0: all positions."""
        keep = "budget" if budget else "all"
        self.options = replace(self.options, context=budget, keep=keep, kv_policy=policy)

    def start(self, generation: GenerationInfo) -> LmSequence:
        sequence = super().start(generation)
        if self._read is None or self._read.tokens != sequence.tokens:
            if self._read is not None:
                self._read.close()
            kept, self._read = self.options, None
            self.under("chunk_topk", 0)
            self._read = super().start(generation)
            while self._read.backlog:
                self._read.warm(_PREFILL)
            self.options = kept
        sequence._scores = sequence._scores and deepcopy(self._read._scores)
        return self._copy_cache(sequence, self._read)

    def branch(self, sequence: LmSequence) -> LmSequence:
        """A copy of a text behind whose prompt a round began, which goes on by itself."""
        branch = copy(sequence)
        branch.tokens, branch.ranker = [*sequence.tokens], deepcopy(sequence.ranker)
        return self._copy_cache(branch, sequence)

    def _copy_cache(self, sequence: LmSequence, read: LmSequence) -> LmSequence:
        sequence._cache = LocalCache(self.decoder.config)
        sequence._cache.take(read.cache, range(len(read.cache)))
        self.kv_slots += sequence.slots
        return sequence

    def rounds_for(self, sequence: LmSequence, chain: Sequence[int]) -> int:
        """The rounds in which it drafts a chain that another model checks, behind a text."""
        branch, count, done = self.branch(sequence), 0, 0
        while done < len(chain):
            tree = branch.draft(Budget(self.max_nodes, self.max_depth))
            stop = done + accepted_tokens(tree, chain[done:]) + 1
            branch.extend(Update(chain[done:stop], committed_length=branch.length))
            count, done = count + 1, stop
        branch.close()
        return count


def _small_model(bench: Bench) -> tuple[str, BudgetDrafter]:
    [(name, spec)] = bench.given({"lm": f"lm:{bench.shipped}/lm"}).items()
    return name, BudgetDrafter.of(spec)


def _budget(bench: Bench) -> None:
    """A small model that sparsifies its KV once, behind the prompt, by budget and tokens of context
    (BudgetDraft, algorithm 2 and figure 1)."""
    _, drafter = _small_model(bench)
    policies = bench.args.policies or ["chunk_topk"]
    arms = {f"{policy}, {budget}": (policy, budget)
            for policy, budget in product(policies, bench.args.budgets)}  # fmt: skip
    arms = {"all": (policies[0], 0), **arms}
    for length in bench.contexts():
        measure = partial(_draft_under, bench, drafter, arms, length)
        bench.cell(f"{bench.weights}, {length} tokens", bench.weights, measure)


@torch.inference_mode()
def _draft_under(
    bench: Bench, drafter: BudgetDrafter, arms: Mapping[str, tuple[str, int]], length: int
) -> Samples:
    measured = samples()
    for number in counted(range(bench.args.texts)):
        text = bench.continued(number)[length]
        for arm, (policy, budget) in arms.items():
            drafter.under(policy, budget)
            path = list(bench.path(drafter, text))
            accepted = sum(draft.accepted for draft in path)
            drafted = sum(len(draft.tree.tokens) for draft in path)
            measured[arm][LENGTH][length].append((accepted + len(path), len(path)))
            measured[arm]["accepted share"][length].append((accepted, drafted))
    return measured


def _triforce(bench: Bench) -> None:
    """TriForce (Sun et al., 2024), calculated: a small model under a KV budget drafts for the
    target with sparse KV, which drafts for the target.

    Measured are accepted lengths along the target's text, also of the small model along the chains
    of the target with sparse KV, its drafts, and steps of the target behind the whole context and
    behind the sparse one. The first arm is the best of one level, which the others are over.
    """
    name, drafter = _small_model(bench)
    engine = PacelineEngine(bench.models.target, bench.weights, synthetic=True)
    policy = (bench.args.policies or ["verified"])[0]
    sparse = {ratio: bench.drafter(_selfspec(bench, policy, ratio)) for ratio in bench.args.ratios}
    for length in bench.contexts():
        measure = partial(_stack, bench, engine, name, drafter, sparse, length)
        bench.cell(f"{bench.weights}, {length} tokens", bench.weights, measure)


@torch.inference_mode()
def _stack(
    bench: Bench, engine: PacelineEngine, name: str, drafter: BudgetDrafter,
    sparse: Mapping[float, Drafter], length: int,
) -> Samples:  # fmt: skip
    measured, few = samples(), drafter.max_depth + 1

    def step(arm: str, context: int, rows: int) -> float:
        cache = engine.synthetic_cache(context)
        ms = min(_milliseconds(partial(engine.step, cache, rows)) for _ in range(_REPEATS))
        measured[arm]["ms of a step by rows"][rows].append((ms, 1))
        return ms

    def add(arm: str, path: Sequence[Round], round_ms: float) -> None:
        """Record the rounds of a text."""
        emitted = sum(draft.accepted + 1 for draft in path)
        measured[arm][LENGTH][length].append((emitted, len(path)))
        measured[arm][_CALCULATED][length].append((1e3 * emitted, len(path) * round_ms))

    steps = {
        rows: step("target", length, rows)
        for rows in {1, few, *(middle.max_depth + 1 for middle in sparse.values())}
    }
    behind = {
        ratio: [step(f"sparse KV, {ratio:g}", max(32, int(ratio * length)), rows)
                for rows in (1, few)] for ratio in sparse
    }  # fmt: skip
    for number in counted(range(bench.args.texts)):
        text = bench.continued(number)[length]
        measured["target"][_CALCULATED][length].append((1e3, steps[1]))
        drafts = dict[int, float]()  # milliseconds of one, by budget
        for budget in bench.args.budgets:
            drafter.under("chunk_topk", budget)
            path = list(bench.path(drafter, text))
            drafts[budget] = ms = float(np.median([draft.ms for draft in path]))
            measured[f"{name}, {budget}"]["ms of a draft"][length].append((ms, 1))
            add(f"{name}, {budget}", path, ms + steps[few])
        whole = replay(bench.target, text.tokens[:length], text.continuation)
        for ratio, middle in sparse.items():
            arm, chain = f"sparse KV, {ratio:g}", middle.max_depth
            path, (one, checked) = list(bench.path(middle, whole)), behind[ratio]
            add(arm, path, chain * one + steps[chain + 1])
            for budget, ms in drafts.items():
                stack = f"TriForce, {budget}, {ratio:g}"
                drafter.under("chunk_topk", budget)
                inner = _rounds_for_chains(drafter, text, path)
                drafted = sum(len(draft.tree.tokens) for draft in path)
                measured[stack]["accepted length for sparse KV"][length].append((drafted, inner))
                chain_ms = inner / len(path) * (ms + checked)
                add(stack, path, chain_ms + steps[chain + 1])
    single = [arm for arm in measured if "TriForce" not in arm]
    best = max(single, key=lambda arm: estimate(measured[arm][_CALCULATED][length])[1])
    return {best: measured[best], **measured}


def _rounds_for_chains(drafter: BudgetDrafter, text: TargetRecording, path: Sequence[Round]) -> int:
    """The rounds in which a small model drafts the chains of the rounds along a text."""
    tokens, length, count = text.tokens, text.prompt_length + 1, 0
    sequence = drafter.start(
        GenerationInfo(tokens[:length], length - 1, text.vocab_size, text.sampling)
    )
    sequence.begin_round()
    for draft in path:
        count += drafter.rounds_for(sequence, draft.tree.tokens)
        emitted = tokens[length : length + draft.accepted + 1]
        length += len(emitted)
        sequence.extend(Update(emitted, committed_length=length - 1))
        sequence.warm(len(emitted))
    sequence.close()
    return count


def _attention(bench: Bench) -> None:
    """Tree attention in two parts beside PyTorch's SDPA with a mask."""
    config = bench.source.config()
    for rows in bench.args.rows:
        bench.cell(f"{rows} rows", f"{rows} rows", partial(_attend, bench, config, rows))


class _OneLayer:
    """A cache of one layer, as programs see it."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._planes = keys, values
        self.table = LayerTable([self._planes])

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._planes


def _native(q: Tensor, keys: Tensor, values: Tensor, plan: TreePlan) -> Callable[[], object]:
    """The attention of a decoder's step on the CPU, as a program of its own."""
    _, heads, dim = q.shape
    numerics = choose_numerics("auto")  # as a verifier with KV in bfloat16
    recorder = Recorder(Heads(heads, keys.shape[0], dim), torch.float32, numerics=numerics)
    rotated = recorder.rotate_queries(recorder.input(heads * dim))
    recorder.tap(recorder.attend(rotated, 0, None), 0)
    still = torch.tensor([1.0, 0.0]).repeat_interleave(dim // 2).repeat(plan.longest + 1, 1)
    call = Pass(
        None, plan, [_OneLayer(keys, values)], still, taps=(0,), inputs=q.flatten(1).float()
    )  # fmt: skip
    return partial(Executor(recorder.finish()).run, call)


def _attend(bench: Bench, config: DecoderConfig, rows: int) -> Samples:
    measured = samples()
    scale = config.head_dim**-0.5
    parents = tuple((node - 1) // 2 if node else -1 for node in range(rows))  # a binary tree
    for context in bench.args.contexts:
        stop = context + rows
        q = torch.randn(rows, config.q_heads, config.head_dim).to(config.dtype)
        keys, values = (
            torch.randn(config.kv_heads, stop, config.head_dim).to(config.dtype) for _ in range(2)
        )
        block = QueryBlock(0, context, parents, rows)
        plan = plan_trees([block])
        mask = torch.ones(rows, stop, dtype=torch.bool)
        mask[:, context:] = torch.from_numpy(block.ancestors())
        queries, k, v = (tensor[None] for tensor in (q.transpose(0, 1), keys, values))
        sdpa = partial(
            scaled_dot_product_attention, queries, k, v, mask, scale=scale, enable_gqa=True
        )
        ways: dict[str, Callable[[], object]] = {
            "SDPA with a mask": sdpa,
            "tree attention": _native(q, keys, values, plan),
        }
        for _ in range(bench.args.texts):
            for name, way in ways.items():
                shortest = min(_milliseconds(way) for _ in range(_REPEATS))
                measured[name]["ms by tokens of context"][context].append((shortest, 1))
    return measured


def _milliseconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1e3


EXPERIMENTS: dict[str, Callable[[Bench], None]] = {
    "table": _table, "attention": _attention, "dspark": _dspark, "load": _load,
    "selection": _selection, "budget": _budget, "triforce": _triforce,
}  # fmt: skip


def run(args: argparse.Namespace) -> int:
    bench = Bench(args)
    EXPERIMENTS[args.experiment](bench)
    bench.console.print(f"written to {bench.results.file}")
    return 0
