"""`paceline bench papers`: what the papers measured, on a target of one's own.

An experiment has cells. A cell compares arms on the same texts; its figures are ratios of sums over
texts, with 95% intervals by drawing texts again, and each arm's over the first one's with the texts
paired. Accepted lengths are measured along texts that the target wrote once, without services, so
they do not depend on the machine's load. Nothing is looked up in earlier texts. Cells that the
result file has are kept, so the same command goes on where an earlier one stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import subprocess
import sys
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
from paceline.bench.chart import draw_arms
from paceline.bench.models import Models
from paceline.bench.prompts import needle_prompts
from paceline.bench.record import Results, make_console
from paceline.bench.table.engines import NONE, AnswerRequest, PacelineServices
from paceline.bench.table.run import PROMPTS, SHORT, read
from paceline.cli.command import CommandError
from paceline.decoder import Decoder, open_model
from paceline.drafter import Drafter
from paceline.drafter.methods.longspec.config import read_longspec
from paceline.kernels import (
    MAX_TREE_NODES,
    SELECTION_CHUNK,
    Heads,
    LayerTable,
    Pass,
    QueryBlock,
    Recorder,
    TreePlan,
    choose_numerics,
    cpu_kernels,
    plan_trees,
)
from paceline.kernels.caches import from_rows
from paceline.kernels.dense import AttentionCall, DenseBackend
from paceline.kernels.executor import NativeProgram
from paceline.kernels.operations import run_one_by_one
from paceline.kv.policies import kv_policies, load_policy
from paceline.train.acceptance import RecordedKv, TargetRecording, rounds
from paceline.tree import TokenTree, accepted_tokens
from paceline.verifier.engine.batch import BatchObserver

Pairs = list[tuple[float, float]]
"""Numerator and denominator of a ratio, by text."""

Samples = dict[str, dict[str, dict[float, Pairs]]]
"""By arm, measure, and place on the x axis."""

Name = TypeVar("Name")
_RESAMPLES = 1000
_REPEATS = 5  # times that attention is measured, of which the shortest counts
_BUCKET = 512  # tokens of output that `output` puts together
_BUDGETS = (64, 128, 256, 512, 1024, 2048)
_TRAINED_BUDGETS = (64, 128, 256, 512)  # a quarter of the paper's, as are texts and contexts
_SHORT = 512  # tokens of the longest text that `offset` trains on
_MINUTES = 10_000  # a limit that no training reaches: steps end it, on a slow machine too
_LONGSPEC = Path("models/smollm2/longspec")
_MIN_DISTINCT = 0.5  # share of different 4-grams in a block; below it, the text is a loop

_LENGTH = "accepted length"


def samples() -> Samples:
    """Make an empty collection of samples."""
    return defaultdict(lambda: defaultdict(lambda: defaultdict(list)))


def estimate(pairs: Pairs, other: Pairs | None = None) -> list[float]:
    """The ratio of sums over texts, with the ends of its interval before and after it.

    Args:
        pairs: Of the texts.
        other: Of the same texts in another arm: the ratio of both ratios.
    """
    found = np.array(pairs, dtype=float)
    count = len(found)
    drawn = np.random.default_rng(1).integers(count, size=(_RESAMPLES, count))
    drawn = np.concatenate([np.arange(count)[None], drawn])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.divide(*found[drawn].sum(axis=1).T)
        if other is not None:
            ratios /= np.divide(*np.array(other, dtype=float)[drawn].sum(axis=1).T)
    ratios = ratios[np.isfinite(ratios)]
    low, high = np.percentile(ratios[1:], (2.5, 97.5))
    return [round(float(each), 3) for each in (low, ratios[0], high)]


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
            tree: The drafted tokens.
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

    place: int
    """Tokens of the answer before its tree."""

    tree: TokenTree
    """The drafted tokens."""

    accepted: int
    """How many the target accepted."""

    ms: float
    """Time of the draft."""


class Bench:
    """What the experiments share: target, drafters, texts, and the result file of each."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.console = args, make_console()
        self.models = Models.of(args)
        self.source = open_model(self.models.target)
        [self.weights] = args.weights
        self._drafters: dict[str, Drafter] = {}
        head = {"target": self.source.fingerprint(), "tokens": args.tokens}
        self.results = Results(f"papers-{args.experiment}", args.output, **head)

    def draw(self) -> None:
        """Draw all cells of the result file, a panel a measure."""
        picture = self.results.file.with_suffix(".svg")
        picture.write_text(draw_arms(self.results.entries))
        self.console.print(f"written to {self.results.file} and {picture}")

    def cell(
        self, title: str, panel: str, measure: Callable[[], Samples | Coroutine[Any, Any, Samples]]
    ) -> None:
        """Measure a cell, unless the result file has it, and record it.

        Args:
            title: Its name in the result file.
            panel: Of the picture, beside the name of the measure; cells may share one.
            measure: Does so.
        """
        if self.args.steps:
            title += f", trained for {self.args.steps} steps"
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
        """The target in this process."""
        return Decoder.load(self.source, self.weights)

    def drafter(self, spec: str) -> Drafter:
        """The drafter of METHOD[:DIR][,KEY=VALUE...]."""
        if spec not in self._drafters:
            [(_, found)] = load_drafters([f"drafter={spec}"], self.models.target)
            self._drafters[spec] = found
        return self._drafters[spec]

    def given(self, default: Mapping[str, str]) -> dict[str, str]:
        """Specifications by name: those of `--drafter`, else these."""
        return dict(each.split("=", 1) for each in self.args.drafter) or dict(default)

    def trained(self, method: str, arms: Mapping[str, str]) -> dict[str, str]:
        """Train a drafter for each arm, by name and more arguments, unless it is there.

        All arms have the same conversations, what the target computed for them, seed and steps.
        """
        args = self.args
        if not args.steps or not args.own_text:
            raise CommandError(
                "give --steps to train each drafter, and --own-text with conversations of "
                "`paceline train own-text`"
            )
        shared = ["--preset", "smollm2", "--no-card", f"--target={self.models.target}"]
        shared += ["--signals", str(args.signals or args.work / "signals")]
        shared += ["--own-text", *map(str, args.own_text), *shlex.split(args.train)]
        found = {}
        for name, more in arms.items():
            title = f"{args.experiment} {name} {args.steps}".replace(",", "").replace(" ", "-")
            folder = str(args.work / title)
            found[name] = f"{method}:{folder}"
            if Path(folder, "config.json").exists():
                continue
            command = [sys.executable, "-m", "paceline.train", method, *shared]
            command += ["--steps", str(args.steps), "--minutes", str(_MINUTES)]
            command += ["--out", folder, "--work", f"{folder}-work"]
            command += shlex.split(more)
            self.console.log(shlex.join(command[1:]))
            try:
                subprocess.run(command, check=True)
            except subprocess.CalledProcessError as error:
                raise CommandError(
                    f"the training of {name} ended with code {error.returncode}"
                ) from error
        return found

    def prompts(self, *categories: str) -> list[list[int]]:
        """The prompts of `--prompts`, or of categories of the table in turn; `--texts` of them."""
        files = self.args.prompts or [PROMPTS / f"{name}.jsonl" for name in categories]
        found = zip_longest(*read(files, self.source, self.args.tokens).values())
        ids = (each.ids for row in found for each in row if each is not None)
        return list(islice(ids, self.args.texts))

    def documents(self, length: int) -> list[list[int]]:
        """The last `length` tokens of long prompts, each behind the ones before it."""
        files = self.args.prompts or [PROMPTS / "long.jsonl"]
        every = [each.ids for found in read(files, self.source, 0).values() for each in found]
        found = []
        for number in range(self.args.texts):
            place, text = number, list[int]()
            while len(text) < length:
                text = every[place % len(every)] + text
                place -= 1
            found.append(text[-length:])
        return found

    def contexts(self) -> list[int]:
        """Those of `--contexts` that fit the target with an answer."""
        room = self.source.config().max_position - self.args.tokens
        return [each for each in self.args.contexts if each <= room]

    @torch.inference_mode()
    def along(
        self, prompts: Sequence[list[int]], specs: Mapping[Name, str]
    ) -> Iterator[tuple[TargetRecording, Name, list[Round]]]:
        """Let the target answer each prompt, and every drafter draft along the answer."""
        drafters = {name: self.drafter(spec) for name, spec in specs.items()}
        layers = {n for each in drafters.values() for n in each.needs.hidden_state_layers}
        for number, prompt in enumerate(prompts, 1):
            text = write_answer(
                self.target, self.source, prompt, self.args.tokens, self.args.temperature,
                number, layers,
            )  # fmt: skip
            self.console.log(f"text {number} of {len(prompts)}: {len(text.continuation)} tokens")
            for name, drafter in drafters.items():
                yield text, name, list(self._rounds(drafter, text))

    def _rounds(self, drafter: Drafter, text: TargetRecording) -> Iterator[Round]:
        kv = PolicyKv(self.target, text, drafter) if drafter.needs.kv_layers else None
        place, began = 1, time.perf_counter()
        for tree, after in rounds(drafter, text, kv):
            ms = (time.perf_counter() - began) * 1e3
            accepted = accepted_tokens(tree, after)
            yield Round(place, tree, accepted, ms)
            place += accepted + 1
            if kv is not None:
                kv.verify(tree, after[:accepted])
            began = time.perf_counter()

    def lengths(
        self, by: str, prompts: Sequence[list[int]], specs: Mapping[tuple[str, float], str]
    ) -> Samples:
        """Accepted length of drafters by arm and place on the x axis, which `by` names."""
        found = samples()
        for _, (arm, x), path in self.along(prompts, specs):
            pair = sum(each.accepted + 1 for each in path), len(path)
            found[arm][f"{_LENGTH} by {by}"][x].append(pair)
        return found


def _words(line: Mapping[str, Sequence[float]]) -> str:
    return "  ".join(
        f"{x}: {value:.3g} ({low:.3g}-{high:.3g})" for x, (low, value, high) in line.items()
    )


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
                    mine[_LENGTH][x].append((answer.drafted_tokens, answer.drafted_rounds))
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
    shipped = {"shipped": f"dspark:models/smollm2/dspark,target={bench.models.target}"}
    if bench.args.steps:
        arms = {
            "DFlash": "--no-heads",
            "Markov": "",
            "Markov, 2 layers": "--layers 2",
            "Markov, block 6": "--block 6",
        }
        shipped = bench.trained("dspark", arms)
        beams = bench.trained("eagle3", {"EAGLE-3": "", "EAGLE-3.1": "--norms"})
        beams |= bench.trained("longspec", {"LongSpec": ""})
        shipped |= {name: f"{spec},depth=3" for name, spec in beams.items()}
    _by_level(bench, "position", bench.given(shipped))


def _by_level(bench: Bench, word: str, specs: Mapping[str, str]) -> None:
    """Acceptance by level of a chain where the level above was accepted; its time; thresholds."""
    specs = {name: f"{spec},widths=1,min_survival=0" for name, spec in specs.items()}

    def measure() -> Samples:
        found = samples()
        for _, name, path in bench.along(bench.prompts(*SHORT), specs):
            mine = found[name]
            mine[_LENGTH][0].append((sum(each.accepted + 1 for each in path), len(path)))
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
        config, _ = read_longspec(_LONGSPEC)
        start = f"--from {_LONGSPEC} --vocabulary {config.draft_vocab_size}"
        further = {name: f"{start} {more}" for name, more in arms.items()}
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
                line = found[name][f"{_LENGTH} by tokens of output"]
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
    library = cpu_kernels().library
    program = recorder.finish()
    if library is None:
        return partial(run_one_by_one, program, call)
    return partial(NativeProgram(library, program).run, call)


def _attend(bench: Bench, config: Any, rows: int) -> Samples:
    found = samples()
    scale = config.head_dim**-0.5
    parents = tuple((node - 1) // 2 if node else -1 for node in range(rows))  # a binary tree
    for context in bench.args.contexts:
        stop = context + rows
        q = torch.randn(rows, config.q_heads, config.head_dim).to(config.dtype)
        keys, values = (
            torch.randn(config.kv_heads, stop, config.head_dim).to(config.dtype) for _ in range(2)
        )
        plan = plan_trees([QueryBlock(0, context, parents, rows)])
        mask = torch.zeros(rows, stop, dtype=torch.bool)
        mask[:, :context] = True
        for node, parent in enumerate(parents):
            if parent >= 0:
                mask[node] |= mask[parent]
            mask[node, context + node] = True
        out = torch.empty_like(q)
        call = AttentionCall(q, [keys], [values], plan, scale, None, out, None, ())
        queries, k, v = (each[None] for each in (q.transpose(0, 1), keys, values))
        sdpa = partial(
            scaled_dot_product_attention, queries, k, v, mask, scale=scale, enable_gqa=True
        )
        ways: dict[str, Callable[[], object]] = {
            "SDPA with a mask": sdpa,
            "masked in PyTorch": partial(DenseBackend().attend, call),
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
    "context": _context, "offset": _offset, "noise": _noise, "attention": _attention,
    "dspark": _dspark, "load": _load, "selection": _selection, "budget": _budget,
    "output": _output,
}  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure and draw one experiment."""
    bench = Bench(args)
    EXPERIMENTS[args.experiment](bench)
    bench.draw()
    return 0
