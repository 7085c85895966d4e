"""The level with tiles on processors without them: its code, with their instructions in plain C."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from kernel_cases import LEVELS, compiled
from torch import Tensor

from paceline.kernels import _compile
from paceline.kernels.linear import multiply_natively, pack, pack_rotated
from paceline.kernels.rotated import DOWN_SIZE, RotatedMatrix

HEADER = Path(__file__).with_name("emulated_tiles.h")
NATIVE = Path(_compile.__file__).with_name("native")

pytestmark = [
    pytest.mark.skipif("avx512vnni" not in LEVELS, reason="its other instructions are not there"),
    *[pytest.mark.slow] * (LEVELS[0] == "amx"),  # where all other tests have the tiles themselves
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("tiles") / "linear.so"
    flags = [flag.replace("-O3", "-O1") for flag in _compile.compiler_flags("amx")]
    sources = [str(NATIVE / name) for name in ("linear.c", "linear_plain.c")]
    command = ["gcc", *flags, "-include", str(HEADER), "-shared", *sources, "-lm", "-o", str(path)]
    subprocess.run(command, check=True, timeout=300)
    loaded, usual = ctypes.CDLL(str(path)), compiled("avx512vnni")
    for name in ("paceline_linear", "paceline_linear_scratch", "paceline_linear_check"):
        function, typed = getattr(loaded, name), getattr(usual, name)
        function.restype, function.argtypes = typed.restype, typed.argtypes
    return loaded


def test_the_check_at_load_passes(library: ctypes.CDLL) -> None:
    assert library.paceline_linear_check() == 0


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 32, 33, 65, 300])
@pytest.mark.parametrize(("outs", "ins"), [(70, 64), (33, 200), (64, 1536)])
def test_integers_have_the_bits_of_the_other_levels(
    library: ctypes.CDLL, rows: int, outs: int, ins: int
) -> None:
    """Up to 8 rows in vectors, more in tiles, by ranges of up to 32."""
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, weight, bias = random(rows, ins), random(outs, ins), random(outs)
    matrix = pack_rotated(RotatedMatrix.of(weight, DOWN_SIZE), bias).matrix()
    expected = multiply_natively(compiled("avx512vnni"), x, matrix)
    assert torch.equal(multiply_natively(library, x, matrix), expected)


def test_bfloat16_is_the_product(library: ctypes.CDLL) -> None:
    x, weight = torch.randn(40, 100), torch.randn(50, 100)
    found = multiply_natively(library, x, pack(weight).matrix("amx"))
    exact = x.bfloat16().double() @ weight.bfloat16().double().T
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
