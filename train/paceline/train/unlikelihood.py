"""Sequence-level unlikelihood training against repetition (Welleck et al. 2020, section 5.2).

Greedy text of a small model ends in loops that its corpus does not contain. So the model generates
greedy text, and every token that completes a repetition in it is made less likely.
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
    """The loss of a share of the steps. Steps and prompts are drawn from torch's global generator,
    which a checkpoint keeps."""

    def __init__(self, documents: Documents, separator: int, share: float) -> None:
        """`documents` are token ids without separators; `share` of the steps have the loss."""
        self._documents = documents
        self._separator = separator
        self._share = share

    def __call__(self, model: nn.Module, documents: int | None) -> Tensor | float:
        """Mean over the written tokens, in nats; 0 in other steps.

        Prompts are from the first `documents` documents; None: from all.
        """
        if self._share == 0 or torch.rand(()).item() >= self._share:
            return 0.0
        draw = np.random.default_rng(int(torch.randint(1 << 31, ()).item()))
        prompts = random_prompts(self._documents[:documents], draw)[:_ROWS]
        device = next(model.parameters()).device
        # Autocast would cast all weights for each token, which takes longer than float32 does.
        with torch.autocast(device.type, enabled=False):
            written = write(model, prompts, self._separator, _WRITTEN)
        model.train()
        repeated = repeats(written, PROMPT, self._separator).to(device)
        tokens = written.long().to(device)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
        likely = logits.softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        unlikely = torch.log1p(-likely.clamp(max=1 - 1e-6))
        return -(unlikely * repeated[:, 1:]).sum() / (_WRITTEN * len(tokens))


def repeats(rows: Tensor, start: int, separator: int) -> Tensor:
    """Mark tokens that complete a 4-gram that occurs earlier in their row, bool [rows, length].

    Only tokens from index `start` on are marked, and none after the first `separator` from there.
    """
    marked = torch.zeros(rows.shape, dtype=torch.bool)
    for row, text in enumerate(rows.tolist()):
        seen: set[tuple[int, ...]] = set()
        for index in range(_NGRAM - 1, len(text)):
            if index >= start and text[index] == separator:
                break
            gram = tuple(text[index - _NGRAM + 1 : index + 1])
            marked[row, index] = index >= start and gram in seen
            seen.add(gram)
    return marked
