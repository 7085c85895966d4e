"""What a frozen target computes for texts, once for all epochs, mapped from files."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn import functional as F

from paceline.convert import ModelSource, open_model, weights_fingerprint
from paceline.decoder import Decoder, LocalCache
from paceline.kernels import CHUNK, QueryBlock, plan_trees
from paceline.train.phases import Phase


class TappedTarget:
    """A target that returns the hidden states that a verifier of it would export."""

    def __init__(self, decoder: Decoder, source: ModelSource, taps: Sequence[int]) -> None:
        """Take a target's decoder and its files; `taps` are layers, 0 for the first."""
        device, config = decoder.device, decoder.config
        self.decoder = decoder
        self.head = source.vocabulary(config.dtype)[1].to(device)  # LM head `[V, hidden]`
        self.caches: list[LocalCache] = []  # of the texts that were read last
        self._taps = tuple(taps)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the token embedding, fp32 `[..., hidden]`."""
        rows: Tensor = self.decoder.embed(tokens.flatten())
        return rows.view(*tokens.shape, -1)

    def read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Read texts.

        Returns:
            Outputs of the tapped layers side by side, `[B * S, taps * hidden]` in the target's
            type, and hidden states for the LM head, fp32 `[B * S, hidden]`.
        """
        texts, length = tokens.shape
        config, device = self.decoder.config, self.decoder.device
        while len(self.caches) < texts:
            self.caches.append(LocalCache(config, device))
        for cache in self.caches:
            cache.truncate(0)
            cache.reserve(length)
        blocks = [
            QueryBlock(text, start, None, min(CHUNK, length - start))
            for text in range(texts)
            for start in range(0, length, CHUNK)
        ]
        layers = sorted({*self._taps, config.layers - 1})
        with torch.autocast(tokens.device.type, enabled=False):
            outputs = self.decoder.forward(
                tokens.flatten(),
                plan_trees(blocks, device=device),
                self.caches[:texts],
                logit_rows=torch.zeros(1, dtype=torch.int64, device=device),
                taps=layers,
            ).taps
            by_layer = dict(zip(layers, outputs, strict=True))
            norm = self.decoder.final_norm
            states = F.rms_norm(outputs[-1].float(), norm.weight.shape, norm.weight, norm.eps)
        tapped = [by_layer[layer] for layer in self._taps]
        return torch.cat(tapped, dim=-1) if tapped else states[:, :0], states


@dataclass(frozen=True)
class Signals:
    """The signals of texts that lie one after the other, N tokens in all."""

    tokens: Tensor  # int64 `[N]`
    starts: Sequence[int]  # index of the first token of each text, and N
    hidden: Tensor  # the target's hidden states after its final norm, bfloat16 `[N, hidden]`
    # Keys after RoPE and values of one layer, bfloat16 `[N, 2, Hkv, D]`; None: not kept.
    kv: Tensor | None
    taps: Tensor  # outputs of the tapped layers side by side, bfloat16 `[N, layers * hidden]`


def signals_of(
    decoder: Decoder,
    target: Path,
    texts: Sequence[Sequence[int]],
    work: Path,
    *,
    kv_layer: int | None = None,
    taps: Sequence[int] = (),
    count: int | None = None,
    until: float = math.inf,
) -> Signals:
    """Run `texts` through a target, and keep the results in files in `work`.

    Texts that an earlier call has run are not run again. `signals.json` there names target, texts
    and layers.

    Started by `accelerate launch` or `torchrun`, the processes share the texts. A token takes
    `2 hidden` bytes on disk for the hidden states and for each tap, and `4 Hkv D` for keys and
    values: 1.2 KB and 0.8 KB for SmolLM2-135M.

    Args:
        count: Only so many of the first texts are run; None: all.
        until: Time after which no text is run, on the clock `time.monotonic`. The signals are of
            the first texts alone then, of at least one.

    Raises ``ValueError`` if the files are about other texts, another target or other layers, and
    ``OSError`` if the disk has no room for the files.
    """
    config, state = decoder.config, PartialState(cpu=True)
    starts = [0, *np.cumsum([len(text) for text in texts]).tolist()]
    length, count = starts[-1], len(texts) if count is None else count
    shapes: dict[str, tuple[int, ...]] = {"hidden.bin": (length, config.hidden)}
    if taps:
        shapes["taps.bin"] = length, len(taps) * config.hidden
    if kv_layer is not None:
        shapes["kv.bin"] = length, 2, config.kv_heads, config.head_dim
    if state.is_main_process:
        _check_disk(work, shapes)
        digest = hashlib.sha256(json.dumps([*map(list, texts)]).encode()).hexdigest()
        kept: dict[str, Any] = {} if kv_layer is None else {"kv_layer": kv_layer}
        kept |= {"taps": list(taps)} if taps else {}
        _claim(work, {"target": weights_fingerprint(target), "texts": digest, **kept})
    hidden = _mapped(work / "hidden.bin", shapes["hidden.bin"])
    tapped = _mapped(work / "taps.bin", shapes["taps.bin"]) if taps else torch.empty(length, 0)
    kv = None if kv_layer is None else _mapped(work / "kv.bin", shapes["kv.bin"])
    kinds = [kind for kind in (kv, tapped, hidden) if kind is not None and kind.numel()]
    reader = TappedTarget(decoder, open_model(target), taps)
    indices = range(state.process_index, count, state.num_processes)
    phase, done = Phase("running the target, tokens", starts[count], until=until), count
    for index in indices:
        part = slice(starts[index], starts[index + 1])
        if all(kind[part.stop - 1].any() for kind in kinds):  # by an earlier call
            continue
        if phase.over:
            done = index
            break
        outputs, states = reader.read(torch.tensor(texts[index])[None])
        if kv is not None and kv_layer is not None:
            for plane, cached in enumerate(reader.caches[0].layer(kv_layer)):
                kv[part, plane] = cached[:, : len(texts[index])].transpose(0, 1)
        tapped[part] = outputs
        hidden[part] = states.bfloat16()
        phase.add(state.num_processes * (part.stop - part.start))
    done = min(gather_object([done]))
    tokens = torch.tensor([token for text in texts[:done] for token in text])
    end = starts[done]
    return Signals(
        tokens, starts[: done + 1], hidden[:end], kv if kv is None else kv[:end], tapped[:end]
    )


def _check_disk(work: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Say how much the files of some shapes take.

    Raises OSError: there is no room for them. To write to a mapped file on a full disk would end
    the process without a word.
    """
    work.mkdir(parents=True, exist_ok=True)
    sizes = {work / name: 2 * math.prod(shape) for name, shape in shapes.items()}
    needed = sum(sizes.values())
    held = sum(path.stat().st_blocks * 512 for path in sizes if path.is_file())
    free = shutil.disk_usage(work).free
    print(
        f"what the target computes for {next(iter(shapes.values()))[0]:,} tokens takes "
        f"{needed / 1e9:.1f} GB in {work}, where {free / 1e9:.1f} GB are free"
    )
    if needed - held > free:
        raise OSError(
            f"{work} has {free / 1e9:.1f} GB free, {(needed - held) / 1e9:.1f} GB are missing: "
            "free some, give another folder with --signals, or fewer texts"
        )


def _claim(work: Path, contents: dict[str, Any]) -> None:
    """Write what the files in `work` are about, or check it; an earlier call may have kept other
    layers."""
    path = work / "signals.json"
    stored = json.loads(path.read_text()) if path.is_file() else {}
    for name, value in contents.items():
        if stored.get(name, value) != value:
            raise ValueError(f"{work} has signals of other {name}: give another --signals")
    path.write_text(json.dumps(stored | contents) + "\n")


def _mapped(path: Path, shape: tuple[int, ...]) -> Tensor:
    """Return a bfloat16 tensor in a file, which is made if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = math.prod(shape)
    flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16)
    return flat.view(shape)
