"""The target drafts for itself, with fewer bits of its weights or fewer positions of its KV.

After Tiwari et al., "QuantSpec" (4-bit weights), Yue et al., "SpecAttn: Co-Designing Sparse
Attention with Self-Speculative Decoding" (policy ``verified``), and Sadhukhan et al., "MagicDec"
(``streaming``). The prefix that the verifier has committed is sparse. Tokens after it
are dense: their keys and values are computed here.

A copy of the target agrees with it far more often than its probabilities say, so a chain goes on
to a small survival (``min_survival``); the verifier corrects the confidences while it serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from paceline.checks import check_range
from paceline.convert import prepare
from paceline.decoder import Decoder, LocalCache
from paceline.drafter.growth.chain import ChainGrowth, DecoderModel, DecoderSequence
from paceline.drafter.growth.levels import LevelGrowth
from paceline.drafter.growth.sequence import TreeGrowth, TreeSettings, required
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
from paceline.service.phases import packing

# Maximum number of tokens behind the target's KV that a round feeds. With more of them, as after a
# lost connection, catching up would take longer than a draft saves: the tree is empty. Unit:
# tokens.
MAX_NEW_TOKENS = 128


class SelfSpecSequence(DecoderSequence):
    """A generation that ``selfspec`` drafts for.

    Each round begins with a cache of the target's selected positions, in any order, since their
    keys are rotated already, but in the text's order in layers with a window. They are followed by
    the tokens that the target's KV does not contain yet, which include the anchor, and then by the
    drafted nodes.
    """

    def __init__(self, drafter: SelfSpecDrafter, generation: GenerationInfo) -> None:
        super().__init__(drafter, generation)
        self._drafter = drafter
        self.kv = required(generation.kv, "selfspec", "KV")
        self._cache = LocalCache(drafter.decoder.config, drafter.decoder.device)
        self._begin = self._selected = 0  # positions of the target's KV, and those that are copied
        self._kept = 0  # positions behind the target's KV that were computed here

    @property
    def round_cache(self) -> LocalCache:
        return self._cache

    @property
    def cached(self) -> int:
        return self._begin + self._kept

    @property
    def slot(self) -> int:
        return self._selected + self._kept

    def begin_round(self) -> bool:
        """Copy the selected positions of all layers. Returns False without any, or too few."""
        self.kv.check()
        below, needs = self.length - 1, self._drafter.needs
        self._begin, self._kept = self.kv.refresh(below, needs.kv_budget_at(below)), 0
        layers = [self.kv.parts(layer) for layer in needs.kv_layers]
        self._selected = sum(keys.shape[1] for keys, _ in layers[0])
        new = self.length - self._begin
        if not self._selected or new > MAX_NEW_TOKENS:
            return False
        self._cache.reserve(self._selected + new + self.room)
        for layer, parts in enumerate(layers):
            begin = 0
            for part in parts:
                stop = begin + part[0].shape[1]
                for plane, copied in zip(self._cache.layer(layer), part, strict=True):
                    plane[:, begin:stop] = copied
                begin = stop
            if self._drafter.shape.kv_windows[layer] is None:
                continue
            if (order := self.kv.order(needs.kv_layers[layer])) is not None:
                for plane in self._cache.layer(layer):
                    plane[:, :begin] = plane[:, order]
        return True

    def continue_round(self) -> bool:
        self.kv.check()
        new = self.length - self._begin
        fits = self._selected + new + self.room <= self._cache.capacity
        return fits and new <= MAX_NEW_TOKENS

    def keep_text(self, count: int) -> None:
        self._kept += count

    def finish(self) -> None:
        self.kv.check()

    def close(self) -> None:
        del self._cache


@dataclass(frozen=True)
class SelfSpecOptions(TreeOptions, KvOptions):
    widths: tuple[int, ...] = (1,)
    depth: int = 8
    min_survival: float = 0.02
    formats: ClassVar[tuple[str, ...]] = WEIGHTS

    # KV budget: maximum number of the target's positions that a round reads a layer; 0: all.
    context: int = 512
    # KV budget as a share of the text, where that is more than `context`. SpecAttn uses 0.07.
    ratio: float = 0.0
    # Whether to have one copy of the weights with a verifier on this host that has them in the same
    # format: always, also where the system has no huge pages for files (then the verifier needs
    # --share-weights), or auto: where it has.
    share_weights: str = "auto"
    lora: str = ""  # folder of the target's LoRA adapter; empty: it has none

    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        KvOptions.__post_init__(self)
        self.check_drafted()
        check_context(self.context)
        check_range("ratio", self.ratio, 0.0, 1.0)
        check_choice("share_weights", self.share_weights, ("auto", "always"))


class SelfSpecDrafter(Drafter):
    method: ClassVar[str] = "selfspec"
    label: ClassVar[str] = "self-speculation"
    growth: TreeGrowth

    def __init__(self, decoder: Decoder, options: SelfSpecOptions, fit: Fit, size: int) -> None:
        self.decoder, self.shape = decoder, decoder.config
        self.fit, self.weight_bytes = fit, size
        self.settings = settings = TreeSettings.of(decoder.config, options, decoder.device)
        self.max_nodes, self.max_depth = settings.max_nodes, settings.max_depth
        model = DecoderModel(decoder)
        self.growth = TreeGrowth(ChainGrowth(model, settings), LevelGrowth(model, settings))
        layers = tuple(range(decoder.config.kv_layers))
        self.needs = Needs(layers, options, options.context, options.ratio)

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> SelfSpecDrafter:
        folder = required_folder(cls.method, folder)
        parsed = parse_options(SelfSpecOptions, options)
        device = resources.device
        model = load_model(
            folder, resources, prepare, folder, parsed.weights, parsed.lora, device.torch, packing
        )
        about = model.description
        fit = replace(read_fit(folder), target_fingerprint=about.fingerprint)
        share = parsed.share_weights == "always"
        if share and not device.packs:
            raise LoadError(
                "INVALID_OPTION",
                f"weights are shared in main memory, and this drafter runs on {device}; use "
                "share_weights=auto",
            )
        decoder = load_model(
            folder, resources, model.decoder, device.torch, numerics=resources.numerics, share=share
        )
        refuse_recurrent(cls.method, decoder.config)
        return cls(decoder, parsed, fit, 0 if share else about.source_bytes)

    def start(self, generation: GenerationInfo) -> SelfSpecSequence:
        return SelfSpecSequence(self, generation)
