"""`paceline bench papers`: what the papers measured, on a target of one's own.

An experiment is a function here; it has cells, which a result file keeps. Cells that the file has
are not measured again, so the same command goes on where an earlier one stopped. A cell compares
arms on the same texts; its figures are ratios of sums over texts, with 95% intervals by drawing
texts again, and each arm's over the first one's with the texts paired. Accepted lengths are
measured along texts that the target wrote once, without services, so they do not depend on the
machine's load. Nothing is looked up in earlier texts.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import uvloop
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paceline.bench.acceptance import load_drafters, write_answer
from paceline.bench.models import Models
from paceline.bench.prompts import FREE, PROMPTS, needle_prompts, read
from paceline.bench.record import Results, make_console
from paceline.bench.reference import ReferenceKernels
from paceline.bench.table.engines import NONE, AnswerRequest, PacelineServices
from paceline.convert import load_decoder, open_model
from paceline.decoder import Decoder, DecoderConfig
from paceline.drafter import Drafter
from paceline.kernels import (
    MAX_TREE_NODES,
    SELECTION_CHUNK,
    AttentionCall,
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
from paceline.kernels.caches import from_rows
from paceline.kv.policies import kv_policies, load_policy
from paceline.train.acceptance import RecordedKv, TargetRecording, rounds
from paceline.tree import TokenTree, accepted_tokens
from paceline.verifier.engine.batch import BatchObserver

SHORT = FREE[:3]  # categories of short prompts
LENGTH = "accepted length"  # name of this measure
_RESAMPLES = 1000
_REPEATS = 5  # times that attention is measured, of which the shortest counts
_SHIPPED = Path("models/smollm2")
Name = TypeVar("Name")
Pairs = list[tuple[float, float]]  # numerator and denominator of a ratio, by text
Samples = dict[str, dict[str, dict[float, Pairs]]]  # by arm, measure, and place on the x axis


def samples() -> Samples:
    return defaultdict(lambda: defaultdict(lambda: defaultdict(list)))


def estimate(pairs: Pairs, other: Pairs | None = None) -> list[float]:
    """Return the ratio of sums over texts between the ends of its interval.

    Args:
        other: Of the same texts in another arm: the ratio of both ratios.
    """
    sums = np.array(pairs, dtype=float)
    count = len(sums)
    drawn = np.random.default_rng(1).integers(count, size=(_RESAMPLES, count))
    drawn = np.concatenate([np.arange(count)[None], drawn])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.divide(*sums[drawn].sum(axis=1).T)
        if other is not None:
            ratios /= np.divide(*np.array(other, dtype=float)[drawn].sum(axis=1).T)
    ratios = ratios[np.isfinite(ratios)]
    low, high = np.percentile(ratios[1:], (2.5, 97.5))
    return [round(float(value), 3) for value in (low, ratios[0], high)]


def figures(found: Samples) -> dict[str, Any]:
    """Of a result file: ``arms`` by measure and place, and ``over``, each over the first arm."""
    entry: dict[str, Any] = {"arms": {}, "over": {}}
    first = next(iter(found.values()), {})
    for arm, measures in found.items():
        for measure, line in measures.items():
            lines: list[dict[str, list[float]]] = [{}, {}]
            for x, pairs in line.items():
                if not any(below for _, below in pairs):
                    continue
                lines[0][f"{x:g}"] = estimate(pairs)
                others = first.get(measure, {}).get(x, [])
                if measures is not first and any(above for above, _ in others):
                    lines[1][f"{x:g}"] = estimate(pairs, others)
            for kind, each in zip(entry.values(), lines, strict=True):
                if each:
                    kind.setdefault(arm, {})[measure] = each
    return entry


class PolicyKv(RecordedKv):
    """A recording's KV as a selection policy of the verifier shows it to a drafter.

    It is an :class:`~paceline.kv.selection.ObservedCache`.
    """

    def __init__(self, target: Decoder, text: TargetRecording, drafter: Drafter) -> None:
        super().__init__(text.cache)
        text.cache.reserve(MAX_TREE_NODES)
        self.capacity, self.device = text.cache.capacity, torch.device(target.device)
        self._target, self._text = target, text
        self._layers = [each % target.config.layers for each in drafter.needs.kv_layers]
        self._policy = load_policy(drafter.needs.kv_options.kv_policy)(self, self._layers)
        self._chosen: list[Tensor] = []
        end = text.prompt_length
        if self._policy.observer is not None and end > SELECTION_CHUNK:  # as in a prefill
            start = end - SELECTION_CHUNK
            self._observe(QueryBlock(0, start, None, SELECTION_CHUNK), text.tokens[start:end])

    def refresh(self, below: int, budget: int) -> int:
        length = min(self.committed, below)
        self._chosen = self._policy.choose(length, budget or length)
        return length

    def parts(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        keys, values = self.layer(layer)
        chosen = self._chosen[self._layers.index(layer % self._target.config.layers)]
        return [(from_rows(keys[:, chosen]), from_rows(values[:, chosen]))]

    def verify(self, tree: TokenTree, accepted: Sequence[int]) -> None:
        """Run the tree of a round through the target: its rows score the prefix.

        Args:
            accepted: Those on the path that equals the text.
        """
        if self._policy.observer is None:
            return
        start, parents = self.committed, (-1, *(parent + 1 for parent in tree.parents))
        tokens = [self._text.tokens[start], *tree.tokens]
        self._observe(QueryBlock(0, start, parents, len(tokens)), tokens)
        paths = [[], *(list(tree.path(node)) for node in range(len(tree.tokens)))]
        self._policy.observer.accepted(paths.index(list(accepted)))

    def _observe(self, block: QueryBlock, tokens: Sequence[int]) -> None:
        observer = self._policy.observer
        assert observer is not None
        start, count = block.start, block.length
        observers = BatchObserver()
        observers.add(observer, 0, block, 0)
        cache = self._text.cache
        layers = map(cache.layer, range(self._target.config.layers))
        planes = [plane for both in layers for plane in both]
        # The rows overwrite the recording behind the prefix.
        kept = [plane[:, start : start + count].clone() for plane in planes]
        plan, rows = plan_trees([block]), torch.tensor([0])
        self._target.forward(
            torch.tensor(tokens), plan, [cache], logit_rows=rows, observer=observers
        )
        observers.publish(self._target.config.q_heads)
        for plane, before in zip(planes, kept, strict=True):
            plane[:, start : start + count] = before


@dataclass(frozen=True)
class Round:
    """One round along a text."""

    tree: TokenTree  # the drafted tokens
    accepted: int  # how many the target accepted
    ms: float  # time of the draft


class Bench:
    """What the experiments share: target, drafters, texts, and the result file of each."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.console = args, make_console()
        self.models = Models.of(args)
        self.source = open_model(self.models.target)
        [self.weights] = args.weights
        self._drafters: dict[str, Drafter] = {}
        topic = f"papers-{args.experiment}"
        self.results = Results(topic, args.output, self.models.target, tokens=args.tokens)

    def cell(
        self, title: str, panel: str, measure: Callable[[], Samples | Coroutine[Any, Any, Samples]]
    ) -> None:
        """Measure a cell, unless the result file has it, and record it.

        Args:
            panel: What several cells have in common, beside the name of the measure.
        """
        if title in self.results.entries:
            self.console.log(f"{title}: already in {self.results.file}")
            return
        began = time.monotonic()
        found = measure()
        if isinstance(found, Coroutine):
            found = uvloop.run(found)
        measured = figures(found)
        lengths = (
            len(each) for arm in found.values() for line in arm.values() for each in line.values()
        )
        facts = {"panel": panel, "weights": self.weights, "texts": max(lengths, default=0)}
        facts["minutes"] = round((time.monotonic() - began) / 60, 1)
        self.results.add(title, facts | measured)
        table = Table(
            "arm", "measure", "value (95% interval)", "relative to the first arm", title=title
        )
        for arm, measures in measured["arms"].items():
            for name, line in measures.items():
                over = measured["over"].get(arm, {}).get(name, {})
                table.add_row(arm, name, _words(line), _words(over))
        self.console.print(table)

    @cached_property
    def target(self) -> Decoder:
        return load_decoder(self.source, self.weights)

    def given(self, default: Mapping[str, str]) -> dict[str, str]:
        """Specifications by name: those of `--drafter`, else these."""
        specs = dict(each.split("=", 1) for each in self.args.drafter) or dict(default)
        self.results.uses(specs)
        return specs

    def prompts(self) -> list[list[int]]:
        """The prompts of `--prompts`, or short ones of the table in turn; `--texts` of them."""
        files = self.args.prompts or [PROMPTS / f"{name}.jsonl" for name in SHORT]
        rows = zip_longest(*read(files, self.source, self.args.tokens).values())
        ids = (each.ids for row in rows for each in row if each is not None)
        return list(islice(ids, self.args.texts))

    def documents(self, length: int) -> list[list[int]]:
        """The last `length` tokens of long prompts, each behind the ones before it."""
        files = self.args.prompts or [PROMPTS / "long.jsonl"]
        every = [each.ids for texts in read(files, self.source, 0).values() for each in texts]
        documents = []
        for number in range(self.args.texts):
            place, text = number, list[int]()
            while len(text) < length:
                text = every[place % len(every)] + text
                place -= 1
            documents.append(text[-length:])
        return documents

    def contexts(self) -> list[int]:
        """Those of `--contexts` that fit the target with an answer."""
        room = self.source.config().max_position - self.args.tokens
        return [each for each in self.args.contexts if each <= room]

    @torch.inference_mode()
    def along(
        self, prompts: Sequence[list[int]], specs: Mapping[Name, str]
    ) -> Iterator[tuple[Name, Drafter, list[Round]]]:
        """Let the target answer each prompt, and every drafter draft along the answer."""
        for spec in specs.values():
            if spec not in self._drafters:
                given = [f"drafter={spec}"]
                [(_, self._drafters[spec])] = load_drafters(given, self.models.target)
        drafters = {name: self._drafters[spec] for name, spec in specs.items()}
        layers = {n for each in drafters.values() for n in each.needs.hidden_state_layers}
        for number, prompt in enumerate(prompts, 1):
            text = write_answer(
                self.target, self.source, prompt, self.args.tokens, self.args.temperature,
                number, layers,
            )  # fmt: skip
            self.console.log(f"text {number} of {len(prompts)}: {len(text.continuation)} tokens")
            for name, drafter in drafters.items():
                yield name, drafter, list(self._rounds(drafter, text))

    def _rounds(self, drafter: Drafter, text: TargetRecording) -> Iterator[Round]:
        kv = PolicyKv(self.target, text, drafter) if drafter.needs.kv_layers else None
        began = time.perf_counter()
        for tree, after in rounds(drafter, text, kv):
            ms = (time.perf_counter() - began) * 1e3
            accepted = accepted_tokens(tree, after)
            yield Round(tree, accepted, ms)
            if kv is not None:
                kv.verify(tree, after[:accepted])
            began = time.perf_counter()

    def lengths(
        self, by: str, prompts: Sequence[list[int]], specs: Mapping[tuple[str, float], str]
    ) -> Samples:
        """Accepted length of drafters by arm and place on the x axis, which `by` names."""
        found = samples()
        for (arm, x), _, path in self.along(prompts, specs):
            pair = sum(each.accepted + 1 for each in path), len(path)
            found[arm][f"{LENGTH} by {by}"][x].append(pair)
        return found


def _words(line: Mapping[str, Sequence[float]]) -> str:
    return "  ".join(
        f"{x}: {value:.3g} ({low:.3g}-{high:.3g})" for x, (low, value, high) in line.items()
    )


def _selfspec(bench: Bench, policy: str, ratio: float) -> str:
    """SpecAttn's drafter: chains of 7, never cut short."""
    options = f"kv_policy={policy},ratio={ratio:g},context=32,depth=7,min_survival=0"
    return f"selfspec:{bench.models.target},{options},weights={bench.weights}"


def _context(bench: Bench) -> None:
    """Accepted length by tokens of context; with `--speed` the services', and their speed."""
    target = bench.models.target
    longspec = f"longspec:{_SHIPPED}/longspec,target={target}"
    drafters = bench.given({
        "longspec, 512 positions": f"{longspec},context=512",
        "longspec, all": f"{longspec},context=0",
        "dspark": f"dspark:{_SHIPPED}/dspark,target={target},widths=4,4,2,max_nodes=8",
        "ngram": "ngram",
        **{f"selfspec, {each}": _selfspec(bench, each, 0.07) for each in kv_policies()},
    })  # fmt: skip
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
    engine = _services(bench, specs, always=True, reuse=True)
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


def _services(bench: Bench, specs: Mapping[str, str], **options: bool) -> PacelineServices:
    alone = ["--sources=none"]
    return PacelineServices(bench.models.target, bench.weights, specs, verifier=alone, **options)


def _load(bench: Bench) -> None:
    """Users at a time: without drafts, with the controller, with a tree in every round."""
    options = f"target={bench.models.target},widths=4,4,2,max_nodes=8"
    drafters = bench.given({"dspark": f"dspark:{_SHIPPED}/dspark,{options}", "ngram": "ngram"})
    for users in bench.args.users:
        measure = partial(_serve_users, bench, drafters, users)
        bench.cell(f"{bench.weights}, {users} users", bench.weights, measure)


async def _serve_users(bench: Bench, specs: Mapping[str, str], users: int) -> Samples:
    """Speed of all and of each, and drafted tokens that a step checks for a request."""
    found = samples()
    new = partial(_services, bench, specs)
    prompts = bench.prompts()
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


def _dspark(bench: Bench) -> None:
    """Acceptance by position of a chain where the one before was accepted, and by thresholds of the
    confidence."""
    shipped = f"dspark:{_SHIPPED}/dspark,target={bench.models.target}"
    given = bench.given({"shipped": shipped})
    specs = {name: f"{spec},widths=1,min_survival=0" for name, spec in given.items()}

    def measure() -> Samples:
        found = samples()
        for name, drafter, path in bench.along(bench.prompts(), specs):
            mine = found[name]
            mine[LENGTH][0].append((sum(each.accepted + 1 for each in path), len(path)))
            for level in range(1, drafter.max_depth + 1):
                reached = sum(each.accepted >= level - 1 for each in path)
                passed = sum(each.accepted >= level for each in path)
                mine["acceptance by position"][level].append((passed, reached))
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
        (policy, ratio): _selfspec(bench, policy, ratio)
        for policy in bench.args.policies or kv_policies()
        for ratio in bench.args.ratios
    }
    for length in bench.contexts():
        texts = bench.documents(length)
        kinds = {"document": texts, "needle": needle_prompts(texts, bench.models.target)}
        for kind, prompts in kinds.items():
            measure = partial(bench.lengths, "share of the KV", prompts, specs)
            bench.cell(f"{kind}, {length} tokens", f"{kind} of {length}", measure)


def _attention(bench: Bench) -> None:
    """Tree attention in two parts beside one masked attention, in PyTorch and in SDPA."""
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
    found = samples()
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
        out = torch.empty_like(q)
        call = AttentionCall(q, [keys], [values], plan, scale, None, out, None, ())
        queries, k, v = (each[None] for each in (q.transpose(0, 1), keys, values))
        sdpa = partial(
            scaled_dot_product_attention, queries, k, v, mask, scale=scale, enable_gqa=True
        )
        ways: dict[str, Callable[[], object]] = {
            "SDPA with a mask": sdpa,
            "masked in PyTorch": partial(ReferenceKernels().attend, call),
            "tree attention": _native(q, keys, values, plan),
        }
        for _ in range(bench.args.texts):
            for name, way in ways.items():
                shortest = min(_milliseconds(way) for _ in range(_REPEATS))
                found[name]["ms by tokens of context"][context].append((shortest, 1))
    return found


def _milliseconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1e3


EXPERIMENTS: dict[str, Callable[[Bench], None]] = {
    "context": _context, "attention": _attention, "dspark": _dspark, "load": _load,
    "selection": _selection,
}  # fmt: skip


def run(args: argparse.Namespace) -> int:
    bench = Bench(args)
    EXPERIMENTS[args.experiment](bench)
    bench.console.print(f"written to {bench.results.file}")
    return 0
