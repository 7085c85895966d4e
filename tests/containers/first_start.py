"""Compiles in a container what a first start on a GPU does, and prints where it is kept."""

import os
import sys
from pathlib import Path

import torch
import triton
from cross_compile import compile_attention
from triton.backends.nvidia import driver
from triton.runtime.build import compile_module_from_src


def main() -> None:
    compile_attention(torch.bfloat16, 128, 256)
    # The module that launches kernels, not linked: the driver's library comes with the GPU. So its
    # functions must not be looked up when it is loaded.
    sys.setdlopenflags(os.RTLD_LAZY)
    source = Path(driver.dirname, "driver.c").read_text()
    module = compile_module_from_src(source, "cuda_utils", include_dirs=driver.include_dirs)
    print(module.__file__)
    for cubin in Path(triton.knobs.cache.dir).rglob("*.cubin"):
        print(cubin)


if __name__ == "__main__":
    main()
