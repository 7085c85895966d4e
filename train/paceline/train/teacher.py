"""A target's most likely next tokens at every position of a corpus, computed once, kept on disk."""

import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

# The first tokens of a window have little context: their predictions come from another window.
_WINDOW, _OVERLAP = 1024, 256


@dataclass(frozen=True)
class Teacher:
    """A target's most likely next tokens at each index of a stream of tokens.

    `ids` int16 [stream, kept] and `weights` fp16 [stream, kept], probabilities that sum to 1 at
    each index. Row i predicts token i + 1.
    """

    ids: Tensor
    weights: Tensor

    def loss(self, logits: Tensor, indices: Tensor) -> Tensor:
        """Cross-entropy in nats of a student against the target, a scalar.

        `logits` is [rows, length, vocabulary], `indices` int64 [rows, length] on the CPU.
        """
        ids = self.ids[indices].to(logits.device, torch.int64)
        weights = self.weights[indices].to(logits.device, torch.float32)
        student = F.log_softmax(logits.float(), dim=-1).gather(-1, ids)
        return -(weights * student).sum(-1).mean()


@torch.no_grad()
def teacher_of(target: nn.Module, stream: Tensor, separator: int, kept: int, path: Path) -> Teacher:
    """Compute the `kept` most likely next tokens of `stream` (int64 [tokens]), or read `path`.

    Each document, from its `separator` on, is a text of its own. The result is written to `path`.
    Raises ValueError if `path` is about a stream of another length.
    """
    if path.is_file():
        tensors = load_file(path)
        if len(tensors["ids"]) != len(stream):
            raise ValueError(
                f"{path} is about {len(tensors['ids'])} tokens, the corpus has {len(stream)}: "
                "remove the file or give another --work"
            )
        return Teacher(tensors["ids"], tensors["weights"])
    ids = torch.zeros(len(stream), kept, dtype=torch.int16)
    weights = torch.zeros(len(stream), kept, dtype=torch.float16)
    device = next(target.parameters()).device
    target.eval()
    for start, keep, end in track(_windows(stream, separator), "running the target"):
        tokens = stream[None, start:end].to(device)
        logits = target(input_ids=tokens, use_cache=False).logits[0]
        best = logits.float().softmax(-1).topk(kept)
        ids[keep:end] = best.indices[keep - start :].to("cpu", torch.int16)
        shares = best.values / best.values.sum(-1, keepdim=True)
        weights[keep:end] = shares[keep - start :].to("cpu", torch.float16)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({"ids": ids, "weights": weights}, partial)
    os.replace(partial, path)
    return Teacher(ids, weights)


def _windows(stream: Tensor, separator: int) -> list[tuple[int, int, int]]:
    """(start, first index to keep, end) of windows that together keep every index once."""
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
