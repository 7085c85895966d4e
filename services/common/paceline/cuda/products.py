"""Products of linear layers on a GPU, with bits that do not depend on the number of rows.

Libraries choose a kernel by the number of rows, and with it the order in which a product adds. Two
things make the order one: cuBLASLt without split-K, and passes of at least 64 rows. Whether that
is enough is checked for every shape of matrix when a model is loaded; the products of a matrix for
which it is not run in slices of 64 rows.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

import paceline.kernels
from paceline.decoder import Decoder, Linear
from paceline.decoder.linear import Experts, FixedProducts
from paceline.decoder.remembered import digest_of_sources

_log = logging.getLogger(__name__)

# Numbers of rows that products have; others are padded with zeros, larger ones cut in pieces.
FIXED_ROWS = (*range(64, 513, 64), 768, 1024)
SLICES = FIXED_ROWS[:1]  # numbers of rows where products of several sizes differ
_DIGEST_ROWS = 16


def use_library_without_splits(*, fixed: bool) -> None:
    """Have this process multiply by cuBLASLt without split-K, or else by PyTorch's defaults."""
    sums = (False, False) if fixed else (True, True)  # in 16 bits between splits, splits at all
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt" if fixed else "default")
        for name in ("bf16", "fp16"):
            setattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction", sums)
    except (RuntimeError, TypeError, AttributeError) as error:  # another version of PyTorch
        _log.warning("products may be split by the number of their rows: %s", error)


def fix_decoder(decoder: Decoder) -> FixedProducts:
    """Fix the products of a decoder; returns which rules they have."""
    matrices = decoder.matrices()
    layers = [matrix for matrix in matrices if isinstance(matrix, Linear)]
    experts = [matrix for matrix in matrices if isinstance(matrix, Experts)]
    decoder.products = fix_products(layers, experts)
    return decoder.products


@torch.inference_mode()
def fix_products(layers: Iterable[Linear], experts: Iterable[Experts] = ()) -> FixedProducts:
    """Give layers products whose bits do not depend on the number of rows, as far as they can have
    them, and check it: one layer of each shape, at every number of rows that products have.

    Products of routed ``experts`` have a kernel whose tiles are fixed. One of each shape is in the
    digest.
    """
    by_shape: dict[tuple[object, ...], list[Linear]] = {}
    for layer in layers:
        by_shape.setdefault(layer.shape_key, []).append(layer)
    rules: dict[str, str] = {}
    differs, digest = [], hashlib.sha256()
    for alike in by_shape.values():
        first = alike[0]
        name = f"{first.out_features}x{first.in_features}"
        for rows in (FIXED_ROWS, SLICES):
            first.fixed_rows = rows
            if first.exact or not (why := _rows_that_differ(first)):
                break
        else:
            differs.append(f"a linear layer of {first.in_features} to {first.out_features} {why}")
        for other in alike:
            other.fixed_rows = first.fixed_rows
        rule = f"{rows[0]} to {rows[-1]} rows" if len(rows) > 1 else f"{rows[0]} rows"
        rules[name] = "integers" if first.exact else rule
        digest.update(_bytes_of(first(_inputs(first, SLICES[0]))))
    for routed in {group.experts[0].shape_key: group for group in experts}.values():
        x = _inputs(routed.experts[0], _DIGEST_ROWS)
        chosen = torch.arange(_DIGEST_ROWS, device=x.device) % len(routed.experts)
        digest.update(_bytes_of(routed(x, chosen.sort().values)))
    return FixedProducts(rules, "; ".join(differs), digest.hexdigest())


def _bytes_of(product: Tensor) -> bytes:
    """Return the first rows of a test product."""
    rows = product[:_DIGEST_ROWS].contiguous().view(torch.uint8)
    return rows.cpu().numpy().tobytes()


def _inputs(layer: Linear, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(layer.in_features)
    x = torch.randn(rows, layer.in_features, generator=generator)
    return x.to(layer.device, layer.dtype)


def _rows_that_differ(layer: Linear) -> str:
    """Return how a row's bits differ in products of all sizes and places; empty: not at all."""
    assert layer.fixed_rows is not None
    largest = layer.fixed_rows[-1]
    x = _inputs(layer, FIXED_ROWS[-1])
    together = layer(x)
    for rows in FIXED_ROWS:
        if rows > largest and rows != FIXED_ROWS[-1]:
            continue  # slices alone differ by the place of a row only
        # The last rows first: other rows beside each, at another place. A copy, since libraries
        # choose by the alignment too, and inputs of layers begin where memory was allocated.
        part = x[-rows:].flip(0)
        if not torch.equal(layer(part).flip(0), together[-rows:]):
            return (
                f"in {layer.dtype} gives a row other bits in a batch of {rows} rows than in one of "
                f"{FIXED_ROWS[-1]}"
            )
    return ""


def describe_device(device: torch.device) -> str:
    """Return what the bits of a GPU's products depend on besides their rules: capability, number of
    multiprocessors, and versions of libraries."""
    gpu = torch.cuda.get_device_properties(device)
    parts = [
        f"sm_{gpu.major}{gpu.minor}", f"{gpu.multi_processor_count} multiprocessors",
        f"torch {torch.__version__}", f"CUDA {torch.version.cuda}", f"cuBLAS {_cublas_version()}",
    ]  # fmt: skip
    with suppress(PackageNotFoundError):
        parts.append(f"Triton {version('triton')}")
    return ", ".join(parts)


def describe_kernels() -> str:
    """Return what the bits of a GPU's steps depend on in Paceline: a digest of the sources of its
    kernels, and its version, if it is installed."""
    folders = (Path(file).parent for file in (__file__, str(paceline.kernels.__file__)))
    parts = [f"kernels {' '.join(digest_of_sources(folder)[:16] for folder in folders)}"]
    with suppress(PackageNotFoundError):
        parts.append(f"Paceline {version('paceline')}")
    return ", ".join(parts)


def why_no_integers(device: torch.device) -> str:
    """Return why PyTorch cannot multiply 8-bit integers on a GPU; empty if it can."""
    values = torch.zeros(32, 32, dtype=torch.int8, device=device)
    try:
        torch._int_mm(values, values.T)
    except RuntimeError as error:  # of the library, for this GPU
        return str(error)
    return ""


def _cublas_version() -> str:
    """Return the version of the library that PyTorch has loaded; empty if it is not found."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError:
        return ""
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return str(library.cublasLtGetVersion())
