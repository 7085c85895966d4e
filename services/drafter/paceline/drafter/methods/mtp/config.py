"""Heads for multi-token prediction in a folder: their layouts, tensors and shape.

A head is a layer of the target's family behind a projection of two inputs: the embedding of a
token, and the hidden state of the position before it. Projects name its tensors differently, and
differ in the order of both inputs and in which states are normalised (:data:`LAYOUTS`). Here a head
has the names of DeepSeek-V3: it is a layer behind the target's last one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from paceline.convert import ModelSource, open_model
from paceline.convert.drafters import DRAFT_TOKENS, HF_FIELDS, config_errors
from paceline.convert.families import layer_shapes
from paceline.convert.folder_files import read_object
from paceline.convert.weights import Tensors, Weight
from paceline.decoder import DecoderConfig, UnsupportedModelError
from paceline.drafter.methods.base import SECTION
from paceline.drafter.methods.checkpoint import CONFIG_FILE, TargetRef, save_drafter
from paceline.drafter.methods.layers import TappedShape, drafted_tokens

# Fields of a config.json with the number of heads.
COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")

ENORM, HNORM, PROJECTION, NORM = "enorm", "hnorm", "eh_proj", "shared_head.norm"
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
        """Name of a part of a head, or of its layer, behind a target of so many ``layers``."""
        stem, dot, kind = part.rpartition(".")
        found = self.parts.get(stem)
        name = self.block + part if found is None else f"{found}{dot}{kind}"
        return name.format(head=head, layer=layers + head)

    def head_of(self, name: str, layers: int) -> int | None:
        """The head whose layer a tensor is of; None if it is of none."""
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
class MtpConfig(TappedShape):
    """Shape of heads, which read outputs of the target's last layer. Raises
    ``UnsupportedModelError`` if a field is out of range."""

    method: ClassVar[str] = "mtp"
    # Whether heads of queries and keys are normalised, where there is no `block`.
    qk_norm: bool = False
    # Number of heads. Level n of a tree is drafted by the nth, deeper ones by the last.
    heads: int = field(default=1, kw_only=True)
    layout: MtpLayout = field(default=DEEPSEEK, kw_only=True)  # how the folder stores them
    # Their layer, as one of a model; None: in training, a layer of `llama` or `qwen3`.
    block: DecoderConfig | None = field(default=None, kw_only=True)

    def to_json(self) -> dict[str, Any]:
        fields = super().to_json()
        del fields["layout"], fields["block"]
        return fields

    @property
    def of_target(self) -> dict[str, int]:
        return {**super().of_target, "layers": self.target_layers}

    @property
    def states(self) -> int:
        return self.hidden

    @property
    def rope_inv_freq(self) -> tuple[float, ...]:
        return super().rope_inv_freq if self.block is None else self.block.rope_inv_freq

    @property
    def rope_scaling(self) -> float:
        return super().rope_scaling if self.block is None else self.block.rope_scaling

    @classmethod
    def for_target(cls, path: str | Path, **fields: Any) -> Self:
        """See :meth:`LayerShape.for_target`. All dimensions of a head are rotated."""
        found = super().for_target(path, taps=(-1,), **fields)
        rope = {
            name: value
            for name, value in found.rope_parameters.items()
            if name != "partial_rotary_factor"
        }
        return replace(found, rope_parameters=rope)


class HeadTensors(Tensors[Weight]):
    """Tensors of heads and their target by the names of DeepSeek-V3, in whatever layout."""

    def __init__(self, stored: Mapping[str, Weight], config: MtpConfig) -> None:
        """Take tensors by their names in the folder."""
        self._stored, self._config = stored, config
        self._names = {}

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.stored_name(name) in self._stored

    def __getitem__(self, name: str) -> Weight:
        return self._stored[self.stored_name(name)]

    def stored_name(self, name: str) -> str:
        layers = self._config.target_layers
        head = DEEPSEEK.head_of(name, layers)
        if head is None:
            return name
        part = name.removeprefix(DEEPSEEK.block.format(layer=layers + head))
        return self._config.layout.stored(head, layers, part)


def head_count(described: Mapping[str, Any]) -> int | None:
    """The number of heads that a config.json names; None if it names none."""
    text = described.get("text_config")
    parts = [described, text if isinstance(text, dict) else {}]
    found = [part[name] for part in parts for name in COUNTS if part.get(name) is not None]
    return found[0] if found else None


def read_mtp(source: ModelSource, weights: str = "auto") -> MtpConfig:
    """Read the shape of the heads in a target or a folder with heads alone, and check their
    tensors; ``weights`` as in :meth:`ModelSource.config`. Raises ``UnsupportedModelError`` if there
    are no heads, others than config.json describes, or a tensor is missing, has another shape or is
    not known."""
    if source.path.is_file():
        raise UnsupportedModelError(
            f"{source.path} is a file; MTP heads are read from Hugging Face folders: give the one "
            "of this model as mtp:DIR"
        )
    block = source.config(weights)
    names = list(source.tensors(block.dtype, "cpu"))
    described = read_object(source.path / CONFIG_FILE)
    for layout in LAYOUTS:
        found = {layout.head_of(name, block.layers) for name in names} - {None}
        if found:
            break
    else:
        raise UnsupportedModelError(
            f"{source.path} has no MTP heads: expected tensors mtp.*, model.mtp_layers.* or "
            f"model.layers.{block.layers}.*; use another method, or train heads by "
            "`paceline train mtp`"
        )
    named = head_count(described)
    if named is not None and named != len(found):
        raise UnsupportedModelError(
            f"config.json of {source.path} names {named!r} MTP heads, but the folder has tensors "
            f"of {len(found)}"
        )
    if block.logit_cap or block.logit_scale != 1.0:
        raise UnsupportedModelError(
            f"MTP heads of a model of type {block.model_type!r}, which scales or caps its logits, "
            "are not supported"
        )
    windows = set(block.windows)
    window = (windows.pop() or 0) if len(windows) == 1 else 0
    with config_errors(MtpConfig.method):
        drafted = int(described.get("draft_vocab_size") or block.vocab_size)
        if SECTION in described:  # trained beside its target
            window = int(described[SECTION]["shape"]["window"])
    config = MtpConfig(
        **{name: getattr(block, name) for name in (*HF_FIELDS, "norm_eps")},
        rope_parameters={},
        taps=(block.layers - 1,),
        target_layers=block.layers,
        window=window,
        draft_vocab_size=drafted if drafted != block.vocab_size else 0,
        heads=len(found),
        layout=layout,
        block=block,
    )
    _check_tensors(source, config, names)
    return config


def head_shapes(config: MtpConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a head, by names without the beginning of :data:`DEEPSEEK`."""
    assert config.block is not None
    wide = config.hidden
    own = {f"{name}.weight": (wide,) for name in (ENORM, HNORM, NORM)}
    return {**layer_shapes(config.block), **own, f"{PROJECTION}.weight": (wide, 2 * wide)}


def _check_tensors(source: ModelSource, config: MtpConfig, names: list[str]) -> None:
    """Check names and shapes of all tensors of heads, without reading."""
    tensors: Any = source.tensors(torch.float32, "cpu")
    layout, layers = config.layout, config.target_layers
    table = (config.vocab_size, config.hidden)
    known: set[str] = set()

    def check(name: str, shape: tuple[int, ...], *, optional: bool = False) -> None:
        known.add(name)
        if name not in names:
            if not optional:
                raise UnsupportedModelError(f"{source.path} lacks the tensor {name!r}")
            return
        found = tuple(tensors.mapped(name).shape)
        if found != shape:
            raise UnsupportedModelError(
                f"tensor {name!r} of {source.path} has shape {found}, expected {shape} by "
                "config.json"
            )

    for head in range(config.heads):
        for part, shape in head_shapes(config).items():
            check(layout.stored(head, layers, part), shape)
        if layout is DEEPSEEK:
            for part in (HEAD, EMBEDDING):
                check(layout.stored(head, layers, f"{part}.weight"), table, optional=True)
        known.add(layout.stored(head, layers, "self_attn.rotary_emb.inv_freq"))
    if layout.after_norm:
        check(FINAL_NORM, (config.hidden,))
    if unknown := sorted(set(_own_names(config, names)) - known):
        raise UnsupportedModelError(
            f"{source.path} holds the tensors {unknown[:5]}, which no MTP head of a model of type "
            f"{config.block.model_type!r} has"  # type: ignore[union-attr]
        )


def _own_names(config: MtpConfig, names: list[str]) -> Iterator[str]:
    """Names of all tensors that belong to heads."""
    layout, layers = config.layout, config.target_layers
    for name in names:
        target_s = layout is DEEPSEEK and layout.head_of(name, layers) is None
        if name.startswith(layout.begin) and not target_s:
            yield name


def save_mtp(
    folder: str | Path,
    config: MtpConfig,
    weights: Mapping[str, Tensor],
    target: TargetRef,
    final_norm: Tensor,
    *,
    levels: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write a head's folder in the layout of DeepSeek-V3, beside a target without heads, with the
    factors of the target's final norm, ``[hidden]``; see :func:`save_drafter`."""
    described = {
        **{key: getattr(config, name) for name, key in HF_FIELDS.items()},
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": dict(config.rope_parameters),
        "architectures": ["MtpDraftModel"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "num_hidden_layers": config.target_layers,
        "num_nextn_predict_layers": config.heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "draft_vocab_size": config.drafted,
    }
    named = {name if name == DRAFT_TOKENS else f"model.{name}": t for name, t in weights.items()}
    save_drafter(
        folder, config, {**named, FINAL_NORM: final_norm}, target, levels=levels, dtype=dtype,
        notes=notes, further=described,
    )  # fmt: skip


def load_mtp(folder: Path) -> tuple[MtpConfig, dict[str, Tensor]]:
    """Read the shape and the float32 weights of a folder that :func:`save_mtp` wrote, to train its
    head further."""
    source, described = open_model(folder), read_object(folder / CONFIG_FILE)
    config = MtpConfig.from_json(described[SECTION]["shape"])
    tensors = source.tensors(torch.float32, "cpu")
    weights = {
        name.removeprefix("model."): source.tensor(name, torch.float32, "cpu")
        for name in tensors
        if DEEPSEEK.head_of(name, config.target_layers) is not None
    }
    drafted = drafted_tokens(folder, config)
    return config, weights if drafted is None else {**weights, DRAFT_TOKENS: drafted}
