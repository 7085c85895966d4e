"""How this process multiplies bfloat16 weights and caches."""

from __future__ import annotations

from paceline.kernels._native import cpu_kernels

NUMERICS = ("auto", "portable", "amx")
"""Choices of :func:`set_numerics`."""

_chosen = "portable"


def get_numerics() -> str:
    """ "portable" or "amx", as chosen last; "portable" from the start."""
    return _chosen


def set_numerics(requested: str) -> str:
    """Choose how this process multiplies bfloat16 weights and caches; not while a product runs.

    "portable" gives the same bits on every machine. "amx" multiplies in tiles: it is faster and has
    the bits of processors with AMX. "auto" takes "amx" where the processor has it. Weights in other
    formats have one set of bits, and need "portable" for their caches.

    Returns:
        "portable" or "amx".

    Raises:
        ValueError: Another name, or "amx" on a processor without it.
    """
    global _chosen
    kernels = cpu_kernels()
    able = kernels.level == "amx"
    if requested not in NUMERICS or (requested == "amx" and not able):
        raise ValueError(f"numerics is {requested!r}, expected one of {NUMERICS[: 2 + able]}")
    _chosen = "amx" if able and requested != "portable" else "portable"
    if kernels.library is not None:
        kernels.library.paceline_set_numerics(int(_chosen == "amx"))
    return _chosen
