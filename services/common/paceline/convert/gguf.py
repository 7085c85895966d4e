"""Models in GGUF files: configuration, tensors and tokenizer by the names of Hugging Face."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from paceline.convert.config import decoder_config, rope_frequencies, rope_parameters
from paceline.convert.families import (
    FAMILIES,
    GGUF_ENDINGS,
    GGUF_NAMES,
    expert_name,
    own_tensors,
    refusal,
    unread_tensors,
)
from paceline.convert.folder_files import part_paths
from paceline.convert.gguf_file import (
    GgufArray,
    GgufFile,
    check_format,
    converted_bits,
    decode,
    read_gguf,
)
from paceline.convert.gguf_tokenizer import GgufTokenizer
from paceline.convert.model_source import ModelSource, file_facts
from paceline.convert.weights import (
    Tensors,
    Weight,
    WeightsOf,
    fingerprint_files,
    in_columns,
    in_order,
    plain,
)
from paceline.decoder.config import DecoderConfig, UnsupportedModelError
from paceline.decoder.remembered import remembered
from paceline.device import device_of
from paceline.kernels import DeltaShape
from paceline.kernels.quantised import QuantisedMatrix

# Name of the token embedding.
EMBEDDING = "token_embd.weight"
_MAX_NUMBER = (1 << 31) - 1
_log = logging.getLogger(__name__)
_HEAD = "output.weight"
_ROPE_FACTORS = "rope_freqs.weight"
_LONG_FACTORS = {
    "long_factor": "rope_factors_long.weight",
    "short_factor": "rope_factors_short.weight",
}
_TEMPLATE = "tokenizer.chat_template"
_GATES_UPS, _BOTH = ("mlp.experts.gate_proj", "mlp.experts.up_proj"), "mlp.experts.gate_up_proj"
_FUSED = ("ssm_beta.weight", "ssm_alpha.weight")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_CONTEXT = 8192  # original context of all Llama 3 models with scaled frequencies


class Metadata:
    """Checked values of a file's metadata.

    Raises ``UnsupportedModelError`` if a value is missing, of another type or out of range.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._values = file.metadata
        self.architecture = str(self._values.get("general.architecture"))
        self.model_type = self._model_type()
        self.family = FAMILIES[self.model_type]
        tensors = file.tensors
        # Blocks behind the layers predict further tokens; they are left out.
        self.layers = self.count("block_count") - self._optional("nextn_predict_layers", 0)
        if not 0 < self.layers <= len(tensors):
            raise self._error(f"{self.layers} layers in {len(tensors)} tensors")
        self.hidden = self.count("embedding_length")
        routed = self.family.experts is True or (self.family.experts and self.get("expert_count"))
        self.experts = self.count("expert_count") if routed else 0
        # Whether gates and ups of experts are one tensor.
        self.fused_experts = any(".ffn_gate_up_exps." in name for name in tensors)
        wide = "expert_feed_forward_length"
        named = self.experts and self.get(wide) is not None
        blocks = [0.0]
        if isinstance(self.get("feed_forward_length"), GgufArray):
            blocks = self.numbers("feed_forward_length")
            if not all(0 < length <= _MAX_NUMBER for length in blocks):
                raise self._error(f"feed_forward_length has {min(blocks)}, expected widths above 0")
        self.intermediate = int(blocks[0]) or self.count(wide if named else "feed_forward_length")
        self.q_heads = self.count("attention.head_count")
        by_kind = self.family.heads_by_kind
        last = self._optional("attention.shared_kv_layers", 0) if by_kind else 0
        self.shared_layers = tuple(range(max(0, self.layers - last), self.layers))
        self.layer_input = self._optional("embedding_length_per_layer_input", 0)
        # Whether layers have windows, where heads differ by that.
        pattern = "attention.sliding_window_pattern"
        self.windows = [bool(flag) for flag in self.numbers(pattern)] if by_kind else []
        counts = self._kv_counts()
        self.kv_heads = max(counts)
        if self.q_heads % self.kv_heads:
            raise self._error(f"{self.q_heads} heads are no multiple of {self.kv_heads} kv heads")
        self.head_dim = self.count("attention.key_length", max(1, self.hidden // self.q_heads))
        self.rope_dim = self.count("rope.dimension_count", self.head_dim)
        widths = {"attention.value_length": self.count("attention.value_length", self.head_dim)}
        if not self.family.partial_rope:
            widths["rope.dimension_count"] = self.rope_dim
        for name, width in widths.items():
            if width != self.head_dim:
                raise self._error(f"{name} differs from the width of keys, {self.head_dim}")
        # KV heads and width of heads of layers without a window, and with one.
        self.heads = [(self.kv_heads, self.head_dim)] * 2
        self.keys_as_values = False
        if self.windows:
            self._read_heads(counts)
        if self.rope_dim > self.head_dim or self.rope_dim % 2:
            raise self._error(f"{self.rope_dim} of {self.head_dim} dimensions cannot be rotated")
        if self.head_dim % 2:
            raise self._error(f"heads have an odd width, {self.head_dim}")
        if EMBEDDING not in tensors or len(tensors[EMBEDDING].shape) != 2:
            raise self._error(f"lacks the tensor {EMBEDDING!r}, or it is no matrix")
        self.vocab_size = tensors[EMBEDDING].shape[0]
        first = self._optional("leading_dense_block_count", 0)
        step = self._optional("interleave_moe_layer_step", 1)
        dense = (i for i in range(self.layers) if i < first or (i + 1) % step)
        self.dense_layers = tuple(dense) if self.experts else ()
        self.dense_intermediate = self.count("feed_forward_length") if self.dense_layers else 0
        if blocks[-1] != blocks[0]:
            self.dense_layers, self.dense_intermediate = self.shared_layers, int(blocks[-1])
        self.delta_layers: tuple[int, ...] = ()
        self.delta: DeltaShape | None = None
        # Whether betas and decays are one projection, and value heads as in folders.
        self.fused = self.architecture == "qwen3next"
        if self.family.delta_inputs and not self.family.delta_outputs[1]:
            self.delta_layers = tuple(i for i, count in enumerate(counts) if not count)
            heads = math.gcd(self.hidden, self.q_heads)
            self.delta = DeltaShape(
                len(self.delta_layers), heads, heads, 0, self.hidden // heads,
                self.count("shortconv.l_cache"),
            )  # fmt: skip
        elif self.family.delta_inputs:
            interval = self._optional("full_attention_interval", 4)
            self.delta_layers = tuple(i for i in range(self.layers) if (i + 1) % interval)
            heads = self.count("ssm.time_step_rank")
            self.delta = DeltaShape(
                len(self.delta_layers), self.count("ssm.group_count"), heads,
                self.count("ssm.state_size"), self.count("ssm.inner_size") // heads,
                self.count("ssm.conv_kernel"),
            )  # fmt: skip
        beside = f".{GGUF_NAMES[f'{self.family.beside}.gate_proj']}."
        shared = next((t for name, t in tensors.items() if beside in name), None)
        self.shared_intermediate = shared.shape[0] if self.experts and shared is not None else 0
        self.biases: dict[str, bool] = {}  # fields of the transformers config, by the tensors
        self.qkv_bias = self._bias(self.family.qkv_bias, "attn_q")
        self.o_bias = self._bias(self.family.o_bias, "attn_output")
        self.mlp_bias = self._bias(self.family.mlp_bias, "ffn_gate")
        # Of GLM 4.5 some have norms of heads.
        named = "blk.0.attn_q_norm.weight" in tensors or self.model_type != "glm4_moe"
        self.qk_norm = bool(self.family.qk_norm) and named

    def feed_forward(self, layer: int) -> tuple[int, int]:
        """As :meth:`paceline.decoder.DecoderConfig.feed_forward`."""
        if layer in self.dense_layers:
            return 0, self.dense_intermediate
        return self.experts, self.intermediate

    def layer_heads(self, layer: int) -> tuple[int, int, int]:
        """As :meth:`paceline.decoder.DecoderConfig.layer_heads`."""
        full = bool(self.windows) and not self.windows[layer]
        projected = 2 if full and self.keys_as_values else 3
        return *self.heads[not full], 1 if layer in self.shared_layers else projected

    def window_types(self) -> list[str]:
        """Return the types of layers, with a window or without."""
        kinds = ("full_attention", "sliding_attention")
        return [kinds[bool(flag)] for flag in self.numbers("attention.sliding_window_pattern")]

    def _read_heads(self, counts: Sequence[int]) -> None:
        """Heads of layers without a window, and with one, from their widths and KV heads."""
        widths = [self.head_dim, self.count("attention.key_length_swa")]
        for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
            if self.count(name, widths[1]) != widths[1]:
                raise self._error(f"{name} differs from the width of keys, {widths[1]}")
        by_kind = dict(zip(self.windows, counts, strict=True))
        self.heads = [(by_kind.get(kind, counts[0]), widths[kind]) for kind in (False, True)]
        unshared = range(self.layers - len(self.shared_layers))
        self.keys_as_values = any(
            f"blk.{layer}.attn_v.weight" not in self._file.tensors
            for layer in unshared
            if not self.windows[layer]
        )

    def _kv_counts(self) -> list[int]:
        """Return KV heads of each layer: the same number, one for each kind of layers where heads
        differ, or 0 for a short convolution."""
        key = "attention.head_count_kv"
        if not isinstance(self.get(key), GgufArray):
            return [self.count(key, self.q_heads)] * self.layers
        heads = self.numbers(key)
        counts = set(heads) - ({0} if self.family.delta_inputs else set())
        if self.windows:
            one = len(set(zip(self.windows, heads, strict=True))) == len(set(self.windows))
        else:
            one = len(counts) == 1
        if not one or not all(1 <= count <= self.q_heads for count in counts):
            raise self._error(f"{key} has {sorted(set(heads))}, expected one number of heads")
        return [int(count) for count in heads]

    def _bias(self, field: bool | str, part: str) -> bool:
        if isinstance(field, bool):
            return field
        return self.biases.setdefault(field, f"blk.0.{part}.bias" in self._file.tensors)

    def _model_type(self) -> str:
        """Return the family: a file of OLMo 3 has OLMo 2's architecture, one of Mixtral Llama's."""
        known = {family.gguf: name for name, family in reversed(FAMILIES.items())}
        known.pop("", None)
        known["qwen3next"] = "qwen3_5_moe_text"  # the same layers, once projections are apart
        if self.architecture not in known:
            raise self._error(refusal("architecture", self.architecture, known, self._values))
        family = known[self.architecture]
        windows = self.get("attention.sliding_window") is not None
        if self.get("expert_count", 0) and not FAMILIES[family].experts:
            if family != "llama":
                raise self._error(f"experts are not supported in a model of type {family!r}")
            return "mixtral"
        return "olmo3" if family == "olmo2" and windows else family

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the architecture."""
        return self._values.get(f"{self.architecture}.{key}", default)

    def count(self, key: str, default: int | None = None) -> int:
        """Return an integer from 1 to 2^31 - 1."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_NUMBER:
            raise self._error(
                f"{self.architecture}.{key} is {value!r}, expected a number from 1 to {_MAX_NUMBER}"
            )
        return value

    def is_ahead(self, name: str) -> bool:
        """Return whether a tensor is of a block behind the layers."""
        start, _, rest = name.partition(".")
        number = rest.partition(".")[0]
        blocks = range(self.layers, self.count("block_count"))
        return start == "blk" and number.isdecimal() and int(number) in blocks

    def numbers(self, key: str) -> list[float]:
        """Return an array of numbers, one a layer."""
        value = self.get(key)
        if not isinstance(value, GgufArray) or not value.scalars or value.count != self.layers:
            raise self._error(
                f"{self.architecture}.{key} is {value!r}, expected {self.layers} numbers"
            )
        return list(value.numbers())

    def _optional(self, key: str, default: int) -> int:
        return self.count(key) if self.get(key) else default

    def real(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self.get(key, default)
        if not isinstance(value, float) or not 0 < value < math.inf:
            raise self._error(
                f"{self.architecture}.{key} is {value!r}, expected a finite number above 0"
            )
        return value

    def _error(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._file.path}: {what}")


def expected_tensors(values: Metadata) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield the tensors' names in the file, Hugging Face names and shapes, but the LM head's."""
    names = {**GGUF_NAMES, **values.family.gguf_names}
    yield EMBEDDING, "model.embed_tokens.weight", (values.vocab_size, values.hidden)
    yield f"{names['model.norm']}.weight", "model.norm.weight", (values.hidden,)
    for (name, stored), shape in own_tensors(values):
        yield stored, name, shape
    for index in range(values.layers):
        for name, shape in values.family.layer_tensors(values, index):
            part, _, kind = name.rpartition(".")
            if values.fused_experts and part in _GATES_UPS:
                if part == _GATES_UPS[0]:
                    stored, both = f"ffn_gate_up_exps.{kind}", f"{_BOTH}.{kind}"
                    shape = shape[0], 2 * shape[1], *shape[2:]
                    yield f"blk.{index}.{stored}", f"model.layers.{index}.{both}", shape
                continue
            stored = GGUF_ENDINGS.get(name) or f"{names[part]}.{kind}"
            if values.fused and stored in _FUSED:
                stored, shape = "ssm_ba.weight", (2 * shape[0], shape[1])
            if "conv" in stored and len(shape) == 3:
                shape = shape[::2]  # a matrix
            if shape[0] == 1 and len(shape) > 1:
                shape = shape[1:]
            yield f"blk.{index}.{stored}", f"model.layers.{index}.{name}", shape


class GgufModel(ModelSource):
    """A GGUF file of an architecture in ``FAMILIES``."""

    def __init__(self, path: Path) -> None:
        """Open a file, and check that it has all tensors of its configuration and no others; see
        :func:`read_gguf` for the errors."""
        self.path = path
        self._file = read_gguf(path)
        self._metadata = Metadata(self._file)
        self._check_tensors()
        self._tokenizer = GgufTokenizer(self._file, self._metadata.vocab_size)

    @property
    def name(self) -> str:
        return re.sub(r"-\d{5}-of-\d{5}$", "", self.path.stem)

    @cached_property
    def hf_config(self) -> Any:
        from transformers import AutoConfig

        values = self._metadata
        fields = {
            "architectures": list(self.architectures),
            "hidden_size": values.hidden,
            "intermediate_size": values.dense_intermediate or values.intermediate,
            "num_hidden_layers": values.layers,
            "num_attention_heads": values.q_heads,
            "num_key_value_heads": values.kv_heads,
            "head_dim": values.head_dim,
            "vocab_size": values.vocab_size,
            "max_position_embeddings": values.count("context_length"),
            "rms_norm_eps": values.real("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope_parameters(),
            "tie_word_embeddings": _HEAD not in self._file.tensors,
            "bos_token_id": self._tokenizer.added_bos,
            "eos_token_id": self._tokenizer.eos,
            "pad_token_id": None,
            "dtype": self._dtype(),
        }
        fields |= values.biases | values.family.gguf_values(values)
        config = AutoConfig.for_model(values.model_type, **fields)
        if _ROPE_FACTORS in self._file.tensors:
            self._check_rope_factors(config)
        return config

    @property
    def architectures(self) -> tuple[str, ...]:
        return (f"{self._metadata.family.model}ForCausalLM",)

    def config_facts(self) -> tuple[object, ...]:
        return tuple(map(file_facts, self.files()))

    def read_config(self, weights: torch.dtype | str) -> DecoderConfig:
        floats = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16}
        stored = None if self._formats().keys() <= floats else "gguf"
        config = decoder_config(self.hf_config, self._tokenizer.ends(), weights, stored)
        return replace(config, norm_offset=0.0)  # the norms of a file contain the offset

    def tensors(self, dtype: torch.dtype, device: torch.device | str) -> Mapping[str, Weight]:
        return _Tensors(self._file, self._metadata, dtype, device)

    def weights(
        self, config: DecoderConfig, device: torch.device | str = "cpu"
    ) -> Mapping[str, Weight]:
        if config.weights != "gguf" or not device_of(device).packs:
            return super().weights(config, device)
        for kind, count in self._formats().items():
            if bits := converted_bits(kind):
                loss = "a KL divergence of 0.02 to 0.05 at 1.5B" if bits == 4 else "hardly any loss"
                _log.info(
                    "%s: %d matrices of format %s are converted to %d bits in blocks of 32: %s",
                    self.path, count, kind.name, bits, loss,
                )  # fmt: skip
        stored = _Tensors(self._file, self._metadata, torch.float32, "cpu", small=True)
        return WeightsOf(stored, config, torch.device(device))

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        weights = _Tensors(self._file, self._metadata, dtype, device)
        if name not in weights:
            raise UnsupportedModelError(f"{self.path} lacks the tensor {name!r}")
        return plain(weights[name], dtype).to(device)

    @cached_property
    def tokenizer(self) -> bytes:
        """As llama.cpp reads it. Raises ``UnsupportedModelError`` if it is of an unknown kind."""
        facts = ("tokenizer", *self.config_facts())
        return str(remembered(facts, self._tokenizer.tokenizer_json)).encode()

    @property
    def chat_templates(self) -> Mapping[str, str]:
        templates = {
            key.removeprefix(_TEMPLATE).removeprefix(".") or "default": value
            for key, value in self._file.metadata.items()
            if isinstance(value, str) and (key == _TEMPLATE or key.startswith(f"{_TEMPLATE}."))
        }
        return {name: template for name, template in templates.items() if template}

    @property
    def special_tokens(self) -> Mapping[str, str]:
        return self._tokenizer.special_tokens()

    def files(self) -> list[Path]:
        return part_paths(self.path)

    def read_fingerprint(self) -> str:
        return fingerprint_files(b"", self.files())

    def _formats(self) -> Counter[GGMLQuantizationType]:
        return Counter(t.kind for t in self._file.tensors.values() if len(t.shape) > 1)

    def _dtype(self) -> str:
        return "float32" if set(self._formats()) == {GGMLQuantizationType.F32} else "bfloat16"

    def _check_tensors(self) -> None:
        expected = {name: shape for name, _, shape in expected_tensors(self._metadata)}
        extra = self._file.tensors.keys() - expected.keys()
        extra -= {_HEAD, _ROPE_FACTORS, *_LONG_FACTORS.values()}
        for layer in self._metadata.shared_layers:
            for name in unread_tensors(self._metadata, layer):
                extra.discard(f"blk.{layer}.{GGUF_NAMES[name.removesuffix('.weight')]}.weight")
        extra = {name for name in extra if not self._metadata.is_ahead(name)}
        if extra:
            raise UnsupportedModelError(
                f"{self.path}: tensor {min(extra)!r} is not part of a supported "
                f"{self._metadata.architecture} model"
            )
        if _HEAD in self._file.tensors:
            expected[_HEAD] = expected[EMBEDDING]
        for name, shape in expected.items():
            tensor = self._file.tensors.get(name)
            if tensor is None:
                raise UnsupportedModelError(
                    f"{self.path} lacks the tensor {name!r}: the file is incomplete"
                )
            if tensor.shape != shape:
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name!r} has shape {tensor.shape}, expected {shape} by "
                    "the metadata"
                )
            check_format(self._file, tensor)

    def _rope_parameters(self) -> dict[str, Any]:
        values = self._metadata
        theta = values.real("rope.freq_base", 10000.0)
        rope = {"rope_theta": theta, **self._rope_scaling()}
        if values.family.partial_rope:
            rope["partial_rotary_factor"] = values.rope_dim / values.head_dim
        if not values.family.local_rope:
            return rope
        # Files of Gemma 3 have no base for sliding layers; OLMo 3 has one base for all.
        default = theta if values.model_type == "olmo3" else 10000.0
        base = values.real("rope.freq_base_swa", default)
        local = {"rope_type": "default", "rope_theta": base}
        return {"full_attention": rope, "sliding_attention": local}

    def _factors(self, name: str, width: int) -> Tensor:
        """Return factors on frequencies of ``width`` rotated dimensions, fp32 ``[width / 2]``."""
        tensor, shape = self._file.tensors.get(name), (width // 2,)
        if tensor is None or tensor.shape != shape:
            raise UnsupportedModelError(f"{self.path} lacks the tensor {name!r} of shape {shape}")
        return plain(decode(self._file, tensor), torch.float32)

    def _rope_scaling(self) -> dict[str, Any]:
        values = self._metadata
        if any(name in self._file.tensors for name in _LONG_FACTORS.values()):
            context = values.count("rope.scaling.original_context_length")
            return {
                "rope_type": "longrope",
                "attention_factor": values.real("rope.scaling.attn_factor", 1.0),
                "original_max_position_embeddings": context,
                **{
                    key: self._factors(name, values.rope_dim).tolist()
                    for key, name in _LONG_FACTORS.items()
                },
            }
        if _ROPE_FACTORS in self._file.tensors:
            factors = self._factors(_ROPE_FACTORS, values.head_dim)
            if values.windows:
                part = float((factors == 1).sum()) / len(factors)
                return {"rope_type": "proportional", "partial_rotary_factor": part}
            factor = factors.max()
            original = {"original_max_position_embeddings": _LLAMA3_CONTEXT}
            return {"rope_type": "llama3", "factor": float(factor), **_LLAMA3, **original}
        kind = values.get("rope.scaling.type", "none")
        if kind == "none":
            return {"rope_type": "default"}
        if kind not in ("linear", "yarn"):
            raise UnsupportedModelError(
                f"{self.path}: rope scaling {kind!r} is not supported, expected linear or yarn"
            )
        scaling: dict[str, Any] = {"rope_type": kind, "factor": values.real("rope.scaling.factor")}
        if kind == "yarn":
            context = values.count("rope.scaling.original_context_length")
            scaling["original_max_position_embeddings"] = context
            if values.model_type == "gpt_oss":
                scaling["truncate"] = False  # as in all models of this type
            if values.model_type == "ministral3":
                scaling["mscale"] = values.real("rope.scaling.yarn_log_multiplier", 1.0)
                scaling["mscale_all_dim"] = scaling["mscale"]
                scaling["llama_4_scaling_beta"] = values.real("attention.temperature_scale")
        return scaling

    def _check_rope_factors(self, config: Any) -> None:
        """Check the factors, as the file has no rule: they must be Llama 3's, or 1 for the first
        dimensions and so large for the others that these are not turned."""
        factors = self._factors(_ROPE_FACTORS, self._metadata.head_dim)
        exponents = torch.arange(len(factors), dtype=torch.float32) / len(factors)
        rule = rope_parameters(config)
        stored = 1.0 / rule["rope_theta"] ** exponents / factors
        if not torch.allclose(stored, rope_frequencies(config)[0], rtol=1e-4, atol=1e-20):
            raise UnsupportedModelError(
                f"{self.path}: the factors in {_ROPE_FACTORS!r} are not {rule['rope_type']!r}"
            )


class _Tensors(Tensors[Weight]):
    """Tensors of a file by their Hugging Face names, each decoded on access."""

    def __init__(
        self, file: GgufFile, values: Metadata, dtype: torch.dtype, device: torch.device | str,
        *, small: bool = False,
    ) -> None:  # fmt: skip
        """``small``: as :func:`decode` has it."""
        self._file, self._dtype, self._device, self._small = file, dtype, device, small
        self._heads: dict[str, int] = {}
        if values.family.gguf_rows:
            self._heads = {"attn_q": values.q_heads, "attn_k": values.kv_heads}
        self._delta, self._fused = values.delta, values.fused
        # Names in the file; of experts with a part of the tensor, and the number of all parts.
        self._names: dict[str, tuple[str, int, int]] = {}
        for stored, name, _ in expected_tensors(values):
            if ".experts." not in name:
                self._names[name] = (stored, 0, 0)
                continue
            halves = ("gate_proj", "up_proj") if _BOTH in name else ("",)
            for place in range(count := values.experts * len(halves)):
                expert, half = divmod(place, len(halves))
                named = expert_name(name, expert).replace("gate_up_proj", halves[half])
                self._names[named] = (stored, place, count)
        if _HEAD in file.tensors:
            self._names["lm_head.weight"] = (_HEAD, 0, 0)

    def __getitem__(self, name: str) -> Weight:
        stored, place, count = self._names[name]
        tensor = self._file.tensors[stored]
        if count:
            tensor = tensor.part(place, count)
        matrix = decode(self._file, tensor, small=self._small)  # copies
        self._file.release()
        part = stored.removeprefix("blk.").partition(".")[2]
        part = part.removesuffix(".weight").removesuffix(".bias")
        if part in self._heads:
            matrix = in_order(matrix, _hf_rows(matrix.shape[0], self._heads[part]))
        if self._delta is not None and ".linear_attn." in name:
            if part == "ssm_ba":
                rows = torch.arange(matrix.shape[0]).view(self._delta.key_heads, 2, -1)
                matrix = in_order(matrix, rows[:, int("in_proj_a" in name)].flatten())
            tiled = self._delta.key_dim > 0 and not self._fused
            matrix = _grouped(part, matrix, self._delta, tiled=tiled)
        if isinstance(matrix, QuantisedMatrix):
            return matrix
        matrix = matrix[None] if part == "ffn_gate_inp_shexp" else matrix
        return matrix.to(self._device, self._dtype)


def _grouped(part: str, weight: Weight, shape: DeltaShape, *, tiled: bool) -> Weight:
    """Return a tensor of a layer with recurrent states as folders have it: value heads are behind
    each other by key head there, and in turns in the file if it is ``tiled``."""
    if part == "ssm_norm":
        return weight
    if part == "ssm_a":
        weight = (-plain(weight, torch.float32)).log()
    if part in ("ssm_conv1d", "shortconv.conv"):
        weight = plain(weight, torch.float32)[:, None]
    if not tiled:
        return weight
    wide = 1 if part in ("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt") else shape.value_dim
    heads = torch.arange(shape.value_heads * wide).view(-1, shape.key_heads, wide)
    order = heads.transpose(0, 1).flatten()
    if part == "ssm_out":
        return in_columns(weight, order)
    if part in ("attn_qkv", "ssm_conv1d"):
        keys = 2 * shape.key_heads * shape.key_dim
        order = torch.cat([torch.arange(keys), order + keys])
    return in_order(weight, order)


def _hf_rows(rows: int, heads: int) -> Tensor:
    """Return the order that undoes llama.cpp's for the rows of llama's q and k, int64 ``[rows]``.

    There the two dimensions that RoPE turns together are neighbours; in Hugging Face's layout they
    are half a head apart.
    """
    order = torch.arange(rows).view(heads, rows // heads // 2, 2)
    return order.transpose(1, 2).flatten()
