"""Growth in one native call, for all trees of a batch (``native/draft.c``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from paceline.decoder.config import Rope
from paceline.drafter.generation import Budget
from paceline.drafter.growth.beam import Chain
from paceline.drafter.growth.text import Growth, TextPasses, TreeSettings
from paceline.kernels.draft import NativeDraft
from paceline.kernels.structures import DraftText
from paceline.tree import TokenTree


class NativeGrowth(Growth):
    """Growth of trees whose candidates are ranked by logits, temperature and noise alone."""

    at_once: ClassVar[bool] = True

    def __init__(self, draft: NativeDraft, rope: Rope, settings: TreeSettings) -> None:
        self._draft, self._rope, self._settings = draft, rope, settings

    def start(self, passes: TextPasses) -> bool:
        ranker, survival = passes.text.ranker, self._settings.options.min_survival
        count = ranker.plain_logits()
        if not count:
            return False
        text = DraftText(
            count=count,
            temperature=ranker.params.temperature,
            seed=ranker.params.seed,
            min_score=math.log(survival) if survival > 0 else -math.inf,
        )
        text.set_widths(passes.text.widths)
        passes.text.native = text
        return True

    def begin(self, passes: TextPasses, limits: Budget, ahead: Chain | None) -> None:
        text = _text_of(passes)
        text.nodes, text.depth = limits.nodes, limits.depth

    def grow(self, rounds: Sequence[tuple[TextPasses, Budget]]) -> list[TokenTree]:
        texts = [_text_of(passes) for passes, _ in rounds]
        for (passes, _), text in zip(rounds, texts, strict=True):
            passes.fill(text)  # only now: to begin another may have failed
        reach = max(self._settings.max_depth, self._draft.length)  # all of a block
        longest = max(text.length + max(text.depth, reach) for text in texts)
        self._draft.draft(texts, self._rope.table(longest))
        return [_tree(text) for text in texts]


def _text_of(passes: TextPasses) -> DraftText:
    text = passes.text.native
    assert text is not None
    return text


def _tree(text: DraftText) -> TokenTree:
    columns = (each[: text.drafted] for each in (text.token, text.parent, text.chance))
    return TokenTree(*map(tuple, columns))
