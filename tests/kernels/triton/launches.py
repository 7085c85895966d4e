"""Counts what would be launched on a GPU."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.cuda.triton.ahead import Kernel
from paceline.decoder import linear


class Launches(TorchDispatchMode):
    """Notes in its context what would be launches on a GPU: operations of PyTorch that write
    memory of the device, products, and kernels of Triton, which do not run."""

    def __init__(self, device: str = "cpu", received: int = 0) -> None:
        """Note what is launched on a device.

        Args:
            device: Stands for the GPU. On ``meta`` nothing is computed, and copies between it and
                the host are noted as ``to device`` and ``to host``.
            received: What the host gets in place of numbers of ``meta``.
        """
        super().__init__()
        self.names: list[str] = []  # names of operations and kernels, in order
        self._device, self._received = device, received
        self._patches = ExitStack()

    def __enter__(self) -> Launches:
        multiply = linear.multiply

        def product(*args: Any) -> Tensor:
            self.names.append("product")
            return multiply(*args)

        def launch(kernel: Kernel, *_: Any, **__: Any) -> None:
            self.names.append(kernel.function.__name__)

        self._patches.enter_context(patch.object(linear, "multiply", product))
        self._patches.enter_context(patch.object(Kernel, "run", launch))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        given = [each for each in args if isinstance(each, Tensor)]
        if name == "copy_" and self._is_there(args[1]) and not self._is_there(args[0]):
            self.names.append("to host")
            return args[0].fill_(self._received)
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, (list, tuple)) else [out]
        there = [each for each in results if self._is_there(each)]
        memory = {each.untyped_storage()._cdata for each in given}
        made = any(each.untyped_storage()._cdata not in memory for each in there)
        if there and not all(map(self._is_there, given)):
            self.names.append("to device")
        elif there and (name.endswith("_") or (made and "empty" not in name)):  # else it is a view
            self.names.append(name)
        return out

    def _is_there(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device
