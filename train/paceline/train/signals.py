"""What a frozen target computes for texts, once for all epochs, mapped from files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from rich.progress import track
from torch import Tensor
from torch.nn import functional as F

from paceline.decoder import Decoder, LocalCache, open_model
from paceline.kernels import TreeSegment, plan_trees

_BLOCK = 256  # tokens of a forward pass


@dataclass(frozen=True)
class Signals:
    """The signals of texts that lie one after the other, N tokens in all.

    Attributes:
        tokens: int64 ``[N]``.
        starts: Index of the first token of each text, and N.
        hidden: The target's hidden states after its final norm, bfloat16 ``[N, hidden]``.
        kv: Keys after RoPE and values of one layer, bfloat16 ``[N, 2, Hkv, D]``.
    """

    tokens: Tensor
    starts: Sequence[int]
    hidden: Tensor
    kv: Tensor


def signals_of(
    decoder: Decoder, target: Path, texts: Sequence[Sequence[int]], layer: int, work: Path
) -> Signals:
    """Run `texts` through a target, and keep the results in files in `work`.

    Texts that an earlier call has run are not run again: its files must be about the same texts.

    Started by `accelerate launch` or `torchrun`, the processes share the texts. A token takes
    `2 hidden + 4 Hkv D` bytes on disk: 1.9 KB for SmolLM2-135M.

    Args:
        decoder: The target.
        target: Its folder or file.
        texts: Token ids of each text.
        layer: Layer whose keys and values are kept.
        work: Folder of the files.
    """
    config, state = decoder.config, PartialState(cpu=True)
    starts = [0, *np.cumsum([len(text) for text in texts]).tolist()]
    hidden = _mapped(work / "hidden.bin", (starts[-1], config.hidden))
    kv = _mapped(work / "kv.bin", (starts[-1], 2, config.kv_heads, config.head_dim))
    norm = open_model(target).tensor("model.norm.weight", torch.float32, "cpu")
    own = range(state.process_index, len(texts), state.num_processes)
    for index in track(own, "running the target", disable=not state.is_main_process):
        part = slice(starts[index], starts[index + 1])
        if kv[part.stop - 1, 1].any():  # written last, by an earlier call
            continue
        out, cache = _run(decoder, texts[index])
        hidden[part] = F.rms_norm(out.float(), norm.shape, norm, config.norm_eps).bfloat16()
        for plane, each in enumerate(cache.layer(layer)):
            kv[part, plane] = each[:, : len(cache)].transpose(0, 1)
    state.wait_for_everyone()
    tokens = torch.tensor([token for text in texts for token in text])
    return Signals(tokens, starts, hidden, kv)


def _run(decoder: Decoder, tokens: Sequence[int]) -> tuple[Tensor, LocalCache]:
    """Outputs of the last layer, ``[S, hidden]``, and the cache of a text."""
    cache = LocalCache(decoder.config)
    cache.reserve(len(tokens))
    parts = []
    for start in range(0, len(tokens), _BLOCK):
        block = torch.tensor(tokens[start : start + _BLOCK])
        plan = plan_trees([TreeSegment(0, start, None, len(block))])
        rows, last = torch.tensor([0]), [decoder.config.layers - 1]
        parts += decoder.forward(block, plan, [cache], logit_rows=rows, taps=last).taps
        cache.commit(range(len(block)))
    return torch.cat(parts), cache


def _mapped(path: Path, shape: tuple[int, ...]) -> Tensor:
    """A bfloat16 tensor in a file, which is made if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = math.prod(shape)
    flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16)
    return flat.view(shape)
