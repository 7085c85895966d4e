"""A small language model with the target's tokenizer as a tree drafter.

Candidates are ranked with the verifier's own noise. The drafter keeps its own KV. Rounds that wait
together share every forward pass.

On a CPU trees with siblings are drafted in one native call, and accepted nodes are fed again as
text. Chains (:mod:`paceline.drafter.growth.chain`) may grow on while the verifier works: accepted
nodes stay in the slots where a round computed them, and rejected ones are overwritten. Under a KV
budget (option ``context``) a round attends to a copy of selected positions, or to what was kept of
the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from paceline.checks import check_range
from paceline.convert import ModelSource, load_config, prepare
from paceline.decoder import Decoder, LocalCache
from paceline.drafter.growth.chain import ChainGrowth, DecoderModel, DecoderSequence
from paceline.drafter.growth.levels import HostDraft, LevelGrowth, text_pass
from paceline.drafter.growth.native import NativeGrowth
from paceline.drafter.growth.observed import ObservedRows, TextScores, TopChunks
from paceline.drafter.growth.sequence import TreeGrowth, TreeSettings
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
from paceline.kernels import CHUNK
from paceline.kernels.draft import NativeDraft
from paceline.kernels.structures import DraftText
from paceline.kv.selection import streaming_positions
from paceline.service.phases import packing

POLICIES = ("streaming", "chunk_topk")
KEPT = ("all", "budget")

OBSERVED = 64  # newest rows of a pass over text whose attention is scored, in tokens


class LmSequence(DecoderSequence):
    """A generation that ``lm`` drafts for.

    The first ``cached`` tokens of the text have their KV in the cache, followed by the nodes of the
    newest chain that were fed. The rest of the text, which includes the anchor when a round begins,
    is fed with the round. A sequence whose KV does not fit frees it and drafts no more.

    Under a KV budget a round uses a second cache with copies of selected positions. The round's
    tokens are fed to it, and the KV of those that are text is copied back to the whole cache, so
    the budget may change between rounds. With ``keep=budget`` there is one cache: before the first
    round all but the selected positions are dropped, and what follows is appended.
    """

    def __init__(self, drafter: LmDrafter, generation: GenerationInfo) -> None:
        super().__init__(drafter, generation)
        self._drafter = drafter
        self._cache: LocalCache | None = None
        self._sparse: LocalCache | None = None
        # Positions of the text in the first slots of the cache that a round attends to, if they
        # were selected.
        self.selected = torch.empty(0, dtype=torch.int64)
        self._dropped = 0  # tokens of the text whose KV was computed and dropped
        self._begun = False  # whether there was a round
        self._scores = TopChunks() if drafter.options.kv_policy == "chunk_topk" else None
        self._given_up = False

    @property
    def cache(self) -> LocalCache:
        """Its KV. Raises ``RuntimeError`` if it is not allocated yet, or freed."""
        if self._cache is None:
            raise RuntimeError("this sequence has no KV: it was not allocated yet, or is freed")
        return self._cache

    @property
    def round_cache(self) -> LocalCache:
        """Its KV, or the copy of selected positions."""
        return self.cache if self._sparse is None else self._sparse

    @property
    def cached(self) -> int:
        return 0 if self._cache is None else len(self._cache) + self._dropped

    @property
    def slot(self) -> int:
        return len(self.round_cache)

    @property
    def slots(self) -> int:
        """KV slots that it occupies."""
        return sum(cache.capacity for cache in (self._cache, self._sparse) if cache is not None)

    @property
    def backlog(self) -> int:
        exhausted = self._given_up or self.length > self._drafter.decoder.config.max_position
        return 0 if exhausted else max(0, self.length - 1 - self.cached)

    def warm(self, limit: int) -> None:
        count = min(limit, self.backlog)
        if count == 0 or not self._reserve(count):
            return
        begin, end = self.cached, self.cached + count
        observer = None
        rows = range(max(0, self.length - 1 - OBSERVED - begin), count)
        if self._scores is not None and rows:
            observed = ObservedRows(self._scores, rows, self.cache, torch.arange(end))
            observer = TextScores([observed])
        part = self.text_part(0, begin, end, len(self.cache))
        self._drafter.model.read(HostDraft([text_pass([part])], [self.cache], observer=observer))
        self.cache.commit(range(count))

    def begin_round(self) -> bool:
        # What is selected first is selected of the whole prompt.
        unread = CHUNK if self._begun or not self._drafter.options.context else 0
        while self.backlog > unread:
            self.warm(CHUNK)
        if self._given_up:
            return False
        if self.cached == self.length:
            # Nothing is new: the logits after the anchor are needed once more.
            self.cache.truncate(len(self.cache) - 1)
        if self._bounded and not self._begun:
            self._drop()
        self._begun = True
        more = self.length - self.cached + self.room
        return self._reserve(more) and (self._bounded or self._select())

    def continue_round(self) -> bool:
        return self._sparse is None and self._reserve(self.length - self.cached + self.room)

    def goes_on(self) -> bool:
        return self._sparse is None and super().goes_on()  # else the copy ends with its round

    def fill(self, text: DraftText) -> None:
        text.first, text.length = self.cached, self.length - 1
        self._fresh = torch.tensor(self.newest(text.first, self.length))
        text.tokens = self._fresh.data_ptr()
        assert self.cache.table is not None
        text.context = self.cache.table.address

    def keep_text(self, count: int) -> None:
        if not count:
            return
        if self._sparse is None:
            self.cache.commit(range(count))
            return
        begin = len(self._sparse)
        self._sparse.commit(range(count))
        self.cache.take(self._sparse, range(begin, begin + count))

    def observed_rows(self, stop: int) -> list[ObservedRows]:
        if self._scores is None or self.chain or self._sparse is None:
            return []
        positions = torch.cat([self.selected, torch.arange(self.cached, self.length)])
        rows = range(stop - 1, stop)
        return [ObservedRows(self._scores, rows, self.round_cache, positions)]

    def close(self) -> None:
        self._given_up = True
        self.chain = []
        self._drafter.kv_slots -= self.slots
        self._cache = self._sparse = None

    @property
    def _bounded(self) -> bool:
        return self._drafter.options.keep == "budget"

    def _drop(self) -> None:
        """Drop the KV of all but selected positions (BudgetDraft, algorithm 2)."""
        budget, whole = self._drafter.options.context, self.cache
        scores, self._scores = self._scores, None
        if len(whole) <= budget:
            return
        before = self.slots
        self.selected = (
            streaming_positions(len(whole), budget)
            if scores is None
            else scores.select(len(whole), budget, newest=0)
        )
        self._dropped = len(whole) - len(self.selected)
        self._cache = LocalCache(self._drafter.decoder.config, self._drafter.decoder.device)
        self.cache.take(whole, self.selected)
        self._drafter.kv_slots += self.slots - before

    def _select(self) -> bool:
        """Select what the round attends to. Returns False if there is no memory for it."""
        budget, length = self._drafter.options.context, self.cached
        before = self.slots
        if not 0 < budget < length:
            self._sparse = None
            return self._count(before)
        self.selected = (
            streaming_positions(length, budget)
            if self._scores is None
            else self._scores.select(length, budget, newest=budget // 4)
        )
        if self._sparse is None:
            self._sparse = LocalCache(self._drafter.decoder.config, self._drafter.decoder.device)
        self._sparse.truncate(0)
        self._sparse.take(self.cache, self.selected)
        self._sparse.reserve(self.length - length + self.room)
        return self._count(before)

    def _reserve(self, slots: int) -> bool:
        """Reserve slots behind the cached tokens. Return False if there is no memory for them."""
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
    widths: tuple[int, ...] = (4, 4, 4, 4)
    max_nodes: int = 16
    min_survival: float = 0.03
    formats: ClassVar[tuple[str, ...]] = WEIGHTS

    # KV budget: maximum number of positions that a round attends to; 0: all. The tokens since the
    # last round and the tree are not counted. Unit: tokens.
    context: int = 0
    # Positions within the budget: streaming (the first and the newest) or chunk_topk (chunks of 8
    # by cumulative attention; where all KV is kept a quarter of the budget for the newest).
    kv_policy: str = "streaming"
    # KV that is kept: all, so that a round may select any position, or budget: `context` positions
    # of the prompt, and all that follow.
    keep: str = "all"
    # Maximum memory for the KV of all sequences. A sequence that does not fit drafts no more. Unit:
    # GiB.
    kv_gib: float = 4.0

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
    method: ClassVar[str] = "lm"
    label: ClassVar[str] = "small language model"
    cpu_weights: ClassVar[str] = "int8"
    recipe: ClassVar[str] = "paceline.train.recipes.lm:LmRecipe"
    growth: TreeGrowth

    def __init__(self, decoder: Decoder, options: LmOptions, fit: Fit, size: int) -> None:
        self.decoder, self.model, self.options = decoder, DecoderModel(decoder), options
        self.fit, self.weight_bytes, self.shape = fit, size, decoder.config
        self.settings = settings = TreeSettings.of(
            decoder.config, options, torch.device(decoder.device)
        )
        self.max_nodes, self.max_depth = settings.max_nodes, settings.max_depth
        # Maximum number of KV slots of all sequences, and how many they occupy.
        self.kv_limit = int(options.kv_gib * (1 << 30) / decoder.config.kv_bytes_per_token)
        self.kv_slots = 0
        chains, levels = ChainGrowth(self.model, settings), LevelGrowth(self.model, settings)
        self.growth = TreeGrowth(*self._native_growth(), chains, levels)

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
        device = resources.device.torch
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

    def start(self, generation: GenerationInfo) -> LmSequence:
        return LmSequence(self, generation)
