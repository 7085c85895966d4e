"""Heads for multi-token prediction, in a target's own files or in a folder beside it.

A head is a layer of the target's family behind a projection of two inputs: the embedding of a
token, and the hidden state of the position before it. Projects name its tensors differently, and
differ in the order of both inputs and in which states are normalised (:data:`LAYOUTS`). Here a head
has the names of DeepSeek-V3: it is a layer behind the target's last one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.convert.drafters import config_errors
from paceline.convert.families import layer_shapes
from paceline.convert.folder_files import read_object
from paceline.convert.model_source import ModelSource
from paceline.convert.pack import Packer, read_norm
from paceline.convert.weights import Tensors, Weight
from paceline.decoder.config import DecoderConfig, UnsupportedModelError
from paceline.decoder.packed import Part
from paceline.formats import SECTION

# Fields of a config.json with the number of heads.
COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")

ENORM, HNORM, PROJECTION, NORM = "enorm", "hnorm", "eh_proj", "shared_head.norm"
_NORMS = (ENORM, HNORM, NORM)
# Parts of a head besides its layer; the last two may be missing: then they are the target's.
HEAD, EMBEDDING = "shared_head.head", "embed_tokens"

FINAL_NORM = "model.norm.weight"  # the target's norm before its LM head


@dataclass(frozen=True)
class MtpLayout:
    """How a project stores heads, and what it feeds them."""

    name: str  # the first models that have it
    # Beginning of the names of a head; `{head}` is its number, `{layer}` that as a layer of the
    # target.
    block: str
    begin: str  # beginning of the names of all their tensors
    # Names of the parts that are called differently, all in front of `.weight`.
    parts: Mapping[str, str]
    hidden_first: bool  # whether the projection reads the hidden state before the embedding
    after_norm: bool  # whether a head reads the target's states behind the target's final norm
    # Whether the next level reads a head's output behind the norm before the LM head.
    feeds_normed: bool

    def stored(self, head: int, layers: int, part: str) -> str:
        """Return the name of a part of a head, or of its layer, behind a target's ``layers``."""
        stem, dot, kind = part.rpartition(".")
        renamed = self.parts.get(stem)
        name = self.block + part if renamed is None else f"{renamed}{dot}{kind}"
        return name.format(head=head, layer=layers + head)

    def head_of(self, name: str, layers: int) -> int | None:
        """Return the head whose layer a tensor is of; None if it is of none."""
        pattern = re.escape(self.block).replace(r"\{head\}", r"(\d+)")
        match = re.match(pattern.replace(r"\{layer\}", r"(\d+)"), name)
        if match is None:
            return None
        number = int(match[1]) - (layers if "{layer}" in self.block else 0)
        return number if number >= 0 else None


DEEPSEEK = MtpLayout(
    "DeepSeek-V3",
    "model.layers.{layer}.",
    "model.layers.",  # the target's own layers too
    {},
    hidden_first=False,
    after_norm=True,
    feeds_normed=False,
)
LAYOUTS = (
    MtpLayout(
        "Qwen3-Next",
        "mtp.layers.{head}.",
        "mtp.",
        {
            ENORM: "mtp.pre_fc_norm_embedding",
            HNORM: "mtp.pre_fc_norm_hidden",
            PROJECTION: "mtp.fc",
            NORM: "mtp.norm",
        },
        hidden_first=False,
        after_norm=True,
        feeds_normed=True,
    ),
    MtpLayout(
        "MiMo",
        "model.mtp_layers.{head}.",
        "model.mtp_layers.",
        {
            ENORM: "model.mtp_layers.{head}.token_layernorm",
            HNORM: "model.mtp_layers.{head}.hidden_layernorm",
            PROJECTION: "model.mtp_layers.{head}.input_proj",
            NORM: "model.mtp_layers.{head}.final_layernorm",
        },
        hidden_first=True,
        after_norm=False,
        feeds_normed=True,
    ),
    DEEPSEEK,
)  # Known layouts. Facts of each: docs/drafter-design.md.


@dataclass(frozen=True)
class PackedHead:
    """A head as it runs: the parts of its layer, and tensors in the type of hidden states."""

    enorm: Tensor  # factors of the norm of embedded tokens, float32 as the others
    hnorm: Tensor  # of the norm of hidden states
    norm: Tensor  # of the norm before the LM head
    embedded: Tensor  # the half of the projection that reads embedded tokens, ``[hidden, hidden]``
    hidden: Tensor  # the half that reads hidden states
    head: Tensor | None  # its LM head; None: the target's
    layer: Mapping[str, Part]  # as :meth:`Packer.layer` returns them


@dataclass(frozen=True)
class PackedHeads:
    heads: list[PackedHead]
    embedding: Tensor | None  # of their own, ``[V, hidden]``; None: the target's
    # Factors of the target's norm behind which they read its states; None: in front of it.
    final_norm: Tensor | None


@dataclass(frozen=True)
class MtpHeads:
    """The heads in a folder, whose tensors were checked."""

    source: ModelSource
    layout: MtpLayout  # how the folder stores them
    block: DecoderConfig  # their layer, as one of a model
    count: int  # number of heads
    window: int  # positions that their attention reads; 0: all
    drafted: int  # tokens that can be drafted; 0: all

    @property
    def whole(self) -> bool:
        """Whether they are in the target's own files."""
        return "model.embed_tokens.weight" in self.source.tensors(torch.float32, "cpu")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of a head, by names without the beginning of :data:`DEEPSEEK`."""
        wide = self.block.hidden
        norms = {f"{name}.weight": (wide,) for name in _NORMS}
        return {**layer_shapes(self.block), **norms, f"{PROJECTION}.weight": (wide, 2 * wide)}

    def stored_name(self, name: str) -> str:
        """Return the name in the folder of a tensor that is named as in DeepSeek-V3."""
        head = DEEPSEEK.head_of(name, self.block.layers)
        if head is None:
            return name
        part = name.removeprefix(DEEPSEEK.block.format(layer=self.block.layers + head))
        return self.layout.stored(head, self.block.layers, part)

    def pack(self, device: torch.device | str) -> PackedHeads:
        """Read the heads."""
        block, layout, source = self.block, self.layout, self.source
        weights = _HeadTensors(source.weights(block, device), self)
        packer = Packer(block, weights, device)

        def stored(name: str) -> Tensor:
            return source.tensor(self.stored_name(name), block.dtype, device)

        def optional(name: str) -> Tensor | None:
            return stored(name) if name in weights else None

        def read_head(number: int) -> PackedHead:
            base = f"model.layers.{number}."
            halves = stored(f"{base}{PROJECTION}.weight").chunk(2, dim=1)
            hidden, embedded = halves if layout.hidden_first else reversed(halves)
            parts = (base + norm for norm in _NORMS)
            enorm, hnorm, norm = (read_norm(block, weights, part, block.hidden) for part in parts)
            return PackedHead(
                enorm, hnorm, norm, embedded.contiguous(), hidden.contiguous(),
                optional(f"{base}{HEAD}.weight"), packer.layer(number),
            )  # fmt: skip

        final = FINAL_NORM.removesuffix(".weight")
        return PackedHeads(
            [read_head(block.layers + index) for index in range(self.count)],
            optional(f"model.layers.{block.layers}.{EMBEDDING}.weight"),
            read_norm(block, weights, final, block.hidden) if layout.after_norm else None,
        )


class _HeadTensors(Tensors[Weight]):
    """Tensors of heads and their target by the names of DeepSeek-V3, in whatever layout."""

    def __init__(self, stored: Mapping[str, Weight], heads: MtpHeads) -> None:
        self._stored, self._heads = stored, heads
        self._names = {}

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._heads.stored_name(name) in self._stored

    def __getitem__(self, name: str) -> Weight:
        return self._stored[self._heads.stored_name(name)]


def head_count(described: Mapping[str, Any]) -> int | None:
    """Return the number of heads that a config.json names; None if it names none."""
    text = described.get("text_config")
    parts = [described, text if isinstance(text, dict) else {}]
    counts = [part[name] for part in parts for name in COUNTS if part.get(name) is not None]
    return counts[0] if counts else None


def read_heads(source: ModelSource, weights: str = "auto") -> MtpHeads:
    """Read what the heads in a target or in a folder of heads alone are, and check their tensors;
    ``weights`` as in :meth:`ModelSource.config`. Raises ``UnsupportedModelError`` if there are no
    heads, others than config.json describes, or a tensor is missing, has another shape or is not
    known."""
    if source.path.is_file():
        raise UnsupportedModelError(
            f"{source.path} is a file; MTP heads are read from Hugging Face folders: give the one "
            "of this model as mtp:DIR"
        )
    block = source.config(weights)
    names = list(source.tensors(block.dtype, "cpu"))
    described = read_object(source.path / "config.json")
    for layout in LAYOUTS:
        numbers = {layout.head_of(name, block.layers) for name in names} - {None}
        if numbers:
            break
    else:
        raise UnsupportedModelError(
            f"{source.path} has no MTP heads: expected tensors mtp.*, model.mtp_layers.* or "
            f"model.layers.{block.layers}.*; use another method, or train heads by "
            "`paceline train mtp`"
        )
    named = head_count(described)
    if named is not None and named != len(numbers):
        raise UnsupportedModelError(
            f"config.json of {source.path} names {named!r} MTP heads, but the folder has tensors "
            f"of {len(numbers)}"
        )
    if block.logit_cap or block.logit_scale != 1.0:
        raise UnsupportedModelError(
            f"MTP heads of a model of type {block.model_type!r}, which scales or caps its logits, "
            "are not supported"
        )
    windows = set(block.windows)
    window = (windows.pop() or 0) if len(windows) == 1 else 0
    with config_errors("mtp"):
        drafted = int(described.get("draft_vocab_size") or block.vocab_size)
        if SECTION in described:  # trained beside its target
            window = int(described[SECTION]["shape"]["window"])
    drafted = drafted if drafted != block.vocab_size else 0
    heads = MtpHeads(source, layout, block, len(numbers), window, drafted)
    _check_tensors(heads, names)
    return heads


def _check_tensors(heads: MtpHeads, names: list[str]) -> None:
    """Check names and shapes of all tensors of heads, without reading."""
    source, block, layout, layers = heads.source, heads.block, heads.layout, heads.block.layers
    tensors: Any = source.tensors(torch.float32, "cpu")
    known: set[str] = set()

    def check(name: str, shape: tuple[int, ...], *, optional: bool = False) -> None:
        known.add(name)
        if name not in names:
            if not optional:
                raise UnsupportedModelError(f"{source.path} lacks the tensor {name!r}")
            return
        stored = tuple(tensors.mapped(name).shape)
        if stored != shape:
            raise UnsupportedModelError(
                f"tensor {name!r} of {source.path} has shape {stored}, expected {shape} by "
                "config.json"
            )

    for head in range(heads.count):
        for part, shape in heads.shapes.items():
            check(layout.stored(head, layers, part), shape)
        if layout is DEEPSEEK:
            for part in (HEAD, EMBEDDING):
                table = (block.vocab_size, block.hidden)
                check(layout.stored(head, layers, f"{part}.weight"), table, optional=True)
        known.add(layout.stored(head, layers, "self_attn.rotary_emb.inv_freq"))
    if layout.after_norm:
        check(FINAL_NORM, (block.hidden,))
    held = {
        name
        for name in names
        if name.startswith(layout.begin)
        and not (layout is DEEPSEEK and layout.head_of(name, layers) is None)  # the target's
    }
    if unknown := sorted(held - known):
        raise UnsupportedModelError(
            f"{source.path} holds the tensors {unknown[:5]}, which no MTP head of a model of type "
            f"{block.model_type!r} has"
        )
