"""Conversion between tensors packed by oneDNN and bytes.

torch has this for models compiled ahead of time (AOTInductor), whose constants are mapped from a
file. Its stable C functions are called here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CODES = {torch.float32: "aoti_torch_dtype_float32", torch.bfloat16: "aoti_torch_dtype_bfloat16"}


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    """torch's C functions, or None if this build lacks one of them."""
    packing = torch.ops.mkldnn
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        needed = (
            *(library.aoti_torch_create_tensor_from_blob_v2, library.aoti_torch_layout__mkldnn),
            *(library.aoti_torch_device_type_cpu, *(getattr(library, n) for n in _CODES.values())),
            *(packing._nbytes, packing.data_ptr, packing._get_mkldnn_serialized_md),
            torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr,
        )
    except (OSError, AttributeError):
        return None
    return library if all(needed) else None


def can_map() -> bool:
    """Whether this build of torch can make packed tensors from bytes."""
    return _library() is not None


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Address and size of a tensor's bytes; a plain one must be contiguous."""
    if tensor.is_mkldnn:
        packing: Any = torch.ops.mkldnn
        return packing.data_ptr(tensor), packing._nbytes(tensor)
    return tensor.data_ptr(), tensor.nbytes


def layout_of(tensor: Tensor) -> bytes:
    """oneDNN's description of a packed tensor; empty for a plain one."""
    if not tensor.is_mkldnn:
        return b""
    packing: Any = torch.ops.mkldnn
    return bytes(packing._get_mkldnn_serialized_md(tensor).numpy())


def packed_over(data: Tensor, shape: Sequence[int], dtype: torch.dtype, layout: bytes) -> Tensor:
    """A packed tensor over the memory of ``data``, which must outlive it.

    Args:
        data: Its bytes, uint8 ``[n]``.
        shape: Of the weight, two numbers.
        dtype: float32 or bfloat16.
        layout: Its :func:`layout_of`, from this build of torch.

    Raises:
        RuntimeError: torch cannot make the tensor.
    """
    library = _library()
    if library is None:
        raise RuntimeError("this build of torch cannot make packed tensors from bytes")
    dims = (ctypes.c_int64 * 2)(*shape)
    strides = (ctypes.c_int64 * 2)(shape[1], 1)
    handle = ctypes.c_void_p()
    failed = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(data.data_ptr()), ctypes.c_int64(2), dims, strides, ctypes.c_int64(0),
        ctypes.c_int32(getattr(library, _CODES[dtype])()),
        ctypes.c_int32(library.aoti_torch_device_type_cpu()), ctypes.c_int32(0),
        ctypes.byref(handle), ctypes.c_int32(library.aoti_torch_layout__mkldnn()),
        layout, ctypes.c_int64(len(layout)),
    )  # fmt: skip
    if failed or not handle.value:
        raise RuntimeError(f"torch made no packed tensor of shape {tuple(shape)}")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3
    found: Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(
        capsule(handle.value, None, None)
    )
    return found
