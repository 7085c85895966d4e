"""Weights: reading from safetensors folders, the formats of a configuration, linear layers, and
fingerprints of models."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from paceline.convert.folder_files import one_line, read_object
from paceline.decoder.config import UnsupportedModelError
from paceline.decoder.linear import is_rotated
from paceline.device import device_of
from paceline.formats import FLOATS
from paceline.kernels.linear import PackedMatrix, pack_rotated
from paceline.kernels.quantised import QUANT_BLOCK, QuantisedMatrix, concatenate, quantise
from paceline.kernels.rotated import DOWN_SIZE, SIZE, RotatedMatrix

if TYPE_CHECKING:
    from paceline.decoder.config import DecoderConfig

Weight = Tensor | QuantisedMatrix

# Matrices that keep 8 bits in a 4-bit model: 4 bits there alone cost as much as Q4_1 of everything
# (on SmolLM2-135M a KL divergence of 0.06).
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")

# Matrices that keep their values: a small error in the first two chooses other experts, and of the
# last, gigabytes of which few rows are read, no product gets faster.
_KEPT = (".mlp.router.weight", ".mlp.shared_expert_gate.weight", "embed_tokens_per_layer.weight")

# Small matrices that keep 8 bits in a 4-bit model: their errors add up in states.
_DECAYS = tuple(
    f".linear_attn.{name}.weight"
    for name in ("in_proj_a", "in_proj_b", "in_proj_ba", "a_proj", "b_proj")
)

_BITS = {"int8": 8, "int4": 4}


W = TypeVar("W", bound=Weight)
_INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_READ_BYTES = 1 << 22
_MAX_INDEX = 64 << 20
SCALE, MINIMUM = ".scale", ".minimum"
_TEXT_PART = "language_model."  # part of the names in models of texts and images, which is left out

# What a matrix in blocks has beside its values, by the format in a safetensors file's metadata; in
# the second, matrices are in blocks of 8 or 4 bits.
_PARTS = {"paceline-int8": (SCALE,), "paceline-int4": (SCALE, MINIMUM)}


class Tensors(Mapping[str, W]):
    """A lazy mapping of tensors by name. ``in`` does not read a tensor."""

    _names: Mapping[str, Any]  # what a tensor is read from, by its name

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class WeightsOf(Tensors[Weight]):
    """Tensors by name, each converted to the format of a configuration when it is read.

    int4 quantises every matrix but those of ``_KEPT``; blocks of as many bits or fewer stay as they
    are. Vectors (norms, biases) are plain tensors, and so are matrices in int8: :func:`in_int8`
    quantises them.
    """

    def __init__(
        self, stored: Mapping[str, Weight], config: DecoderConfig, device: torch.device
    ) -> None:
        """Take tensors as they are stored, of any type."""
        self._names = stored
        self._weights, self._dtype, self._device = config.weights, config.dtype, device

    def __getitem__(self, name: str) -> Weight:
        weight: Weight = self._names[name]
        bits = 0 if name.endswith(_KEPT) else _BITS.get(self._weights, 0)
        if len(weight.shape) != 2:
            return weight.to(self._device) if isinstance(weight, Tensor) else weight
        if is_rotated(self._weights, self._device):
            bits = 0
        if bits == 8:
            return weight if isinstance(weight, Tensor) else weight.dequantise()
        if bits == 4 and (name in VOCABULARY or name.endswith(_DECAYS)):
            bits = 8
        if bits and not (isinstance(weight, QuantisedMatrix) and weight.bits <= bits):
            weight = quantise_tensor(name, plain(weight, torch.float32), bits)
        plain_format = self._weights in FLOATS
        quantised = not plain_format and device_of(self._device).packs
        if isinstance(weight, QuantisedMatrix) and quantised:
            return weight
        return plain(weight, self._dtype).to(self._device)


def plain(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return a weight as a tensor of a type."""
    return (weight.dequantise() if isinstance(weight, QuantisedMatrix) else weight).to(dtype)


def fuse(parts: Sequence[Weight]) -> Weight:
    """Return one matrix with all rows; if some are blocks, the others become 8-bit blocks."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts):
        return tensors[0] if len(parts) == 1 else torch.cat(tensors)
    blocks = [part if isinstance(part, QuantisedMatrix) else quantise(part, 8) for part in parts]
    return blocks[0] if len(parts) == 1 else concatenate(blocks)


def in_order(weight: Weight, rows: Tensor) -> Weight:
    """Return the matrix with its rows in another order, int64 ``[outs]``; -1: zeros."""
    weight, rows = _with_zeros(weight, rows, 0)
    return (
        weight.rows(rows) if isinstance(weight, QuantisedMatrix) else weight[rows.to(weight.device)]
    )


def in_columns(weight: Weight, columns: Tensor) -> Weight:
    """Return the matrix with its columns in another order, int64 ``[ins]``, -1: zeros; floats if
    the order does not keep the columns of a block together."""
    weight, columns = _with_zeros(weight, columns, 1)
    if isinstance(weight, Tensor):
        return weight[:, columns.to(weight.device)]
    places = columns.view(-1, QUANT_BLOCK)
    if (places.diff() != 1).any() or (places[:, 0] % QUANT_BLOCK).any():
        return weight.dequantise()[:, columns]
    blocks = places[:, 0] // QUANT_BLOCK
    minimum = None if weight.minimum is None else weight.minimum[:, blocks]
    values = weight.values[:, columns]
    return replace(weight, values=values, scale=weight.scale[:, blocks], minimum=minimum)


def _with_zeros(weight: Weight, order: Tensor, dim: int) -> tuple[Weight, Tensor]:
    """Return a matrix with a block of zeros behind its rows (``dim`` 0) or columns, and an order of
    them with that block in the place of -1."""
    if not (order < 0).any():
        return weight, order
    behind = weight.shape[dim] + torch.arange(len(order)) % QUANT_BLOCK
    order = torch.where(order < 0, behind, order)

    def padded(values: Tensor, count: int, value: float = 0.0) -> Tensor:
        ends = (*(0, 0) * (values.dim() - 1 - dim), 0, count)
        return torch.nn.functional.pad(values, ends, value=value)

    if isinstance(weight, Tensor):
        return padded(weight, QUANT_BLOCK), order
    blocks = 1 if dim else QUANT_BLOCK
    minimum = None if weight.minimum is None else padded(weight.minimum, blocks)
    values = padded(weight.values, QUANT_BLOCK, weight.offset)
    scale = padded(weight.scale, blocks)
    return replace(weight, values=values, scale=scale, minimum=minimum), order


def in_int8(
    name: str, weight: Weight, bias: Tensor | None, device: torch.device
) -> Weight | PackedMatrix | RotatedMatrix:
    """Put a plain matrix in 8 bits over rotated inputs; on a CPU pack it with its bias.

    Raises ``UnsupportedModelError`` if its number of inputs is not supported.
    """
    if isinstance(weight, QuantisedMatrix):
        weight = weight.dequantise()
    try:
        matrix = RotatedMatrix.of(weight, DOWN_SIZE if "down" in name.split(".") else SIZE)
    except ValueError as error:
        raise UnsupportedModelError(f"matrix {name!r} cannot be in int8: {error}") from error
    return matrix if is_rotated("int8", device) else pack_rotated(matrix, bias)


def quantise_tensor(name: str, weight: Tensor, bits: int) -> QuantisedMatrix:
    try:
        return quantise(weight, bits)
    except ValueError as error:
        raise UnsupportedModelError(
            f"tensor {name!r} cannot be quantised to {bits} bits: {error}"
        ) from error


def weight_files(folder: str | Path) -> list[Path]:
    """List the safetensors files of a model folder by name. Raises ``UnsupportedModelError`` if it
    has no safetensors weights, a shard is missing, or the index is damaged."""
    base = Path(folder)
    if (base / _INDEX).exists():
        named = read_object(base / _INDEX, _MAX_INDEX).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
            raise UnsupportedModelError(
                f"{base / _INDEX}: weight_map is no object with names of files"
            )
        names = sorted(set(named.values()))
        for name in names:
            if not name or Path(name).name != name or not (base / name).is_file():
                raise UnsupportedModelError(f"{base / _INDEX} names {name!r}, which does not exist")
        return [base / name for name in names]
    if (base / SINGLE).is_file():
        return [base / SINGLE]
    raise UnsupportedModelError(
        f"{base} has neither {SINGLE} nor {_INDEX}; only safetensors weights are loaded"
    )


class Checkpoint(Tensors[Tensor]):
    """Tensors of a folder by name, which are not cached.

    A matrix in blocks of 8 or 4 bits (``paceline.train.blocks``) comes as bfloat16 values.
    """

    def __init__(
        self, folder: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        """Open the weight files of a folder; tensors come as ``dtype`` on ``device``. Raises
        ``UnsupportedModelError`` if the folder has no safetensors weights, a shard is missing, or
        scales or minima of blocks are of no matrix."""
        from safetensors import safe_open

        self._names: dict[str, tuple[Any, str]] = {}  # file, and the name in it
        self._parts: set[tuple[Any, str]] = set()  # scales and minima: file, and the name in it
        self._folder = Path(folder)
        for path in weight_files(folder):
            try:
                file: Any = safe_open(str(path), framework="pt")
            except Exception as error:  # of the library, which checks sizes and offsets
                raise UnsupportedModelError(f"cannot read {path}: {one_line(error)}") from error
            names = set(file.keys())
            endings = _PARTS.get((file.metadata() or {}).get("format", ""), ())
            parts = {name for name in names if name.endswith(endings)} if endings else set()
            names -= parts
            for part in sorted(parts):
                if part.rpartition(".")[0] not in names:
                    raise UnsupportedModelError(f"{path} has {part!r}, and no such matrix")
            self._parts |= {(file, part) for part in parts}
            self._names |= {name.replace(_TEXT_PART, "", 1): (file, name) for name in names}
        self._dtype = dtype
        self._device = device

    def __getitem__(self, name: str) -> Tensor:
        return self.converted(self.stored(name))  # a copy outlives the file

    def mapped(self, name: str) -> Tensor:
        """Return a tensor mapped from the file, whose page cache all processes share.

        It must not be changed, and the file must not be rewritten in place (replacing it is safe).
        If type or device differ from the file's, or it is in blocks, the tensor is a private copy.
        """
        return self.stored(name).to(self._device, self._dtype)

    def converted(self, tensor: Tensor) -> Tensor:
        """Return a copy of a part of a stored tensor, as all others come."""
        return tensor.to(self._device, self._dtype, copy=True)

    def stored(self, name: str) -> Tensor:
        """Return a tensor in the type of the file; bfloat16 if it is in blocks. Raises
        ``UnsupportedModelError`` if blocks have other types or shapes, or it cannot be read."""
        file, stored = self._names[name]
        parts = [part for part in (SCALE, MINIMUM) if (file, stored + part) in self._parts]
        try:
            values: Tensor = file.get_tensor(stored)
            beside = {part: file.get_tensor(stored + part) for part in parts}
        except Exception as error:  # of the library: a type that it does not have, for example
            raise UnsupportedModelError(
                f"cannot read the tensor {stored!r} of {self._folder}: {one_line(error)}"
            ) from error
        return _values(name, values, beside) if beside else values

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the file's header."""
        file, stored = self._names[name]
        shape = tuple(file.get_slice(stored).get_shape())
        return (*shape[:-1], 2 * shape[-1]) if shape and self._bits(name) == 4 else shape

    @property
    def bits(self) -> int:
        """Most bits of matrices in blocks, 8 or 4; 0: none are."""
        return max(map(self._bits, self), default=0)

    def _bits(self, name: str) -> int:
        file, stored = self._names[name]
        if (file, stored + MINIMUM) in self._parts:
            return 4
        return 8 if (file, stored + SCALE) in self._parts else 0


def _values(name: str, values: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """bfloat16 ``[outs, ins]`` of blocks: int8 ``[outs, ins]`` with float16 scales ``[outs, ins /
    32]``, or uint8 ``[outs, ins / 2]`` with such scales and minima. Raises
    ``UnsupportedModelError``: they have other types or shapes, or are not finite."""
    kind, halves, beside = torch.int8, 1, {SCALE}
    expected = f"int8 [outs, ins] with finite float16 scales [outs, ins / {QUANT_BLOCK}]"
    if MINIMUM in parts:
        kind, halves, beside = torch.uint8, 2, {SCALE, MINIMUM}
        expected = (
            "uint8 [outs, ins / 2] with finite float16 scales and minima "
            f"[outs, ins / {QUANT_BLOCK}]"
        )
    valid = parts.keys() == beside and values.dtype == kind and values.ndim == 2
    for part in parts.values():
        valid = valid and part.dtype == torch.float16 and part.ndim == 2
        valid = valid and part.shape[1] * QUANT_BLOCK == values.shape[1] * halves
        valid = valid and len(part) == len(values) and bool(part.isfinite().all())
    if not valid:
        tensors = {"values": values, **{part[1:]: tensor for part, tensor in parts.items()}}
        given = ", ".join(f"{n} {t.dtype} {tuple(t.shape)}" for n, t in tensors.items())
        raise UnsupportedModelError(f"tensor {name!r} has {given}; expected {expected}")
    if halves == 2:
        packed = values.view(len(values), -1, QUANT_BLOCK // 2)
        values = torch.cat([packed & 15, packed >> 4], dim=-1)
    blocks = values.reshape(len(values), -1, QUANT_BLOCK).float() * parts[SCALE].float()[..., None]
    if halves == 2:
        blocks += parts[MINIMUM].float()[..., None]
    return blocks.flatten(1).bfloat16()


def take(weights: Mapping[str, W], name: str, shape: tuple[int, ...]) -> W:
    """Take one tensor. Raises ``UnsupportedModelError`` if it is missing, or of another shape."""
    if name not in weights:
        raise UnsupportedModelError(f"the checkpoint lacks tensor {name!r}")
    weight = weights[name]
    if tuple(weight.shape) != shape:
        raise UnsupportedModelError(
            f"tensor {name!r} has shape {tuple(weight.shape)}, expected {shape} by the config"
        )
    return weight


def fingerprint_files(head: bytes, files: Iterable[Path]) -> str:
    """Return the SHA-256 (hex) of some bytes and the content of files, in order."""
    digest = hashlib.sha256(head)
    for path in files:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    return digest.hexdigest()
