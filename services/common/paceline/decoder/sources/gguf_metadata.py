"""Checked metadata of GGUF files, and the tensors that it requires."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from paceline.decoder.errors import UnsupportedModelError
from paceline.decoder.sources.gguf_file import GgufFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Supported architectures, and the classes of transformers. Mistral files say llama."""

EMBEDDING, NORM = "token_embd.weight", "output_norm.weight"
"""Names of the token embedding and the final norm."""

_MOST = (1 << 31) - 1


class Metadata:
    """Checked values of a file's metadata.

    Raises:
        UnsupportedModelError: A value is missing, of another type or out of range.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._values = file.metadata
        self.architecture = str(self._values.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise self._error(
                f"architecture {self.architecture!r} is not supported, expected one of "
                f"{', '.join(ARCHITECTURES)}"
            )
        if self._values.get("split.count", 1) not in (0, 1):
            raise self._error("one part of a split model; merge the parts to one file")
        if self.get("expert_count", 0):
            raise self._error("mixtures of experts are not supported")
        tensors = file.tensors
        self.layers = self.count("block_count")
        self.hidden = self.count("embedding_length")
        self.intermediate = self.count("feed_forward_length")
        self.q_heads = self.count("attention.head_count")
        self.kv_heads = self.count("attention.head_count_kv", self.q_heads)
        if self.q_heads % self.kv_heads:
            raise self._error(f"{self.q_heads} heads are no multiple of {self.kv_heads} kv heads")
        self.head_dim = self.count("attention.key_length", max(1, self.hidden // self.q_heads))
        for name in ("attention.value_length", "rope.dimension_count"):
            if self.count(name, self.head_dim) != self.head_dim:
                raise self._error(f"{name} differs from the width of keys, {self.head_dim}")
        if self.head_dim % 2:
            raise self._error(f"heads have an odd width, {self.head_dim}")
        if EMBEDDING not in tensors or len(tensors[EMBEDDING].shape) != 2:
            raise self._error(f"lacks the tensor {EMBEDDING!r}, or it is no matrix")
        self.vocab_size = tensors[EMBEDDING].shape[0]
        if self.layers > len(tensors):
            raise self._error(f"{self.layers} layers in {len(tensors)} tensors")
        self.attention_bias = self.architecture == "qwen2" or "blk.0.attn_q.bias" in tensors
        self.mlp_bias = "blk.0.ffn_gate.bias" in tensors

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture."""
        return self._values.get(f"{self.architecture}.{key}", default)

    def count(self, key: str, default: int | None = None) -> int:
        """An integer from 1 to 2^31 - 1."""
        found = self.get(key, default)
        if not isinstance(found, int) or not 0 < found <= _MOST:
            raise self._error(
                f"{self.architecture}.{key} is {found!r}, expected a number from 1 to {_MOST}"
            )
        return found

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        found = self.get(key, default)
        if not isinstance(found, float) or not 0 < found < math.inf:
            raise self._error(
                f"{self.architecture}.{key} is {found!r}, expected a finite number above 0"
            )
        return found

    def token(self, name: str) -> int | None:
        """A token id of the tokenizer, None if it has none."""
        found = self._values.get(f"tokenizer.ggml.{name}")
        if found is not None and not (isinstance(found, int) and 0 <= found < self.vocab_size):
            raise self._error(f"tokenizer.ggml.{name} is {found!r}, expected a token id")
        return found

    def _error(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._file.path}: {what}")


def expected_tensors(values: Metadata) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of a model, without the LM head."""
    hidden, wide, dim = values.hidden, values.intermediate, values.head_dim
    q, kv = values.q_heads * dim, values.kv_heads * dim
    matrices = {
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
        "ffn_gate": (wide, hidden),
        "ffn_up": (wide, hidden),
        "ffn_down": (hidden, wide),
    }
    vectors = {"attn_norm": hidden, "ffn_norm": hidden}
    if values.architecture == "qwen3":
        vectors |= {"attn_q_norm": dim, "attn_k_norm": dim}
    biases: list[str] = []
    if values.attention_bias:
        biases += ["attn_q", "attn_k", "attn_v"]
        if values.architecture != "qwen2":
            biases.append("attn_output")
    if values.mlp_bias:
        biases += ["ffn_gate", "ffn_up", "ffn_down"]
    yield EMBEDDING, (values.vocab_size, hidden)
    yield NORM, (hidden,)
    for layer in range(values.layers):
        base = f"blk.{layer}."
        for part, shape in matrices.items():
            yield f"{base}{part}.weight", shape
        for part, width in vectors.items():
            yield f"{base}{part}.weight", (width,)
        for part in biases:
            yield f"{base}{part}.bias", (matrices[part][0],)
