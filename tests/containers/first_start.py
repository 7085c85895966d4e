"""Compiles in a container what a first start on a GPU does, and prints where it is kept."""

from __future__ import annotations

import os
from pathlib import Path

import triton
from cross_compile import compile_attention
from triton.backends.nvidia import driver
from triton.runtime.build import compile_so_from_file


def main() -> None:
    compile_attention("bf16", 128, 16, 256)
    # The module that launches kernels, not linked: the driver's library comes with the GPU.
    source = str(Path(driver.dirname, "driver.c"))
    module = compile_so_from_file(source, "cuda_utils", include_dirs=driver.include_dirs)
    assert not os.statvfs(module).f_flag & os.ST_NOEXEC, f"{module} could not be loaded"
    print(module)
    for cubin in Path(triton.knobs.cache.dir).rglob("*.cubin"):
        print(cubin)


if __name__ == "__main__":
    main()
