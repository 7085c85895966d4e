"""What the experiments of `paceline bench papers` share: texts, drafters, figures, result files.

An experiment has cells, which a result file keeps. Cells that the file has are not measured again,
so the same command goes on where an earlier one stopped. A cell compares arms on the same texts;
its figures are ratios of sums over texts, with 95% intervals by drawing texts again, and each arm's
over the first one's with the texts paired.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest.mock import patch

import numpy as np
import torch
import uvloop
from rich.table import Table
from torch import Tensor

from paceline.bench.acceptance import load_drafters, write_answer
from paceline.bench.models import Models
from paceline.bench.prompts import FREE, PROMPTS, read
from paceline.bench.record import Results, make_console
from paceline.bench.reference import ReferenceKernels
from paceline.convert import load_decoder, open_model
from paceline.decoder import Decoder, LocalCache
from paceline.decoder.remembered import cache_file, store
from paceline.drafter import Drafter
from paceline.drafter.growth.chain import ChainGrowth, DecoderModel
from paceline.drafter.growth.sequence import TreeGrowth, chain_blocks
from paceline.drafter.methods.selfspec import SelfSpecDrafter
from paceline.kernels import (
    MAX_TREE_NODES,
    SELECTION_CHUNK,
    AttentionCall,
    Executor,
    Pass,
    Program,
    QueryBlock,
    best_candidates,
    devices,
    plan_trees,
)
from paceline.kernels.caches import from_rows
from paceline.kernels.program import PassResult
from paceline.kv.policies import load_policy
from paceline.kv.selection import PAGE
from paceline.sources.recycle import WIDTH, RecycleOptions, RecycleOwners
from paceline.text import sampling_rules
from paceline.train.acceptance import GREEDY, RecordedKv, TargetRecording, rounds
from paceline.train.phases import Phase
from paceline.tree import TokenTree, accepted_tokens
from paceline.verifier.engine.batch import BatchObserver
from paceline.verifier.engine.local import by_noise

SHORT = FREE[:3]  # categories of short prompts
LENGTH = "accepted length"  # name of this measure
_RESAMPLES = 1000
_PREFILL = 1024  # tokens of a forward pass over a document
_RECYCLE_DEPTH = 6  # maximum depth of a tree of Token Recycling
QUEST = "quest"  # an arm of `selfspec` without a policy of that name
RECYCLE = "recycle"  # an arm that is no drafter: a local source of the verifier
_SHIPPED = Path("models/smollm2")
Name = TypeVar("Name")
Item = TypeVar("Item")
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


def figures(measured: Samples) -> dict[str, Any]:
    """Of a result file: ``arms`` by measure and place, and ``over``, each over the first arm."""
    entry: dict[str, Any] = {"arms": {}, "over": {}}
    first = next(iter(measured.values()), {})
    for arm, measures in measured.items():
        for measure, line in measures.items():
            lines: list[dict[str, list[float]]] = [{}, {}]
            for x, pairs in line.items():
                if not any(below for _, below in pairs):
                    continue
                lines[0][f"{x:g}"] = estimate(pairs)
                others = first.get(measure, {}).get(x, [])
                if measures is not first and any(above for above, _ in others):
                    lines[1][f"{x:g}"] = estimate(pairs, others)
            for kind, values in zip(entry.values(), lines, strict=True):
                if values:
                    kind.setdefault(arm, {})[measure] = values
    return entry


def counted(texts: Sequence[Item]) -> Iterator[Item]:
    """The texts of a cell; says how many are done, and how long the others will take."""
    return Phase("texts", len(texts)).take(texts)


class PolicyKv(RecordedKv):
    """A recording's KV as a selection policy of the verifier shows it to a drafter.

    It is an :class:`~paceline.kv.selection.ObservedCache`.
    """

    def __init__(self, target: Decoder, text: TargetRecording, drafter: Drafter) -> None:
        super().__init__(text.cache)
        text.cache.reserve(MAX_TREE_NODES)
        self.capacity, self.device = text.cache.capacity, torch.device(target.device)
        self._target, self._text = target, text
        self._layers = [index % target.config.layers for index in drafter.needs.kv_layers]
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
        observers = BatchObserver()
        observers.add(observer, 0, block, 0)
        _run_behind(self._target, self._text, block, tokens, observers, torch.tensor([0]))
        observers.publish(self._target.config.q_heads)


def _run_behind(
    target: Decoder, text: TargetRecording, block: QueryBlock, tokens: Sequence[int],
    observers: BatchObserver | None = None, logit_rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run rows behind a prefix of a recording, which is then as it was; returns the logits of
    `logit_rows`, or of all."""
    cache, start, count = text.cache, block.start, block.length
    layers = map(cache.layer, range(target.config.layers))
    planes = [plane for both in layers for plane in both]
    kept = [plane[:, start : start + count].clone() for plane in planes]
    plan = plan_trees([block])
    result = target.forward(
        torch.tensor(tokens), plan, [cache], logit_rows=logit_rows, observer=observers
    )
    for plane, before in zip(planes, kept, strict=True):
        plane[:, start : start + count] = before
    return result.logits


def _run_tree(target: Decoder, text: TargetRecording, length: int, tree: TokenTree) -> Tensor:
    """The logits after the anchor, which is the last of `length` tokens, and after each node."""
    text.cache.reserve(MAX_TREE_NODES)
    parents = (-1, *(parent + 1 for parent in tree.parents))
    block = QueryBlock(0, length - 1, parents, len(parents))
    return _run_behind(target, text, block, [text.tokens[length - 1], *tree.tokens]).float()


def _chances(
    target: Decoder, text: TargetRecording, length: int, chain: TokenTree
) -> tuple[tuple[float, float], ...]:
    """See :class:`Round`: the sum of min(p, q), and min(1, p / q) of the token (DSpark, section
    2)."""
    logits = _run_tree(target, text, length, chain)[: len(chain.tokens)]
    wanted = (logits / text.sampling.temperature).softmax(-1).numpy()
    chances = []
    for p, token, drawn in zip(wanted, chain.tokens, chain.proposals, strict=True):
        both = np.minimum(p[drawn.tokens], drawn.probabilities).sum()
        q = drawn.probabilities[drawn.tokens == token].sum()
        chances.append((float(both), min(1.0, float(p[token] / q))))
    return tuple(chances)


def recycled(target: Decoder, text: TargetRecording) -> Iterator[Round]:
    """The rounds of Token Recycling along a text; it knows what their rows found likely, and
    nothing of the prompt or of other texts."""
    options, rules = RecycleOptions(), sampling_rules(text.sampling)
    length = text.prompt_length + 1
    source = RecycleOwners(options).start(text.tokens[:length], "", by_noise(rules))
    while length + _RECYCLE_DEPTH <= len(text.tokens):
        began = time.perf_counter()
        tree = source.propose(options.max_nodes, _RECYCLE_DEPTH)
        ms = (time.perf_counter() - began) * 1e3
        accepted = accepted_tokens(tree, text.tokens[length : length + _RECYCLE_DEPTH])
        yield Round(tree, accepted, ms)
        ids, logs = best_candidates(_run_tree(target, text, length, tree), WIDTH)
        likely = list(zip(ids.tolist(), logs.exp().tolist(), strict=True))
        source.extend(text.tokens[length : length + accepted + 1], tree, likely)
        length += accepted + 1


class _QuestKernels(ReferenceKernels):
    """Attention to the pages whose keys may score highest (Tang et al., "Quest", section 3.2).

    The pages are estimated again for every row and KV head. The newest page, which is not whole, is
    always read.
    """

    def __init__(self, budget: Callable[[int], int]) -> None:
        """Read at most ``budget(n)`` of n positions."""
        self._budget = budget

    def hidden(self, call: AttentionCall, index: int, queries: Tensor, keys: Tensor) -> Tensor:
        hidden, start = super().hidden(call, index, queries, keys), call.plan.blocks[index].start
        pages, rest = divmod(start, PAGE)
        count = max(0, self._budget(start) - rest) // PAGE
        if count >= pages:
            return hidden
        whole = keys[:, : pages * PAGE].unflatten(1, (pages, PAGE))
        low, high = whole.amin(2), whole.amax(2)  # four times as fast as both at once
        # Bounds of a page's scores, summed over the heads that share it: `[Hkv, nodes, pages]`.
        bounds = queries.clamp(min=0).sum(1) @ high.mT + queries.clamp(max=0).sum(1) @ low.mT
        best = bounds.topk(count).indices
        unread = torch.ones(*best.shape[:2], pages, dtype=torch.bool).scatter_(2, best, False)
        hidden = hidden.repeat(len(keys), 1, 1)
        hidden[..., : pages * PAGE] |= unread.repeat_interleave(PAGE, 2)
        return hidden.unsqueeze(1)


class _QuestExecutor(Executor):
    """Runs a program one operation at a time, with Quest's attention."""

    def __init__(self, program: Program, budget: Callable[[int], int]) -> None:
        self._program, self.native = program, None
        self._kernels = _QuestKernels(budget)

    def run(self, call: Pass) -> PassResult:
        with patch.dict(devices.LOADED, cpu=self._kernels):
            return super().run(call)


def use_quest(drafter: SelfSpecDrafter) -> None:
    """Let a drafter of chains read pages that it estimates for every token, as MagicDec with Quest
    does. They are pages of its copy of all KV."""
    decoder = copy(drafter.decoder)
    decoder._executor = _QuestExecutor(decoder._record(), drafter.needs.kv_budget_at)
    drafter.needs = replace(drafter.needs, kv_budget=0)
    drafter.growth = TreeGrowth(ChainGrowth(DecoderModel(decoder), drafter.settings))


@dataclass(frozen=True)
class Round:
    """One round along a text."""

    tree: TokenTree  # the drafted tokens
    accepted: int  # how many the target accepted
    ms: float  # time of the draft
    # Of a chain for rejection sampling, for each node where it is reached: the probability that a
    # token that is drawn is accepted, and that this token is.
    chances: tuple[tuple[float, float], ...] = ()


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
        collected = measure()
        if isinstance(collected, Coroutine):
            collected = uvloop.run(collected)
        measured = figures(collected)
        lengths = (
            len(pairs)
            for arm in collected.values()
            for line in arm.values()
            for pairs in line.values()
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

    @property
    def shipped(self) -> Path:
        """Folder of the drafters that are measured by default."""
        return _SHIPPED if self.args.target else self.models.folder

    def given(self, default: Mapping[str, str]) -> dict[str, str]:
        """Specifications by name: those of `--drafter`, else these."""
        specs = dict(spec.split("=", 1) for spec in self.args.drafter) or dict(default)
        self.results.uses(specs)
        return specs

    def prompts(self) -> list[list[int]]:
        """The prompts of `--prompts`, or short ones of the table in turn; `--texts` of them."""
        files = self.args.prompts or [PROMPTS / f"{name}.jsonl" for name in SHORT]
        rows = zip_longest(*read(files, self.source, self.args.tokens).values())
        ids = (prompt.ids for row in rows for prompt in row if prompt is not None)
        return list(islice(ids, self.args.texts))

    def documents(self, length: int) -> list[list[int]]:
        """The last `length` tokens of long prompts, each behind the ones before it."""
        every = self._long_prompts
        documents = []
        for number in range(self.args.texts):
            place, text = number, list[int]()
            while len(text) < length:
                text = every[place % len(every)] + text
                place -= 1
            documents.append(text[-length:])
        return documents

    @cached_property
    def _long_prompts(self) -> list[list[int]]:
        files = self.args.prompts or [PROMPTS / "long.jsonl"]
        return [prompt.ids for texts in read(files, self.source, 0).values() for prompt in texts]

    def continued(self, number: int) -> dict[int, TargetRecording]:
        """What the target writes behind the first tokens of a document, by their number: at each of
        the contexts, greedily, whether or not it ends its text.

        The document is read once for all of them: a long prompt and those behind it. What was
        written is kept in the user's cache. There is neither KV nor a hidden state.
        """
        contexts, count, every = self.contexts(), self.args.tokens, self._long_prompts
        document = list[int]()
        while len(document) < contexts[-1]:
            document += every[number % len(every)]
            number += 1
        written: dict[int, list[int]] = {}
        config = self.source.config()
        cache = LocalCache(config)
        for length in contexts:
            facts = self.source.fingerprint(), self.weights, count, *document[:length]
            file = cache_file("bench", facts)
            if not file.is_file():
                store(file, self._write(document[:length], cache, count))
            written[length] = json.loads(file.read_text())
        return {
            length: TargetRecording(
                [*document[:length], *text], length, config.vocab_size, GREEDY, LocalCache(config)
            )
            for length, text in written.items()
        }

    def _write(self, prompt: list[int], cache: LocalCache, count: int) -> list[int]:
        """The target's next tokens, with the KV of some of the prompt; it has that of all then."""
        text = [*prompt]
        while len(text) < len(prompt) + count:
            stop = min(len(cache) + _PREFILL, len(text))
            part = text[len(cache) : stop]
            plan = plan_trees(chain_blocks(0, len(cache), stop))
            cache.reserve(len(part))
            last = torch.tensor([len(part) - 1])
            result = self.target.forward(torch.tensor(part), plan, [cache], logit_rows=last)
            cache.commit(range(len(part)))
            if stop == len(text):
                text.append(int(result.logits.argmax()))
        cache.truncate(len(prompt))
        return text[len(prompt) :]

    def contexts(self) -> list[int]:
        """Those of `--contexts` that fit the target with an answer."""
        room = self.source.config().max_position - self.args.tokens
        return [length for length in self.args.contexts if length <= room]

    @torch.inference_mode()
    def along(
        self, prompts: Sequence[list[int]], specs: Mapping[Name, str], rejection: bool = False
    ) -> Iterator[tuple[Name, list[Round]]]:
        """Let the target answer each prompt, and every drafter draft along the answer, for
        rejection sampling if asked; its rounds are accepted by equality still."""
        drafters = {name: self.drafter(spec) for name, spec in specs.items() if spec != RECYCLE}
        layers = {n for drafter in drafters.values() for n in drafter.needs.hidden_state_layers}
        for number, prompt in enumerate(counted(prompts), 1):
            text = write_answer(
                self.target, self.source, prompt, self.args.tokens, self.args.temperature,
                number, layers,
            )  # fmt: skip
            if rejection:
                text = replace(text, sampling=replace(text.sampling, acceptance="rejection"))
            for name in specs:
                drafter = drafters.get(name)
                path = recycled(self.target, text) if drafter is None else self.path(drafter, text)
                yield name, list(path)

    def drafter(self, spec: str) -> Drafter:
        """The drafter of a specification, loaded once; its method may be `quest`."""
        if spec not in self._drafters:
            method, _, rest = spec.partition(":")
            given = f"drafter={f'selfspec:{rest}' if method == QUEST else spec}"
            [(_, drafter)] = load_drafters([given], self.models.target)
            if method == QUEST:
                use_quest(cast(SelfSpecDrafter, drafter))
            self._drafters[spec] = drafter
        return self._drafters[spec]

    def path(self, drafter: Drafter, text: TargetRecording) -> Iterator[Round]:
        """The rounds of a drafter along a text, whose KV it reads by its policy."""
        kv = PolicyKv(self.target, text, drafter) if drafter.needs.kv_layers else None
        began, length = time.perf_counter(), text.prompt_length + 1
        for tree, after in rounds(drafter, text, kv):
            ms = (time.perf_counter() - began) * 1e3
            accepted = accepted_tokens(tree, after)
            chances = _chances(self.target, text, length, tree) if tree.proposals else ()
            yield Round(tree, accepted, ms, chances)
            length += accepted + 1
            if kv is not None:
                kv.verify(tree, after[:accepted])
            began = time.perf_counter()

    def lengths(
        self, by: str, prompts: Sequence[list[int]], specs: Mapping[tuple[str, float], str]
    ) -> Samples:
        """Accepted length of drafters by arm and place on the x axis, which `by` names."""
        measured = samples()
        for (arm, x), path in self.along(prompts, specs):
            pair = sum(draft.accepted + 1 for draft in path), len(path)
            measured[arm][f"{LENGTH} by {by}"][x].append(pair)
        return measured


def _words(line: Mapping[str, Sequence[float]]) -> str:
    return "  ".join(
        f"{x}: {value:.3g} ({low:.3g}-{high:.3g})" for x, (low, value, high) in line.items()
    )
