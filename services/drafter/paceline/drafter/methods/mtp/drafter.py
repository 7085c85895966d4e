"""Drafts by heads for multi-token prediction: trees by a layer of the target's family.

After DeepSeek-V3 (arXiv 2412.19437), section 2.2. The first level reads the target's states of the
text, deeper ones the output of the level before. Where a target has several heads, level n of a
tree is drafted by the nth and deeper ones by the last; every head keeps keys and values of the
text, which it reads with the target's states. Trees grow as in
:mod:`paceline.drafter.methods.feedback`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.convert import ModelSource, open_model, prepare
from paceline.convert.mtp import MtpHeads, head_count, read_heads
from paceline.decoder import UnsupportedModelError
from paceline.decoder.layer import (
    DecoderLayer,
    build_layer,
    heads_of,
    record_entry,
    record_heads,
    record_layer,
)
from paceline.decoder.linear import Linear, is_rotated
from paceline.drafter.methods.base import SECTION, Fit, LoadError, Resources, parse_options
from paceline.drafter.methods.checkpoint import (
    TargetEmbedding,
    TargetRef,
    check_shape,
    check_target,
    load_model,
    read_fit,
)
from paceline.drafter.methods.feedback import FeedbackDrafter, FeedbackLayers, FeedbackOptions
from paceline.drafter.methods.layers import LayerWeights, linear
from paceline.drafter.methods.mtp.config import MtpConfig
from paceline.drafter.methods.target_drafter import weight_bits
from paceline.kernels import Norm, Program, Recorder
from paceline.kernels.draft import NativeDraft
from paceline.kernels.executor import NativeProgram
from paceline.service.phases import packing


@dataclass(frozen=True)
class MtpHead:
    enorm: Norm  # norm of embedded tokens
    hnorm: Norm  # norm of hidden states
    embedded: Linear  # the half of the projection that reads embedded tokens
    hidden: Linear  # the half that reads hidden states
    layer: DecoderLayer  # the layer behind it
    norm: Norm  # the norm before the LM head
    head: Linear  # the LM head


class MtpLayers(FeedbackLayers):
    """The heads of a target."""

    config: MtpConfig

    def __init__(
        self,
        config: MtpConfig,
        heads: list[MtpHead],
        final_norm: Norm | None,
        embedding: TargetEmbedding,
        device: torch.device | str,
        numerics: str = "portable",
        *,
        feeds_normed: bool = False,
    ) -> None:
        """Build the programs of heads; ``final_norm`` is the target's, if they read states behind
        it. ``feeds_normed``: the next level reads outputs behind the norm before the LM head."""
        assert config.block is not None
        self._feeds_normed = feeds_normed
        self._heads, self._final_norm, self._block = heads, final_norm, config.block
        self.cached_layers = len(heads)
        super().__init__(config, {}, embedding, config.block.dtype, device, numerics=numerics)

    def level_program(self, level: int) -> int:
        return min(level + 1, len(self.programs) - 1)

    def native_draft(self, programs: list[NativeProgram], ids: Tensor) -> NativeDraft | None:
        # A native draft runs one program for all levels.
        return super().native_draft(programs, ids) if len(self._heads) == 1 else None

    def record(self, tensors: LayerWeights) -> list[Program]:
        """Return what writes keys and values of all heads, what reads a text, and what drafts: the
        programs of heads from the second on, or of the only one."""
        last = len(self._heads) - 1
        return [
            self._record(tensors.numerics, None, text=True),
            self._record(tensors.numerics, 0, text=True),
            *(self._record(tensors.numerics, n, text=False) for n in range(min(1, last), last + 1)),
        ]

    def _record(self, numerics: str, number: int | None, *, text: bool) -> Program:
        """Tokens and hidden states to logits of a head; None: to keys and values alone.

        Of a text, the states are the target's. Heads of deeper levels write keys and values too.
        """
        block = self._block
        program = Recorder(heads_of(block), self.dtype, numerics=numerics)
        embedded = program.embed(self.embedding.embedding, block.embedding_scale)
        states = program.input(self.config.hidden)
        if text and self._final_norm is not None:
            states = program.add_norm(states, 0, self._final_norm)

        def enter(head: MtpHead) -> tuple[int, int]:
            hidden = program.add_norm(states, 0, head.hnorm)
            x = program.multiply(hidden, head.hidden)
            tokens = program.add_norm(embedded, 0, head.enorm)
            program.add(x, program.multiply(tokens, head.embedded))
            return x, record_entry(block, program, head.layer.norms[0], x, 0)

        for index, head in enumerate(self._heads):
            # Deeper levels need not feed the nodes of this one again.
            if number is None or index > number:
                record_heads(program, head.layer, enter(head)[1], index)
        if number is None:
            return program.finish()
        head = self._heads[number]
        x, inputs = enter(head)
        program.keep_all(x)
        window = self.config.window or None
        delta = record_layer(block, program, head.layer, x, inputs, number, window)
        program.add(x, delta, block.residual_scale)
        x = program.select(x)
        final = program.add_norm(x, 0, head.norm)
        program.tap(final if self._feeds_normed else x, 0)
        program.multiply(final, head.head)
        return program.finish()


class MtpDrafter(FeedbackDrafter):
    method: ClassVar[str] = "mtp"
    label: ClassVar[str] = "MTP"
    recipe: ClassVar[str] = "paceline.train.recipes.mtp:MtpRecipe"
    layers: MtpLayers

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> MtpDrafter:
        parsed = parse_options(FeedbackOptions, options)
        if folder is None and not parsed.target:
            raise LoadError(
                "FOLDER_MISSING",
                "mtp needs the folder of a target with heads, or one of heads beside a target: "
                "mtp,target=DIR or mtp:DIR",
            )
        path = folder or Path(parsed.target)
        return load_model(path, resources, _load, cls, folder, parsed, resources)

    @classmethod
    def layout(cls, described: Mapping[str, Any]) -> str | None:
        if SECTION in described:
            return super().layout(described)
        return "the target's" if head_count(described) else None

    @classmethod
    def inspect(cls, folder: Path, target: ModelSource | None) -> Mapping[str, str]:
        heads = read_heads(open_model(folder))
        if target is not None:
            check_shape(folder, MtpConfig.of(heads), target.path, target.config())
        whole = " in the target's own files" if heads.whole else ""
        return {"heads": f"{heads.count}, as in {heads.layout.name}{whole}"}


def _load(
    make: type[MtpDrafter], folder: Path | None, options: FeedbackOptions, resources: Resources
) -> MtpDrafter:
    device = resources.device.torch
    path = folder or Path(options.target)
    source = open_model(path, options.lora if folder is None else None)
    bits = 0 if path.is_file() else weight_bits(options.weights, path, resources.device)
    heads = read_heads(source, {8: "int8", 4: "int4"}.get(bits, options.weights))
    config = MtpConfig.of(heads)
    if heads.block.experts and is_rotated(heads.block.weights, device):
        raise UnsupportedModelError(
            f"{path}: weights are 'int8', and routed experts have no products in 8 bits on a GPU: "
            "use bfloat16"
        )
    target = options.read_target(device)
    if target is None and heads.whole:
        target = prepare(path, "auto", None, device, packing)
    if heads.whole:  # they fit that target in any format
        about = TargetRef.of(source)
        fit = Fit(about.fingerprint, about.origin, about.tokenizer_digest, config.vocab_size)
    else:
        fit = read_fit(path)
    if target is not None and options.target and folder is not None:
        fit = check_target(path, TargetRef.packed(target), fit)
        check_shape(path, config, target.path, target.description.config)
    dtype = heads.block.dtype
    drafter_folder = None if heads.whole else path
    with torch.inference_mode():
        embedding = TargetEmbedding.read(drafter_folder, target, config, dtype, device, bits)
        layers = _layers(heads, embedding, bits, resources)
    per_value = {8: 1.0, 4: 0.5}.get(bits, float(dtype.itemsize))
    values = sum(prod(shape) for shape in heads.shapes.values())
    size = int(values * heads.count * per_value) + embedding.private_bytes
    return make(layers, options, fit, size)


def _layers(
    heads: MtpHeads, embedding: TargetEmbedding, bits: int, resources: Resources
) -> MtpLayers:
    """Build the heads that were read from a folder."""
    block, packed = heads.block, heads.pack(resources.device.torch)

    def norm(weight: Tensor) -> Norm:
        return Norm(weight, block.norm_eps)

    if packed.embedding is not None:
        embedding.embedding = packed.embedding
    built = [
        MtpHead(
            norm(head.enorm), norm(head.hnorm), linear([head.embedded], bits),
            linear([head.hidden], bits), build_layer(block, head.layer), norm(head.norm),
            embedding.head if head.head is None else linear([head.head], bits),
        )
        for head in packed.heads
    ]  # fmt: skip
    final = None if packed.final_norm is None else norm(packed.final_norm)
    device, feeds_normed = resources.device.torch, heads.layout.feeds_normed
    return MtpLayers(
        MtpConfig.of(heads), built, final, embedding, device, resources.numerics,
        feeds_normed=feeds_normed,
    )  # fmt: skip
