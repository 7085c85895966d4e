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
        kv: Keys after RoPE and values of one layer, bfloat16 ``[N, 2, Hkv, D]``; None: not kept.
        taps: Outputs of the tapped layers side by side, bfloat16 ``[N, layers * hidden]``.
    """

    tokens: Tensor
    starts: Sequence[int]
    hidden: Tensor
    kv: Tensor | None
    taps: Tensor


def signals_of(
    decoder: Decoder,
    target: Path,
    texts: Sequence[Sequence[int]],
    work: Path,
    *,
    kv_layer: int | None = None,
    taps: Sequence[int] = (),
) -> Signals:
    """Run `texts` through a target, and keep the results in files in `work`.

    Texts that an earlier call has run are not run again: its files must be about the same texts.

    Started by `accelerate launch` or `torchrun`, the processes share the texts. A token takes
    `2 hidden` bytes on disk for the hidden states and for each tap, and `4 Hkv D` for keys and
    values: 1.2 KB and 0.8 KB for SmolLM2-135M.

    Args:
        decoder: The target.
        target: Its folder or file.
        texts: Token ids of each text.
        work: Folder of the files.
        kv_layer: Layer whose keys and values are kept.
        taps: Layers whose outputs are kept, rising.
    """
    config, state = decoder.config, PartialState(cpu=True)
    starts = [0, *np.cumsum([len(text) for text in texts]).tolist()]
    count = starts[-1]
    hidden = _mapped(work / "hidden.bin", (count, config.hidden))
    tapped = torch.empty(count, 0)
    if taps:
        tapped = _mapped(work / "taps.bin", (count, len(taps) * config.hidden))
    kv = None
    if kv_layer is not None:
        kv = _mapped(work / "kv.bin", (count, 2, config.kv_heads, config.head_dim))
    norm = open_model(target).tensor("model.norm.weight", torch.float32, "cpu")
    own = range(state.process_index, len(texts), state.num_processes)
    for index in track(own, "running the target", disable=not state.is_main_process):
        part = slice(starts[index], starts[index + 1])
        if hidden[part.stop - 1].any():  # written last, by an earlier call
            continue
        outputs, cache = _run(decoder, texts[index], sorted({*taps, config.layers - 1}))
        if kv is not None and kv_layer is not None:
            for plane, each in enumerate(cache.layer(kv_layer)):
                kv[part, plane] = each[:, : len(cache)].transpose(0, 1)
        if taps:
            tapped[part] = torch.cat([outputs[layer] for layer in taps], dim=1)
        out = outputs[config.layers - 1].float()
        hidden[part] = F.rms_norm(out, norm.shape, norm, config.norm_eps).bfloat16()
    state.wait_for_everyone()
    tokens = torch.tensor([token for text in texts for token in text])
    return Signals(tokens, starts, hidden, kv, tapped)


def _run(
    decoder: Decoder, tokens: Sequence[int], layers: Sequence[int]
) -> tuple[dict[int, Tensor], LocalCache]:
    """Outputs of layers, each ``[S, hidden]``, and the cache of a text."""
    cache = LocalCache(decoder.config)
    cache.reserve(len(tokens))
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, len(tokens), _BLOCK):
        block = torch.tensor(tokens[start : start + _BLOCK])
        plan = plan_trees([TreeSegment(0, start, None, len(block))])
        rows = torch.tensor([0])
        parts.append(decoder.forward(block, plan, [cache], logit_rows=rows, taps=layers).taps)
        cache.commit(range(len(block)))
    outputs = (torch.cat(each) for each in zip(*parts, strict=True))
    return dict(zip(layers, outputs, strict=True)), cache


def _mapped(path: Path, shape: tuple[int, ...]) -> Tensor:
    """A bfloat16 tensor in a file, which is made if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = math.prod(shape)
    flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16)
    return flat.view(shape)
