"""What a target thinks of every next token of a corpus, computed once and kept on disk."""

import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

# A window's first tokens have seen too little text to be judged well: another window judges them.
_WINDOW, _OVERLAP = 1024, 256


@dataclass(frozen=True)
class Opinions:
    """A target's most likely next tokens at each place of a stream of tokens.

    `ids` int16 [places, kept] and `weights` fp16 [places, kept], the latter summing to 1 at each
    place. Row i speaks about token i + 1.
    """

    ids: Tensor
    weights: Tensor

    def loss(self, logits: Tensor, places: Tensor) -> Tensor:
        """Cross-entropy in nats of a student against the target, a scalar.

        `logits` is [rows, length, vocabulary], `places` int64 [rows, length] on the CPU.
        """
        ids = self.ids[places].to(logits.device, torch.int64)
        weights = self.weights[places].to(logits.device, torch.float32)
        chosen = F.log_softmax(logits.float(), dim=-1).gather(-1, ids)
        return -(weights * chosen).sum(-1).mean()


def opinions_of(
    target: nn.Module, stream: Tensor, separator: int, kept: int, path: Path
) -> Opinions:
    """Ask `target` about every place of `stream` (int64 [tokens]), or read `path` if it did.

    The stream is asked document by document, each from its `separator` on. Raises ValueError
    where `path` speaks about a stream of another length.
    """
    if path.is_file():
        tensors = load_file(path)
        if len(tensors["ids"]) != len(stream):
            raise ValueError(
                f"{path} speaks about {len(tensors['ids'])} tokens, the corpus has {len(stream)}: "
                "remove the file or give another --work"
            )
        return Opinions(tensors["ids"], tensors["weights"])
    ids = torch.zeros(len(stream), kept, dtype=torch.int16)
    weights = torch.zeros(len(stream), kept, dtype=torch.float16)
    for start, keep, end in track(_windows(stream, separator), "asking the target"):
        best = _ask(target, stream[start:end]).topk(kept)
        ids[keep:end] = best.indices[keep - start :].to("cpu", torch.int16)
        shares = best.values / best.values.sum(-1, keepdim=True)
        weights[keep:end] = shares[keep - start :].to("cpu", torch.float16)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({"ids": ids, "weights": weights}, partial)
    os.replace(partial, path)
    return Opinions(ids, weights)


@torch.no_grad()
def _ask(target: nn.Module, tokens: Tensor) -> Tensor:
    """Probabilities of the next token, fp32 [tokens, vocabulary]."""
    device = next(target.parameters()).device
    logits = target.eval()(input_ids=tokens[None].to(device), use_cache=False).logits[0]
    return F.softmax(logits.float(), dim=-1)


def _windows(stream: Tensor, separator: int) -> list[tuple[int, int, int]]:
    """(start, first place to keep, end) of windows that together keep every place once."""
    starts = [*(stream == separator).nonzero().flatten().tolist(), len(stream)]
    windows = []
    for begin, stop in pairwise(starts):
        keep = begin
        while keep < stop:
            start = max(begin, keep - _OVERLAP)
            end = min(stop, start + _WINDOW)
            windows.append((start, keep, end))
            keep = end
    return windows
