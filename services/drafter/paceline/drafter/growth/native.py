"""Growth in one native call, for all trees of a batch (``native/draft.c``)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.decoder.config import Rope
from paceline.drafter.generation import Budget
from paceline.drafter.growth.sequence import GrownSequence, Growth, TreeSettings
from paceline.kernels.draft import NativeDraft
from paceline.kernels.structures import DraftText
from paceline.tree import TokenTree


class NativeGrowth(Growth):
    """Growth of trees whose candidates are ranked by logits, temperature and noise alone."""

    def __init__(self, draft: NativeDraft, rope: Rope, settings: TreeSettings) -> None:
        self._draft, self._rope, self._settings = draft, rope, settings

    def takes(self, sequence: GrownSequence) -> bool:
        ranker, options = sequence.ranker, self._settings.options
        if not ranker.plain:
            return False
        sequence.native = DraftText(
            count=ranker.count,
            temperature=ranker.params.temperature,
            seed=ranker.params.seed,
            min_score=math.log(options.min_survival) if options.min_survival > 0 else -math.inf,
        )
        sequence.native.set_widths(options.widths)
        return True

    def grow(self, rounds: Sequence[tuple[GrownSequence, Budget]]) -> list[TokenTree]:
        texts = []
        for sequence, limits in rounds:
            assert sequence.native is not None
            sequence.native.nodes, sequence.native.depth = limits.nodes, limits.depth
            sequence.fill(sequence.native)
            texts.append(sequence.native)
        reach = max(self._settings.max_depth, self._draft.length)  # all of a block
        end = max(text.length + max(text.depth, reach) for text in texts)
        self._draft.draft(texts, self._rope.table(end))
        for sequence, _ in rounds:
            sequence.keep()
        return [_tree(text) for text in texts]


def _tree(text: DraftText) -> TokenTree:
    columns = (column[: text.drafted] for column in (text.token, text.parent, text.chance))
    return TokenTree(*map(tuple, columns))
