"""A small language model with the target's tokenizer as a tree drafter.

Trees grow level by level (:mod:`paceline.drafter.growth.beam`), ranked with the verifier's own
noise. The drafter keeps its own KV. Rounds that wait together share every forward pass.

On a CPU trees with siblings are drafted in one native call, and accepted nodes are fed again as
text. Chains, which may grow on while the verifier works, grow by levels: accepted nodes stay in the
slots where a round computed them, up to compaction, and rejected ones are overwritten. So do trees
under a KV budget (option ``context``): a round attends to a copy of selected positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.checks import check_range
from paceline.convert import ModelSource, load_config, prepare
from paceline.decoder import Decoder, KVCacheView, LocalCache
from paceline.drafter.growth.host import HostGrowth, forward_parts
from paceline.drafter.growth.native import NativeGrowth
from paceline.drafter.growth.sequence import GrownSequence, TreeGrowth
from paceline.drafter.growth.text import GrownText, PassPart, TextPasses, TreeSettings
from paceline.drafter.methods.base import (
    SECTION,
    Drafter,
    Fit,
    GenerationInfo,
    Resources,
    check_choice,
    parse_options,
)
from paceline.drafter.methods.checkpoint import (
    load_model,
    read_fit,
    refuse_recurrent,
    required_folder,
)
from paceline.drafter.methods.options import TreeOptions, check_context
from paceline.formats import WEIGHTS
from paceline.kernels import CHUNK, SELECTION_CHUNK, Probe, TreePlan, attention_weights, best_chunks
from paceline.kernels.caches import span
from paceline.kernels.draft import NativeDraft
from paceline.kernels.structures import DraftText
from paceline.kv.selection import streaming_positions
from paceline.service.phases import packing

POLICIES = ("streaming", "chunk_topk")
KEPT = ("all", "budget")

OBSERVED = 64  # newest rows of a pass over text whose attention is scored, in tokens


class TopChunks:
    """The chunks of 8 with the most cumulative attention, and all newer positions.

    See BudgetDraft, section 3.4. At least a quarter of the budget goes to the newest positions,
    because cumulative scores say little of positions that few rounds have attended to. Passes over
    the prompt attend to all of it, and the scores of their newest rows are the first ones. Rounds
    attend to selected positions only and add to the scores of those: a chunk that is never selected
    keeps its score from the prompt, as in the paper.
    """

    def __init__(self) -> None:
        self._scores = torch.zeros(0)
        self._length = 0

    def add(self, positions: Tensor, weights: Tensor) -> None:
        """Add attention weights, float ``[n]``, to the scores of rising positions, ``[n]``."""
        self._length = max(self._length, int(positions[-1]) + 1)
        if self._length > len(self._scores):
            more = torch.zeros(2 * self._length - len(self._scores))
            self._scores = torch.cat([self._scores, more])
        self._scores[positions] += weights

    def select(self, length: int, budget: int) -> Tensor:
        """Return at most ``budget`` of the first ``length`` positions: int64, rising."""
        chunks = min(self._length, length - budget // 4) // SELECTION_CHUNK
        newer = torch.arange(chunks * SELECTION_CHUNK, length)
        count = min(chunks, (budget - len(newer)) // SELECTION_CHUNK)
        if count <= 0 or length <= budget:
            return torch.arange(max(0, length - budget), length)
        scores = self._scores[: chunks * SELECTION_CHUNK].unflatten(0, (chunks, SELECTION_CHUNK))
        best = best_chunks(scores.sum(-1)[None], SELECTION_CHUNK, count)[0]
        return torch.cat([best, newer])

    def drop(self, positions: Tensor) -> None:
        """Select chunks with any of these positions, int64 ``[n]``, only if no other is left."""
        known = positions[positions < self._length]
        self._scores = self._scores.index_fill(0, known, -torch.inf)


@dataclass(frozen=True)
class ObservedRows:
    """Rows of a pass whose attention is added to the scores."""

    scores: TopChunks  # receives the weights
    rows: range  # the last rows of one sequence in the packed pass
    cache: KVCacheView  # the cache that they attend to
    positions: Tensor  # positions of its first slots, up to the last row's, int64 ``[n]``


class TextScores:
    """Adds up attention weights over layers and heads; an ``AttentionObserver``."""

    def __init__(self, observed: Sequence[ObservedRows]) -> None:
        self._observed = observed

    def probes(self, layer: int) -> Sequence[Probe]:
        """Return none: the weights are computed here, of few rows and their own chunk too."""
        return ()

    def rows(self, layer: int) -> Sequence[int]:
        return [row for each in self._observed for row in each.rows]

    def attended(self, layer: int, q: Tensor) -> None:
        parts = q.split([len(each.rows) for each in self._observed])
        for each, rows in zip(self._observed, parts, strict=True):
            keys, _ = each.cache.layer(layer)
            weights = attention_weights(rows, span(keys, 0, len(each.positions)))
            each.scores.add(each.positions, weights.cpu())


class LmPasses(TextPasses):
    """Passes of ``lm`` for one generation.

    The first ``cached`` tokens of the text have their KV in the cache, followed by the nodes of the
    newest tree that were fed. The rest of the text, which includes the anchor when a round begins,
    is fed with the round. A sequence whose KV does not fit frees it and drafts no more.

    Under a KV budget a round uses a second cache with copies of selected positions. The round's
    tokens are fed to it, and the KV of those that are accepted is copied back to the whole cache,
    so the budget may change between rounds. With ``keep=budget`` there is one cache, which a round
    begins by dropping all but the selected positions.
    """

    def __init__(self, drafter: LmDrafter, text: GrownText) -> None:
        self._drafter, self.text = drafter, text
        self._cache: LocalCache | None = None
        self._sparse: LocalCache | None = None
        self.selected = torch.empty(0, dtype=torch.int64)
        """Positions of the text in the first slots of the cache that a round attends to, if they
        were selected."""
        self._dropped = 0  # tokens of the text whose KV was computed and dropped
        self._scores = TopChunks() if drafter.options.kv_policy == "chunk_topk" else None
        self._given_up = False

    @property
    def cache(self) -> LocalCache:
        """Its KV, once :meth:`prepare` or :meth:`warm` has allocated it. Raises ``RuntimeError``:
        it is not allocated yet, or freed."""
        if self._cache is None:
            raise RuntimeError("this sequence has no KV: it was not allocated yet, or is freed")
        return self._cache

    @property
    def round_cache(self) -> LocalCache:
        """The cache that a round attends to: its KV, or the copy of selected positions."""
        return self.cache if self._sparse is None else self._sparse

    @property
    def cached(self) -> int:
        """Tokens of the text whose KV was computed."""
        return 0 if self._cache is None else len(self._cache) + self._dropped

    @property
    def slots(self) -> int:
        """KV slots that it occupies."""
        return sum(cache.capacity for cache in (self._cache, self._sparse) if cache is not None)

    @property
    def backlog(self) -> int:
        exhausted = self._given_up or self.text.length > self._drafter.decoder.config.max_position
        return 0 if exhausted else max(0, self.text.length - 1 - self.cached)

    def extend(self, tokens: Sequence[int]) -> None:
        if self.text.beam is not None and tokens:
            self._commit(self.text.beam.fed_path(tokens))

    def warm(self, limit: int) -> None:
        count = min(limit, self.backlog)
        if count == 0 or not self._reserve(count):
            return
        begin, end = self.cached, self.cached + count
        observer = None
        if self._scores is not None and count == self.backlog:
            rows = range(max(0, count - OBSERVED), count)
            observed = ObservedRows(self._scores, rows, self.cache, self.positions(end))
            observer = TextScores([observed])
        part = self.text.text_part(0, begin, end, len(self.cache))
        self._drafter.forward([part], [self.cache], observer)
        self.cache.commit(range(count))

    def prepare(self) -> bool:
        while self.backlog > CHUNK:
            self.warm(CHUNK)
        if self._given_up:
            return False
        if self.cached == self.text.length:
            # Nothing is new: the logits after the anchor are needed once more.
            self.cache.truncate(len(self.cache) - 1)
        if self._bounded:
            self._drop()
            return self._reserve(self.text.length - self.cached + self.text.room)
        return self._reserve(self.text.length - self.cached + self.text.room) and self._select()

    def begin_ahead(self) -> bool:
        # A copy of selected positions ends with its round, and only a new round drops any.
        return self._sparse is None and not self._bounded and self.text.chain_grows()

    def keep_ahead(self) -> bool:
        return self._reserve(self.text.room)

    def part(self, index: int) -> PassPart:
        """Return what to feed for the next level; ``index`` is that of its cache in the pass."""
        slot = len(self.round_cache)
        if self.text.tree.level:
            return self.text.tree_part(index, slot)
        return self.text.text_part(index, self.cached, self.text.length, slot)

    def add_level(self, logits: Tensor) -> None:
        """Add a level to the tree from the logits of :meth:`part`, ``[frontier, V]``."""
        if not self.text.tree.level:
            self._commit(range(self.text.length - self.cached))
        self.text.grow(logits)

    def fill(self, text: DraftText) -> None:
        cache = self.cache
        text.first, text.length = self.cached, self.text.length - 1
        self._fed = torch.tensor(self.text.newest(text.first, self.text.length))
        text.tokens = self._fed.data_ptr()
        assert cache.table is not None
        text.context = cache.table.address
        cache.commit(range(self.text.length - self.cached))

    def observed_rows(self, stop: int) -> list[ObservedRows]:
        """Return the rows of its part to be scored; the part ends before row ``stop``."""
        scores = self._scores
        everything = self._sparse is None and not self._bounded
        if scores is None or self.text.tree.level > 0 or everything:
            return []
        positions = self.positions(self.text.length)
        if self._sparse is not None:
            positions = torch.cat([self.selected, torch.arange(self.cached, self.text.length)])
        return [ObservedRows(scores, range(stop - 1, stop), self.round_cache, positions)]

    def close(self) -> None:
        self._given_up = True
        self._drafter.kv_slots -= self.slots
        self._cache = self._sparse = None

    def _commit(self, nodes: Sequence[int]) -> None:
        """Keep the KV of these nodes of the newest level as text."""
        if self._sparse is None:
            self.cache.commit(nodes)
            return
        begin = len(self._sparse)
        self._sparse.commit(nodes)
        self.cache.take(self._sparse, range(begin, begin + len(nodes)))

    @property
    def _bounded(self) -> bool:
        return self._drafter.options.keep == "budget"

    def positions(self, stop: int) -> Tensor:
        """Return the positions below ``stop`` of the slots of its cache, int64 ``[n]``."""
        if not self._dropped:
            return torch.arange(stop)
        return torch.cat([self.selected, torch.arange(len(self.selected) + self._dropped, stop)])

    def _drop(self) -> None:
        """Drop the KV of all but selected positions (BudgetDraft, algorithm 2)."""
        budget = self._drafter.options.context
        if len(self.cache) <= budget:
            return
        held, scores = self.positions(self.cached), self._scores
        slots = streaming_positions(len(held), budget)
        if scores is not None:
            slots = torch.isin(held, scores.select(self.cached, budget)).nonzero()[:, 0]
            scores.drop(held[~torch.isin(held, held[slots])])
        before, source = self.slots, self.cache
        self.selected = held[slots]
        self._dropped += len(held) - len(slots)
        if source.capacity > 2 * (budget + CHUNK + self.text.room):  # that of the whole prompt
            self._cache = LocalCache(self._drafter.decoder.config, self._drafter.decoder.device)
        self.cache.truncate(0)
        self.cache.take(source, slots)
        self._drafter.kv_slots += self.slots - before

    def _select(self) -> bool:
        """Select what the round attends to. Returns False if there is no memory for it."""
        budget, length = self._drafter.options.context, self.cached
        before = self.slots
        if not 0 < budget < length:
            self._sparse = None
            return self._count(before)
        select = streaming_positions if self._scores is None else self._scores.select
        self.selected = select(length, budget)
        if self._sparse is None:
            self._sparse = LocalCache(self._drafter.decoder.config, self._drafter.decoder.device)
        self._sparse.truncate(0)
        self._sparse.take(self.cache, self.selected)
        self._sparse.reserve(self.text.length - length + self.text.room)
        return self._count(before)

    def _reserve(self, slots: int) -> bool:
        """Reserves slots behind the cached tokens. Returns False if there is no memory for them."""
        before = self.slots
        if self._cache is None:
            self._cache = LocalCache(self._drafter.decoder.config, self._drafter.decoder.device)
        self._cache.reserve(slots)
        return self._count(before)

    def _count(self, before: int) -> bool:
        """Count the change of slots; over the limit, frees everything and returns False."""
        self._drafter.kv_slots += self.slots - before
        if self._drafter.kv_slots <= self._drafter.kv_limit:
            return True
        self.close()
        return False


@dataclass(frozen=True)
class LmOptions(TreeOptions):
    """Options of ``lm``."""

    widths: tuple[int, ...] = (4, 4, 4, 4)
    max_nodes: int = 16
    min_survival: float = 0.03
    formats: ClassVar[tuple[str, ...]] = WEIGHTS

    context: int = 0
    """KV budget: most positions of the text that a round attends to; 0: all. The tokens since the
    last round and the tree are not counted. Unit: tokens."""

    kv_policy: str = "streaming"
    """Positions within the budget: streaming (the first and the newest) or chunk_topk (the newest,
    and chunks of 8 by cumulative attention)."""

    keep: str = "all"
    """KV that is kept: all, so that a round may select any position, or budget: what a round does
    not select is dropped, and a sequence holds ``context`` positions after its prompt."""

    kv_gib: float = 4.0
    """Most memory for the KV of all sequences. A sequence that does not fit drafts no more.
    Unit: GiB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_drafted()
        check_range("kv_gib", self.kv_gib, 0.001, 1 << 20)
        check_context(self.context)
        check_choice("kv_policy", self.kv_policy, POLICIES)
        check_choice("keep", self.keep, KEPT)
        if self.keep == "budget" and not self.context:
            raise ValueError("option keep='budget': expected a KV budget, as in context=512")


class LmDrafter(Drafter):
    """The method ``lm``."""

    method: ClassVar[str] = "lm"
    label: ClassVar[str] = "small language model"
    recipe: ClassVar[str] = "paceline.train.recipes.lm:LmRecipe"
    cpu_weights: ClassVar[str] = "int8"
    growth: TreeGrowth

    def __init__(self, decoder: Decoder, options: LmOptions, fit: Fit, size: int) -> None:
        self.decoder, self.options = decoder, options
        self.fit, self.weight_bytes, self.shape = fit, size, decoder.config
        self.settings = settings = TreeSettings.of(decoder.config, options)
        self.max_nodes, self.max_depth = settings.max_nodes, settings.max_depth
        self.kv_limit = int(options.kv_gib * (1 << 30) / decoder.config.kv_bytes_per_token)
        """Most KV slots of all sequences."""
        self.kv_slots = 0  # KV slots that they occupy
        self.growth = TreeGrowth(HostGrowth(self), *self._native_growth())

    def _native_growth(self) -> list[NativeGrowth]:
        decoder, options = self.decoder, self.options
        siblings = max(options.widths, default=1) > 1
        if decoder.native is None or not siblings or options.context:
            return []
        tokens = torch.arange(decoder.config.vocab_size)
        draft = NativeDraft(decoder.native, decoder.config.kv_dtype, tokens)
        return [NativeGrowth(draft, decoder.rope, self.settings)]

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> LmDrafter:
        folder = required_folder(cls.method, folder)
        parsed = parse_options(LmOptions, options)
        fit = read_fit(folder)
        device = resources.device
        model = load_model(
            folder, resources, prepare, folder, parsed.weights, None, device, packing
        )
        decoder = load_model(folder, resources, model.decoder, device, numerics=resources.numerics)
        refuse_recurrent(cls.method, decoder.config)
        return cls(decoder, parsed, fit, model.description.source_bytes)

    @classmethod
    def layout(cls, described: Mapping[str, Any]) -> str | None:
        method = described.get(SECTION, {}).get("method", cls.method)
        other = method != cls.method or "speculators_model_type" in described
        return None if other else "transformers"

    @classmethod
    def inspect(cls, folder: Path, target: ModelSource | None) -> Mapping[str, str]:
        return {"vocabulary": f"{load_config(folder).vocab_size:,} tokens"}

    def start(self, generation: GenerationInfo) -> GrownSequence[LmPasses]:
        text = GrownText(self.settings, generation)
        return GrownSequence(self.growth, LmPasses(self, text))

    def grow_level(self, growing: Sequence[LmPasses]) -> None:
        parts = [each.part(index) for index, each in enumerate(growing)]
        stops = accumulate(len(part.tokens) for part in parts)
        observed = [
            rows
            for each, stop in zip(growing, stops, strict=True)
            for rows in each.observed_rows(stop)
        ]
        logits = self.forward(
            parts,
            [each.round_cache for each in growing],
            TextScores(observed) if observed else None,
        )
        for each, its in zip(growing, logits, strict=True):
            each.add_level(its)

    def forward(
        self, parts: Sequence[PassPart], caches: Sequence[LocalCache], observer: TextScores | None
    ) -> list[Tensor]:
        """Logits of the parts of a pass, see :func:`forward_parts`."""

        def run(tokens: Tensor, plan: TreePlan, rows: Tensor) -> Tensor:
            decoder = self.decoder
            return decoder.forward(tokens, plan, caches, logit_rows=rows, observer=observer).logits

        return forward_parts(run, parts, self.decoder.device)
