"""Routed experts: their tensors in folders, and their linear layers."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.convert.weights import Checkpoint, Tensors, Weight
from paceline.decoder.config import UnsupportedModelError
from paceline.kernels import MAX_EXPERTS
from paceline.kernels.quantised import check_finite, mxfp4

# Name fragments of folders of some families, and the names that are used here.
_NAMES = {
    "model.embedding_norm.": "model.norm.",
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".q_layernorm.": ".q_norm.",
    ".k_layernorm.": ".k_norm.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".conv.": ".linear_attn.",
    ".feed_forward.": ".mlp.",
    ".mlp.expert_bias": ".mlp.router.choice.bias",
    ".query_layernorm.": ".q_norm.",
    ".key_layernorm.": ".k_norm.",
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
    ".linear_attn.conv1d.": ".linear_attn.qkv_conv1d.",
    ".block_sparse_moe.": ".mlp.",
    ".mlp.gate.": ".mlp.router.",
    ".mlp.moe_statics.": ".mlp.router.",
    ".router.moe_statics.": ".router.",
    ".router.e_score_correction_bias": ".router.choice.bias",
    ".mlp.shared_experts.": ".mlp.shared_expert.",
    ".router.proj.": ".mlp.router.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
}

# Tensors of all experts of a layer: weights, biases, or MXFP4 values and scales.
_STACKED = re.compile(
    r"(.*?)(?:\.mlp)?\.experts\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?$"
)


def shared_name(stored: str) -> str:
    """Return the name of a folder's tensor in all families."""
    for part, ours in _NAMES.items():
        stored = stored.replace(part, ours)
    return f"{stored}.weight" if stored.endswith(".sinks") else stored


@dataclass(frozen=True)
class _Part:
    """An expert's part of a stacked tensor: all of its outputs, or every second one."""

    stacked: str
    expert: int
    half: int | None


class ExpertTensors(Tensors[Weight]):
    """The tensors of a folder, with the same names for experts in all families.

    ``mlp.router`` has the scores of all experts; ``mlp.experts.N`` has ``gate_proj``, ``up_proj``
    and ``down_proj`` of an expert, whether the folder has a tensor of each or one of all experts.
    MXFP4 becomes 8-bit blocks of the same values.
    """

    def __init__(self, folder: Checkpoint, *, interleaved: bool) -> None:
        """Take a folder's tensors, each read on access.

        ``interleaved``: tensors of all experts are ``[experts, ins, outs]`` with gates and ups in
        turns (gpt-oss), not ``[experts, outs, ins]`` with all gates first.
        """
        self._folder, self._interleaved = folder, interleaved
        self._names: dict[str, str | _Part] = {}
        for stored in folder:
            name = shared_name(stored)
            match = _STACKED.match(name)
            if match is None:
                self._names[name] = stored
                continue
            layer, matrix, kind = match.groups()
            if kind == "_scales":
                continue
            parts = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
            for expert in range(self._count(stored)):
                for half, part in enumerate(parts):
                    place = _Part(stored, expert, half if len(parts) > 1 else None)
                    tail = "bias" if kind == "_bias" else "weight"
                    self._names[f"{layer}.mlp.experts.{expert}.{part}.{tail}"] = place

    def _count(self, stored: str) -> int:
        shape = self._folder.mapped(stored).shape
        if not shape or shape[0] > MAX_EXPERTS:
            raise UnsupportedModelError(
                f"tensor {stored!r} has shape {tuple(shape)}, expected up to {MAX_EXPERTS} experts"
            )
        return int(shape[0])

    def __getitem__(self, name: str) -> Weight:
        place = self._names[name]
        if isinstance(place, _Part):
            return self._read(place)
        tensor = self._folder[place]
        return tensor.flatten() if name.endswith(".choice.bias") else tensor  # ERNIE has a matrix

    def mapped(self, name: str) -> Weight:
        """Return a tensor mapped from the file, where possible; see :meth:`Checkpoint.mapped`."""
        place = self._names[name]
        return self._folder.mapped(place) if isinstance(place, str) else self._read(place)

    def _read(self, part: _Part) -> Weight:
        weight = self._folder.stored(part.stacked)[part.expert]
        if part.stacked.endswith("_blocks"):
            return self._read_mxfp4(weight, part)
        if self._interleaved and weight.dim() == 2:
            weight = weight.T
        return self._folder.converted(self._half(weight, part))

    def _read_mxfp4(self, pairs: Tensor, part: _Part) -> Weight:
        """Read uint8 ``[outs, ins / 32, 16]``, the low half of a byte first, and their scales."""
        name = part.stacked.removesuffix("blocks") + "scales"
        if name not in self._folder:
            raise UnsupportedModelError(f"the checkpoint lacks tensor {name!r}")
        scales = self._folder.stored(name)[part.expert : part.expert + 1].flatten(0, 1)
        types = (pairs.dtype, scales.dtype) == (torch.uint8, torch.uint8)
        if not types or pairs.shape != (*scales.shape, 16):
            raise UnsupportedModelError(
                f"an expert of tensor {part.stacked!r} is {pairs.dtype} {tuple(pairs.shape)} with "
                f"scales {scales.dtype} {tuple(scales.shape)}; expected uint8 [outs, ins / 32, 16] "
                "and uint8 [outs, ins / 32]"
            )
        pairs, scales = self._half(pairs, part), self._half(scales, part)
        matrix = mxfp4(torch.stack([pairs & 15, pairs >> 4], -1).flatten(1), scales)
        try:
            check_finite(matrix.scale, None)
        except ValueError as error:
            raise UnsupportedModelError(f"tensor {name!r} is damaged: {error}") from error
        return matrix

    def _half(self, outputs: Tensor, part: _Part) -> Tensor:
        if part.half is None:
            return outputs
        return outputs[part.half :: 2] if self._interleaved else outputs.chunk(2)[part.half]
