"""Runs the Triton kernels in its interpreter, on the CPU (see tests/conftest.py).

bfloat16 products are silently wrong there, so these tests use float16 and float32.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from paceline.kernels import devices


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> Iterator[None]:
    """Skip where kernels cannot be interpreted.

    At each call of a function of a kernel, the interpreter looks through the whole language for
    functions to replace. Where the launch replaced them, it is told that there are none. At each
    sum of integers it computes whether that overflows, and without `debug` drops the answer. Both
    took two thirds of its time.
    """
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    assert triton.knobs.runtime.interpret
    from triton import language
    from triton.runtime import interpreter

    @cache
    def languages(function: Callable[..., Any]) -> list[Any]:
        modules = [each for each in function.__globals__.values() if inspect.ismodule(each)]
        return [each for each in (language, language.core) if each in modules]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(language.core.is_builtin(each.load) for each in languages(self.fn)):
            interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        assert not options.debug
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield


@pytest.fixture
def products_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of tiles whose rows do not depend on their place, as on tensor cores: NumPy's add up
    in an order that does. Types of 16 bits are multiplied in float32, bfloat16 too."""
    from triton.runtime import interpreter

    def whole(tile: Any) -> Any:
        if tile.dtype.scalar.name == "bf16":  # kept as integers
            return (tile.data.astype(np.uint32) << 16).view(np.float32)
        return tile.data.astype(np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right, total = whole(a), whole(b), d.data.astype(np.float32)
        for k in range(left.shape[1]):
            total = total + left[:, k : k + 1] * right[k]
        return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def triton_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU runs what a GPU would, from here on."""
    from paceline.cuda.triton.kernels import TritonKernels

    monkeypatch.setitem(devices.LOADED, "cpu", TritonKernels())
