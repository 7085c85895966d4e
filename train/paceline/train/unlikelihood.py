"""Learning not to repeat oneself: sequence-level unlikelihood (Welleck et al. 2020, section 5.2).

A small model that has read its corpus a dozen times still falls into loops in its own greedy text,
which its corpus never showed it. So it writes some, and every token that completes a repetition
there is made less likely.
"""

import numpy as np
import torch
from torch import Tensor, nn

from paceline.train.evaluate import Documents
from paceline.train.own_text import PROMPT, random_prompts, write

_NGRAM = 4
_WRITTEN = 224  # tokens after each prompt
_ROWS = 16


class Unlikelihood:
    """The loss of a share of the steps. Which ones, and where the prompts come from, is drawn from
    torch's global generator, which a checkpoint keeps."""

    def __init__(self, documents: Documents, separator: int, share: float) -> None:
        """`documents` are token ids without separators; `share` of the steps have the loss."""
        self._documents = documents
        self._separator = separator
        self._share = share

    def __call__(self, model: nn.Module, documents: int | None) -> Tensor | float:
        """Mean over the written tokens, in nats; 0 in the steps without. `documents`: first few."""
        if self._share == 0 or torch.rand(()).item() >= self._share:
            return 0.0
        draw = np.random.default_rng(int(torch.randint(1 << 31, ()).item()))
        prompts = random_prompts(self._documents[:documents], draw)[:_ROWS]
        device = next(model.parameters()).device
        # Casting all weights anew for each token would take longer than float32 does.
        with torch.autocast(device.type, enabled=False):
            written = write(model, prompts, self._separator, greedy=True, length=PROMPT + _WRITTEN)
        model.train()
        repeated = repeats(written, PROMPT, self._separator).to(device)
        tokens = written.long().to(device)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
        likely = logits.softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        unlikely = torch.log1p(-likely.clamp(max=1 - 1e-6))
        return -(unlikely * repeated[:, 1:]).sum() / (_WRITTEN * len(tokens))


def repeats(rows: Tensor, start: int, separator: int) -> Tensor:
    """Which tokens complete a 4-gram that stands earlier in their row, bool [rows, length].

    Only tokens from place `start` on are marked, and none behind the first `separator` after it.
    """
    marked = torch.zeros(rows.shape, dtype=torch.bool)
    for row, text in enumerate(rows.tolist()):
        seen: set[tuple[int, ...]] = set()
        for place in range(_NGRAM - 1, len(text)):
            if place >= start and text[place] == separator:
                break
            gram = tuple(text[place - _NGRAM + 1 : place + 1])
            marked[row, place] = place >= start and gram in seen
            seen.add(gram)
    return marked
