"""A device that is not there: tensors that say they are on ``other:0`` and lie in main memory.

Every operation on them runs on the CPU. One that takes tensors of both devices fails, as it would
on a GPU, but for copies between them; so does a program that makes a tensor on the wrong one.
Importing this changes what devices PyTorch knows in this process, for good.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from paceline.device import DEVICES, Device

_setup_privateuseone_for_python_backend("other")

DEVICE = torch.device("other", 0)
_COPIES = {"aten::to", "aten::_to_copy", "aten::copy_"}
_ANSWERS = {
    "aten::_fused_sdp_choice": 0,  # plain: others are called by a device's own names
    "aten::_has_compatible_shallow_copy_type": False,
}


class _Device(Device):
    packs = False
    runs_beside = True

    def use(self) -> None:
        enter_thread()

    def receive(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [
            torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor, non_blocking=True)
            for tensor in tensors
        ]

    def map(self, work: Any, numbers: Any, cores: int | None = None) -> list[Any]:
        return list(map(work, numbers))


DEVICES[str(DEVICE)] = _Device(str(DEVICE))


class OnDevice(Tensor):
    """A tensor of the device; ``inner`` is where it really lies."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=DEVICE,
        )  # fmt: skip
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.inner.tolist()


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name
    if name in _ANSWERS:
        return _ANSWERS[name]
    given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    ours = [leaf for leaf in given if isinstance(leaf, OnDevice)]
    copies = name in _COPIES
    strangers = [leaf for leaf in given if not isinstance(leaf, OnDevice) and leaf.dim() > 0]
    if ours and strangers and not copies:
        raise AssertionError(f"{func} takes tensors of both devices")
    wanted = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.device)]
    there = wanted[0].type == "other" if wanted else bool(ours)
    if name == "aten::copy_":
        there = isinstance(args[0], OnDevice)
    wrappers = {id(tensor.inner): tensor for tensor in ours}

    def outer(value: Any) -> Any:
        if not isinstance(value, Tensor) or not there:
            return value
        return wrappers[id(value)] if id(value) in wrappers else OnDevice(value)

    with torch.inference_mode(False), torch.no_grad():  # or wrappers could be no views of others
        out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        if copies and there != bool(ours) and name != "aten::copy_":
            out = out.clone()
        return tree_map(outer, out)


def _inner(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.inner if isinstance(value, OnDevice) else value


@contextmanager
def another_device() -> Iterator[None]:
    """In here ``other:0`` is a device. Of this thread alone."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with _Mode():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def enter_thread() -> None:
    """``other:0`` is a device in the calling thread, until it ends."""
    torch._C._set_only_lift_cpu_tensors(True)
    _Mode().__enter__()
