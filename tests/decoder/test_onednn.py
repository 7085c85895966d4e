"""oneDNN is kept to instruction sets with which a row's bits depend on nothing else."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from paceline.decoder.onednn import LIMITS, limit_for
from paceline.kernels._compile import levels_here

ON_X86 = platform.machine() == "x86_64"
AMX = {"avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"}
PRODUCTS = """
import torch
from paceline.decoder.linear import Linear
for dtype in (torch.float32, torch.bfloat16):
    weight = torch.randn(64, 48).to(dtype)
    layer = Linear(weight)
    x = torch.randn(40, 48).to(dtype)
    together = layer(x)
    torch.testing.assert_close(together, torch.nn.functional.linear(x, weight))
    assert all(layer(x[:rows]).equal(together[:rows]) for rows in (1, 2, 5, 16, 17, 33))
print(torch.backends.cpu.get_cpu_capability())
"""


def test_amx_is_left_out() -> None:
    assert limit_for({}, AMX) == "AVX512_CORE_BF16"


@pytest.mark.parametrize("flags", [set(), {"avx2", "avx_vnni"}, {"avx512f", "avx512_bf16"}])
def test_processors_without_amx_keep_all_they_have(flags: set[str]) -> None:
    assert limit_for({}, flags) is None


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_of_the_users_stays(name: str) -> None:
    assert limit_for({name: "AVX512_CORE_AMX"}, AMX) is None


@pytest.mark.skipif(not ON_X86, reason="levels below the processor's own are those of x86-64")
def test_a_lower_level_limits_oneDNN_too() -> None:
    assert limit_for({"PACELINE_CPU_LEVEL": "avx2"}, AMX) == "AVX2"
    inherited = {"PACELINE_CPU_LEVEL": "avx2", LIMITS[0]: "AVX512_CORE_BF16"}
    assert limit_for(inherited, AMX) == "AVX2"
    assert limit_for({"PACELINE_CPU_LEVEL": "avx512"}, AMX) == "AVX512_CORE_BF16"
    assert limit_for({"PACELINE_CPU_LEVEL": "none"}, AMX) == "AVX512_CORE_BF16"


@pytest.mark.skipif("avx2" not in levels_here(), reason="this processor has no AVX2")
def test_the_limit_comes_before_the_first_product() -> None:
    environment = os.environ | {"PACELINE_CPU_LEVEL": "avx2", "ONEDNN_VERBOSE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "isa:Intel AVX2\n" in done.stdout
    assert "avx512" not in done.stdout
    assert done.stdout.endswith("AVX2\n")
