"""Limits the instruction sets of oneDNN, torch's library for linear layers, in this process.

With AMX, oneDNN multiplies bfloat16 on tiles for some numbers of rows and on vectors for others.
The two sum in different orders, so the bits of a row would depend on its batch. oneDNN reads its
limit from the environment once, at its first product: importing this module sets it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Set
from functools import cache
from typing import Any

import torch

from paceline.kernels._compile import cpu_flags
from paceline.kernels._native import VARIABLE as LEVEL

LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables that oneDNN reads, the first that is set."""

_BELOW_AMX = "AVX512_CORE_BF16"
_OF_LEVEL = {"avx2": "AVX2", "generic": "SSE41"} if platform.machine() == "x86_64" else {}


def limit_for(environment: Mapping[str, str], flags: Set[str]) -> str | None:
    """The limit to set for oneDNN; None: no change.

    A level below the processor's own (``PACELINE_CPU_LEVEL``) limits oneDNN too. Else the user's
    own limit applies, and only processors with AMX get one, ``AVX512_CORE_BF16``: for bfloat16 and
    float32 products it excludes nothing but tiles. It would exclude AVX2-VNNI-2, so other
    processors get no limit.

    Args:
        environment: Of the process.
        flags: Instruction sets as Linux names them.
    """
    level = environment.get(LEVEL, "")
    if level in _OF_LEVEL:
        return _OF_LEVEL[level]
    if "amx_tile" in flags and not any(name in environment for name in LIMITS):
        return _BELOW_AMX
    return None


def current_limit() -> str:
    """The limit of oneDNN in the environment of this process; empty if there is none."""
    return next((os.environ[name] for name in LIMITS if name in os.environ), "")


def _set_limit() -> None:
    limit = limit_for(os.environ, cpu_flags())
    if limit is None:
        return
    os.environ[LIMITS[0]] = limit
    if limit == _OF_LEVEL.get("avx2"):
        os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")  # torch's own operations too


@cache
def multiplies_bfloat16() -> bool:
    """Whether oneDNN has kernels for packed bfloat16 weights on this processor.

    Without them it refuses to pack, or keeps the plain layout for a general routine, in which the
    bits of a row may depend on the batch. The size of a packed weight of one element shows which:
    a blocked layout takes more bytes.
    """
    packing: Any = torch.ops.mkldnn
    if not packing._is_mkldnn_bf16_supported():
        return False
    weight = torch.ones(1, 1, dtype=torch.bfloat16)
    return bool(packing._nbytes(packing._reorder_linear_weight(weight, 64)) > weight.nbytes)


_set_limit()
