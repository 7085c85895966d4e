"""Layers of a drafter for one target: their shape, their tensors, and parts of their programs.

A drafter may have a reduced vocabulary: only the most frequent tokens are drafted (EAGLE-3, section
3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from paceline.convert import open_model
from paceline.convert.config import check_rope, rope_frequencies, rope_parameters
from paceline.convert.drafters import (
    DRAFT_TOKENS,
    DRAFTED,
    HF_FIELDS,
    DrafterTensors,
    config_errors,
)
from paceline.convert.folder_files import one_line
from paceline.convert.model_source import remembered_by_transformers
from paceline.convert.weights import plain
from paceline.decoder import UnsupportedModelError
from paceline.decoder.linear import Linear
from paceline.device import device_of
from paceline.kernels import Heads, Norm, Recorder
from paceline.kernels.linear import pack_rotated
from paceline.kernels.quantised import QUANT_BLOCK, quantise
from paceline.kernels.rotated import DOWN_SIZE, SIZE, RotatedMatrix, rotates

_MAX_SIZE = 1 << 31


def drafted_tokens(folder: Path, config: LayerShape) -> Tensor | None:
    """Read the target's id of each token that is drafted, int64 ``[R]``; None if all are. Raises
    ``UnsupportedModelError`` if they are missing, are not that many rising ids, or ``t2d`` tells of
    others."""
    if not config.draft_vocab_size:
        return None
    weights = DrafterTensors(folder, torch.float32)
    ids = weights.draft_tokens()
    count, vocab = config.draft_vocab_size, config.vocab_size
    valid = ids.dtype == torch.int64 and ids.shape == (count,)
    if not valid or ids[0] < 0 or ids[-1] >= vocab or (ids.diff() <= 0).any():
        raise UnsupportedModelError(
            f"{folder} has no valid tensor {DRAFT_TOKENS!r}, expected {count} rising token ids "
            f"below {vocab}"
        )
    if DRAFTED in weights and not torch.equal(weights.stored(DRAFTED).nonzero()[:, 0], ids):
        raise UnsupportedModelError(
            f"tensors {DRAFTED!r} and {DRAFT_TOKENS!r} of {folder} tell of different drafted tokens"
        )
    return ids


def draft_rows(drafted: Tensor | None, tokens: Tensor) -> Tensor:
    """Return the row of each token among the drafted ones, int64 like ``tokens``; R for tokens that
    are not ``drafted`` (rising ids, int64 ``[R]``, or None for all)."""
    if drafted is None:
        return tokens
    rows = torch.searchsorted(drafted, tokens.contiguous())
    is_drafted = drafted[rows.clamp(max=len(drafted) - 1)] == tokens
    return torch.where(is_drafted, rows, len(drafted))


@dataclass(frozen=True)
class LayerShape:
    """Widths, heads and rotary embedding of a drafter's layers.

    Embedding and LM head are the target's, and so are ``hidden`` and ``vocab_size``. Raises
    ``UnsupportedModelError`` if a field is out of range.
    """

    method: ClassVar[str]  # its method
    SIZES: ClassVar[tuple[str, ...]] = tuple(HF_FIELDS)  # names of the fields above 0
    hidden: int  # width of the residual stream
    intermediate: int  # width of the feed-forward blocks
    q_heads: int  # query heads
    kv_heads: int  # key and value heads; divides ``q_heads``
    head_dim: int  # width of a head
    vocab_size: int  # rows of the target's embedding
    max_position: int  # maximum context, in tokens
    norm_eps: float  # epsilon of every RMS norm
    rope_parameters: Mapping[str, Any]  # ``rope_parameters`` of a transformers configuration
    # Tokens that can be drafted, the most frequent ones (EAGLE-3, section 3); 0: all of the
    # vocabulary.
    draft_vocab_size: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        for name in self.SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 < value < _MAX_SIZE:
                raise UnsupportedModelError(
                    f"{name} is {value!r}, expected a number above 0 and below {_MAX_SIZE}"
                )
        if self.q_heads % self.kv_heads:
            raise UnsupportedModelError(
                f"{self.q_heads} query heads are not a multiple of {self.kv_heads} kv heads"
            )
        if not 0 <= self.draft_vocab_size <= self.vocab_size:
            raise UnsupportedModelError(
                f"draft_vocab_size is {self.draft_vocab_size}, expected 0 (all) to "
                f"{self.vocab_size}, the vocabulary of the target"
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Raises ``UnsupportedModelError`` if a field is missing, unknown or out of range."""
        with config_errors(cls.method):
            lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
            eps, rope = float(fields["norm_eps"]), dict(fields["rope_parameters"])
            return cls(**{**fields, **lists, "norm_eps": eps, "rope_parameters": rope})

    @classmethod
    def for_target(cls, path: str | Path, **fields: Any) -> Self:
        """Return the shape of a drafter's layers for a target, a folder or GGUF file.

        ``fields`` are those that it does not have, or that replace its own unless they are None.
        Negative numbers of target layers count from the last, fractions are shares of them. Raises
        ``UnsupportedModelError`` if the decoder does not support the target, or it lacks a layer,
        and ``FileNotFoundError`` if there is no such file, or the folder has no config.json.
        """
        source = open_model(path)
        target = source.config()
        shape = {
            **{name: getattr(target, name) for name in HF_FIELDS},
            "norm_eps": target.norm_eps,
            "rope_parameters": rope_parameters(source.hf_config),
            "target_layers": target.layers,
            **{name: value for name, value in fields.items() if value is not None},
        }

        def number(layer: float) -> int:
            if 0 < layer < 1:
                return int(layer * target.layers)
            return int(layer + target.layers if layer < 0 else layer)

        if "target_layer" in shape:
            shape["target_layer"] = number(shape["target_layer"])
        else:
            shape["taps"] = tuple(map(number, shape["taps"]))
        return cls(**shape)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the drafter's own tensors by name."""
        raise NotImplementedError

    def layer_tensors(
        self, base: str, inputs: int = 0, *, head_norms: bool = False
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's tensors: attention, whose projections read ``inputs`` (0:
        the residual stream), and feed-forward block, with the norms before them."""
        wide, q, kv = self.hidden, self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        read, norms = inputs or wide, ("q_norm", "k_norm") if head_norms else ()
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm": (wide,),
            "self_attn.q_proj": (q, read),
            "self_attn.k_proj": (kv, read),
            "self_attn.v_proj": (kv, read),
            "self_attn.o_proj": (wide, q),
            **{f"self_attn.{name}": (self.head_dim,) for name in norms},
            "post_attention_layernorm": (wide,),
            "mlp.gate_proj": (self.intermediate, wide),
            "mlp.up_proj": (self.intermediate, wide),
            "mlp.down_proj": (wide, self.intermediate),
        }
        return {f"{base}{name}.weight": shape for name, shape in shapes.items()}

    @property
    def drafted(self) -> int:
        """Tokens that can be drafted: rows of the LM head."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def of_target(self) -> dict[str, int]:
        """What a target must have: values by fields of its configuration."""
        return {"vocab_size": self.vocab_size, "hidden": self.hidden}

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def rope_inv_freq(self) -> tuple[float, ...]:
        """Inverse frequencies after scaling, one per pair of dimensions."""
        return self._rope[0]

    @property
    def rope_scaling(self) -> float:
        """Factor on cosine and sine: YaRN's attention factor, otherwise 1."""
        return self._rope[1]

    @cached_property
    def _rope(self) -> tuple[tuple[float, ...], float]:
        shape = (self.hidden, self.q_heads, self.head_dim, self.max_position)
        facts = ("rope", *shape, sorted(self.rope_parameters.items()))
        frequencies, scaling = remembered_by_transformers(facts, partial(_rope_of, self))
        return tuple(frequencies), scaling


def _rope_of(shape: LayerShape) -> tuple[list[float], float]:
    hf: Any = SimpleNamespace(
        hidden_size=shape.hidden,
        num_attention_heads=shape.q_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position,
        rope_parameters=dict(shape.rope_parameters),
    )
    check_rope(hf)
    if shape.rope_parameters.get("rope_type", "default") != "default":
        from transformers import LlamaConfig

        try:
            hf = LlamaConfig(**vars(hf))
        except Exception as error:  # as above
            raise UnsupportedModelError(
                f"rope_parameters are invalid: {one_line(error)}"
            ) from error
    with torch.device("cpu"):  # even if the model is created on the meta device
        frequencies, scaling = rope_frequencies(hf)
    return frequencies.tolist(), scaling


@dataclass(frozen=True)
class TappedShape(LayerShape):
    """Shape of a drafter that reads outputs of target layers."""

    # These layers, 0 for the first, strictly increasing.
    taps: tuple[int, ...] = field(kw_only=True)
    # Number of layers of the target; 0: not known.
    target_layers: int = field(default=0, kw_only=True)
    # Positions that attention reads; 0: all. Unit: tokens.
    window: int = field(default=0, kw_only=True)
    # Names of the fields of 0 or more.
    COUNTS: ClassVar[tuple[str, ...]] = ("window", "target_layers")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise UnsupportedModelError(f"{name} is {value!r}, expected 0 or more")
        ends = (-1, *self.taps, *((self.target_layers,) if self.target_layers else ()))
        if not self.taps or any(high <= low for low, high in pairwise(ends)):
            raise UnsupportedModelError(
                f"the drafter reads target layers {list(self.taps)}, expected strictly increasing "
                "numbers from 0: the target has "
                f"{self.target_layers or 'an unknown number of'} layers"
            )


@dataclass(frozen=True)
class LayerWeights:
    """A drafter's tensors by name, as the parts of programs, which share them."""

    config: LayerShape  # shape of the drafter
    tensors: Mapping[str, Tensor]  # see :func:`~paceline.drafter.methods.checkpoint.load_weights`
    bits: int = 0  # of matrices, 8 or 4, see :func:`linear`; 0: as they came
    numerics: str = "portable"  # numerics of the programs, as of `choose_numerics`
    _made: dict[tuple[str, ...], Linear] = field(default_factory=dict, init=False, repr=False)

    @property
    def heads(self) -> Heads:
        return Heads(self.config.q_heads, self.config.kv_heads, self.config.head_dim)

    def recorder(self, dtype: torch.dtype) -> Recorder:
        """Begin a program of the layers, whose hidden states have a type."""
        return Recorder(self.heads, dtype, numerics=self.numerics)

    def norm(self, name: str) -> Norm:
        return Norm(self.tensors[f"{name}.weight"].float(), self.config.norm_eps)

    def matrix(self, *names: str) -> Linear:
        """Return linear layers of one input as one layer."""
        if names not in self._made:
            parts = [self.tensors[f"{name}.weight"] for name in names]
            self._made[names] = linear(parts, self.bits, names[-1].endswith("down_proj"))
        return self._made[names]

    def head_norms(self, base: str) -> tuple[Norm, Norm]:
        """Return the norms of query and key heads of the layer ``base``."""
        return self.norm(f"{base}self_attn.q_norm"), self.norm(f"{base}self_attn.k_norm")

    def feed_forward(self, program: Recorder, x: int, delta: int, base: str) -> int:
        """Record ``x += delta`` and the feed-forward block of a layer; returns its output."""
        inputs = program.add_norm(x, delta, self.norm(f"{base}post_attention_layernorm"))
        return self.gated(program, inputs, base)

    def gated(self, program: Recorder, inputs: int, base: str) -> int:
        """Record the feed-forward block of a layer without its norm; returns its output."""
        gate_up = self.matrix(f"{base}mlp.gate_proj", f"{base}mlp.up_proj")
        gated = program.gate(program.multiply(inputs, gate_up))
        return program.multiply(gated, self.matrix(f"{base}mlp.down_proj"))


def linear(parts: Sequence[Tensor], bits: int, down: bool = False) -> Linear:
    """Return linear layers ``[out, in]`` of one input as one layer.

    With 8 ``bits`` the weights get one scale an output over rotated inputs
    (:mod:`paceline.kernels.rotated`), larger parts of them for a ``down`` projection; off the CPU
    only 16-bit weights do. With 4 they get blocks of 32, if ``in`` is a multiple of 32. Other
    weights off the CPU are rounded to such blocks and stored as they came.
    """
    weight = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    packs = device_of(weight.device).packs
    if bits == 8 and rotates(weight.shape[1]) and (packs or weight.dtype.itemsize == 2):
        rotated = RotatedMatrix.of(weight, DOWN_SIZE if down else SIZE)
        return Linear(pack_rotated(rotated) if packs else rotated)
    if not bits or weight.shape[1] % QUANT_BLOCK:
        return Linear(weight)
    blocks = quantise(weight.float(), bits)
    return Linear(blocks if packs else plain(blocks, weight.dtype))
