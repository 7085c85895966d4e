"""The target drafts for itself, with fewer bits of its weights or fewer positions of its KV.

After Tiwari et al., "QuantSpec" (4-bit weights), Yue et al., "SpecAttn: Co-Designing Sparse
Attention with Self-Speculative Decoding" (policy ``verified``), and Sadhukhan et al., "MagicDec"
(``streaming``, ``quest``). The prefix that the verifier has committed is sparse. Tokens after it
are dense: their keys and values are computed here.

A copy of the target agrees with it far more often than its probabilities say, so a chain goes on
to a small survival (``min_survival``); the verifier corrects the confidences while it serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from paceline.checks import check_range
from paceline.convert import prepare
from paceline.decoder import Decoder, LocalCache
from paceline.drafter.growth.host import HostGrowth, forward_parts
from paceline.drafter.growth.sequence import GrownSequence, TreeGrowth
from paceline.drafter.growth.text import GrownText, PassPart, TextPasses, TreeSettings, required
from paceline.drafter.kv import KvOptions
from paceline.drafter.methods.base import (
    Drafter,
    Fit,
    GenerationInfo,
    LoadError,
    Needs,
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
from paceline.kernels import TreePlan
from paceline.service.phases import packing

MAX_NEW_TOKENS = 128
"""Maximum number of tokens behind the target's KV that a round feeds. With more of them, as after
a lost connection, catching up would take longer than a draft saves: the tree is empty.
Unit: tokens."""

"""Longest wait for the verifier's weights. Unit: seconds."""


class SelfSpecPasses(TextPasses):
    """Passes of ``selfspec`` for one generation.

    Each round begins with a cache of the target's selected positions, in any order, since their
    keys are rotated already. They are followed by the tokens that the target's KV does not contain
    yet, which include the anchor, and then by the nodes of the tree.
    """

    def __init__(
        self, drafter: SelfSpecDrafter, text: GrownText, generation: GenerationInfo
    ) -> None:
        self._drafter, self.text = drafter, text
        self.kv = required(generation.kv, "selfspec", "KV")
        self.cache = LocalCache(drafter.decoder.config, drafter.decoder.device)
        self._begin = self._slot = self._fed = 0

    def prepare(self) -> bool:
        """Copies the selected positions of all layers. Returns False without any, or too few."""
        self.kv.check()
        below = self.text.length - 1
        budget = self._drafter.needs.kv_budget_at(below)
        self._begin = self.kv.refresh(below, budget)
        layers = [self.kv.parts(layer) for layer in self._drafter.needs.kv_layers]
        self._slot = sum(keys.shape[1] for keys, _ in layers[0])
        new = self.text.length - self._begin
        if not self._slot or new > MAX_NEW_TOKENS:
            return False
        self.cache.reserve(self._slot + new + self.text.room)
        for layer, parts in enumerate(layers):
            own_keys, own_values = self.cache.layer(layer)
            begin = 0
            for keys, values in parts:
                stop = begin + keys.shape[1]
                own_keys[:, begin:stop] = keys
                own_values[:, begin:stop] = values
                begin = stop
        return True

    def keep_ahead(self) -> bool:
        """Counts the drafted tokens that were accepted as text; their KV stays this drafter's."""
        self.kv.check()
        fed = self.text.length - self._begin
        self._slot += fed - self._fed
        self._fed = fed
        return fed <= MAX_NEW_TOKENS and self._slot + self.text.room <= self.cache.capacity

    def part(self, index: int) -> PassPart:
        """Returns what to feed for the next level; ``index`` is that of its cache in the pass."""
        if self.text.tree.level:
            return self.text.tree_part(index, self._slot)
        return self.text.text_part(index, self._begin, self.text.length, self._slot)

    def add_level(self, logits: Tensor) -> None:
        """Adds a level to the tree from the logits of :meth:`part`, ``[frontier, V]``."""
        if not self.text.tree.level:
            self._fed = self.text.length - self._begin
            self._slot += self._fed
        self.text.grow(logits)

    def begin_ahead(self) -> bool:
        return self.text.chain_grows()

    def finish(self) -> None:
        self.kv.check()

    def close(self) -> None:
        del self.cache


@dataclass(frozen=True)
class SelfSpecOptions(TreeOptions, KvOptions):
    """Options of ``selfspec``."""

    widths: tuple[int, ...] = (1,)
    depth: int = 8
    min_survival: float = 0.02
    formats: ClassVar[tuple[str, ...]] = WEIGHTS

    context: int = 512
    """KV budget: most positions of the target's KV that a round reads per layer; 0: all."""

    ratio: float = 0.0
    """KV budget as a share of the text, where that is more than ``context``. SpecAttn uses 0.07."""

    share_weights: str = "auto"
    """Whether to have one copy of the weights with a verifier on this host that has them in the
    same format: always, also where the system has no huge pages for files (then the verifier needs
    --share-weights), or auto: where it has."""

    lora: str = ""  # folder of the target's LoRA adapter; empty: it has none

    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        KvOptions.__post_init__(self)
        self.check_drafted()
        check_context(self.context)
        check_range("ratio", self.ratio, 0.0, 1.0)
        check_choice("share_weights", self.share_weights, ("auto", "always"))


class SelfSpecDrafter(Drafter):
    """The method ``selfspec``."""

    method: ClassVar[str] = "selfspec"
    label: ClassVar[str] = "self-speculation"
    growth: TreeGrowth

    def __init__(self, decoder: Decoder, options: SelfSpecOptions, fit: Fit, size: int) -> None:
        self.decoder, self.shape = decoder, decoder.config
        self.fit, self.weight_bytes = fit, size
        self.settings = settings = TreeSettings.of(decoder.config, options)
        self.max_nodes, self.max_depth = settings.max_nodes, settings.max_depth
        self.growth = TreeGrowth(HostGrowth(self))
        layers = tuple(range(decoder.config.layers))
        self.needs = Needs(layers, options, options.context, options.ratio)

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> SelfSpecDrafter:
        folder = required_folder(cls.method, folder)
        parsed = parse_options(SelfSpecOptions, options)
        device = resources.device
        model = load_model(
            folder, resources, prepare, folder, parsed.weights, parsed.lora, device, packing
        )
        about = model.description
        fit = replace(read_fit(folder), target_fingerprint=about.fingerprint)
        share = parsed.share_weights == "always"
        if share and device != "cpu":
            raise LoadError(
                "INVALID_OPTION",
                f"weights are shared in main memory, and this drafter runs on {device}; use "
                "share_weights=auto",
            )
        decoder = load_model(
            folder, resources, model.decoder, device, numerics=resources.numerics, share=share
        )
        refuse_recurrent(cls.method, decoder.config)
        return cls(decoder, parsed, fit, 0 if share else about.source_bytes)

    def start(self, generation: GenerationInfo) -> GrownSequence[SelfSpecPasses]:
        text = GrownText(self.settings, generation)
        return GrownSequence(self.growth, SelfSpecPasses(self, text, generation))

    def grow_level(self, growing: Sequence[SelfSpecPasses]) -> None:
        caches = [each.cache for each in growing]

        def run(tokens: Tensor, plan: TreePlan, rows: Tensor) -> Tensor:
            return self.decoder.forward(tokens, plan, caches, logit_rows=rows).logits

        parts = [each.part(index) for index, each in enumerate(growing)]
        logits = forward_parts(run, parts, self.decoder.device)
        for each, its in zip(growing, logits, strict=True):
            each.add_level(its)
