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

from paceline.convert import ModelSource, Origin, open_model
from paceline.convert.pack import Packer, read_norm
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
    check_shape,
    check_target,
    load_model,
    read_fit,
)
from paceline.drafter.methods.feedback import FeedbackDrafter, FeedbackLayers, FeedbackOptions
from paceline.drafter.methods.layers import LayerWeights, linear
from paceline.drafter.methods.mtp.config import (
    EMBEDDING,
    ENORM,
    FINAL_NORM,
    HEAD,
    HNORM,
    NORM,
    PROJECTION,
    HeadTensors,
    MtpConfig,
    head_count,
    head_shapes,
    read_mtp,
)
from paceline.drafter.methods.target_drafter import weight_bits
from paceline.kernels import Norm, Program, Recorder
from paceline.kernels.draft import NativeDraft
from paceline.kernels.executor import NativeProgram

_EMBEDDING = "model.embed_tokens.weight"


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
    ) -> None:
        """Build the programs of heads; ``final_norm`` is the target's, if they read states behind
        it."""
        assert config.block is not None
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
        block, layout = self._block, self.config.layout
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
        program.tap(final if layout.feeds_normed else x, 0)
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
        source = open_model(folder)
        config = read_mtp(source)
        if target is not None:
            check_shape(folder, config, target)
        whole = " in the target's own files" if _EMBEDDING in _names(source) else ""
        return {"heads": f"{config.heads}, as in {config.layout.name}{whole}"}


def _names(source: ModelSource) -> Mapping[str, Any]:
    return source.tensors(torch.float32, "cpu")


def _load(
    make: type[MtpDrafter], folder: Path | None, options: FeedbackOptions, resources: Resources
) -> MtpDrafter:
    device = resources.device.torch
    target = open_model(options.target, options.lora) if options.target else None
    source = target if folder is None else open_model(folder)
    assert source is not None
    whole = _EMBEDDING in _names(source) if source.path.is_dir() else True
    bits = (
        0 if source.path.is_file() else weight_bits(options.weights, source.path, resources.device)
    )
    config = read_mtp(source, {8: "int8", 4: "int4"}.get(bits, options.weights))
    if (
        config.block is not None
        and config.block.experts
        and is_rotated(config.block.weights, device)
    ):
        raise UnsupportedModelError(
            f"{source.path}: weights are 'int8', and routed experts have no products in 8 bits on "
            "a GPU: use bfloat16"
        )
    fit = _fit(source) if whole else read_fit(source.path)
    if target is not None and target is not source:
        fit = check_target(source.path, target, fit)
        check_shape(source.path, config, target)
    own = None if whole else source.path
    with torch.inference_mode():
        layers = _layers(source, own, target or source, config, bits, resources)
    per_value = {8: 1.0, 4: 0.5}.get(bits, float(layers.dtype.itemsize))
    values = sum(prod(shape) for shape in head_shapes(config).values())
    size = int(values * config.heads * per_value) + layers.embedding.private_bytes
    return make(layers, options, fit, size)


def _fit(source: ModelSource) -> Fit:
    """Which targets the heads in a target's own files fit: that one in any format."""
    return Fit(
        target_fingerprint=source.fingerprint(),
        target_origin=Origin.of(source),
        tokenizer_digest=source.tokenizer_digest,
        vocab_size=source.config().vocab_size,
    )


def _layers(
    source: ModelSource,
    own: Path | None,
    target: ModelSource,
    config: MtpConfig,
    bits: int,
    resources: Resources,
) -> MtpLayers:
    """The heads in ``source``; ``own`` is its folder if that is one of heads alone."""
    block, device = config.block, resources.device.torch
    assert block is not None
    weights = HeadTensors(source.weights(block, device), config)
    packer = Packer(block, weights, device)
    layout, wide = config.layout, config.hidden

    def stored(name: str) -> Tensor:
        return source.tensor(weights.stored_name(name), block.dtype, device)

    def read_head(index: int) -> MtpHead:
        base = f"model.layers.{config.target_layers + index}."
        halves = stored(f"{base}{PROJECTION}.weight").chunk(2, dim=1)
        hidden, embedded = halves if layout.hidden_first else reversed(halves)
        head = embedding.head
        if (name := f"{base}{HEAD}.weight") in weights:
            head = linear([stored(name)], bits)

        def norm(part: str) -> Norm:
            return Norm(read_norm(block, weights, base + part, wide), block.norm_eps)

        return MtpHead(
            norm(ENORM), norm(HNORM), linear([embedded.contiguous()], bits),
            linear([hidden.contiguous()], bits),
            build_layer(block, packer.layer(config.target_layers + index)),
            norm(NORM), head,
        )  # fmt: skip

    embedding = TargetEmbedding.read(own, target, config, block.dtype, device, bits)
    if (name := f"model.layers.{config.target_layers}.{EMBEDDING}.weight") in weights:
        embedding.embedding = stored(name)
    heads = [read_head(index) for index in range(config.heads)]
    final = None
    if layout.after_norm:
        name = FINAL_NORM.removesuffix(".weight")
        final = Norm(read_norm(block, weights, name, wide), block.norm_eps)
    return MtpLayers(config, heads, final, embedding, device, resources.numerics)
