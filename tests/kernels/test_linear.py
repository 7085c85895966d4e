"""Packed linear layers: the bits of plain C at every level, whatever the shape and the company."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import LEVELS, ProgramRows, compiled, usually
from torch import Tensor

from paceline.bench.reference import ReferenceKernels, rotated_rows
from paceline.kernels import choose_numerics, cpu_kernels
from paceline.kernels.linear import (
    FORMATS,
    PackedMatrix,
    multiply,
    multiply_floats,
    multiply_natively,
    pack,
    pack_quantised,
    pack_rotated,
)
from paceline.kernels.quantised import QuantisedMatrix, quantise
from paceline.kernels.rotated import (
    DOWN_SIZE,
    MAX_INS,
    SIZE,
    RotatedMatrix,
    block_size,
    quantise_rows_natively,
)

FLOATS, FASTEST = FORMATS[:2], LEVELS[0]


@pytest.fixture(params=map(usually, LEVELS), scope="module")
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def random(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_blocks(
    outs: int, ins: int, bits: int, minima: bool, half: bool, seed: int
) -> QuantisedMatrix:
    """Every stored value occurs; scales are float16 numbers if ``half``."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 1 << bits, (outs, ins), generator=generator, dtype=torch.uint8)
    scale, minimum = random((2, outs, ins // 32), seed)
    if half:
        scale, minimum = scale.half().float(), minimum.half().float()
    return QuantisedMatrix(values, scale, minimum if minima else None, bits, 1 << (bits - 1))


def make(weight: Tensor, format: str) -> PackedMatrix:
    """A matrix in any format."""
    if format in FLOATS:
        return pack(weight, format=format)
    if format == "rotated":
        return pack_rotated(RotatedMatrix.of(weight))
    return pack_quantised(quantise(weight, 8 if format == "int8" else 4))


def at_level(level: str, x: Tensor, packed: PackedMatrix) -> Tensor:
    return multiply_natively(compiled(level), x, packed.matrix())


def multiplied_in_tiles(level: str, x: Tensor, packed: PackedMatrix) -> Tensor:
    """In tiles of the processor, or emulated ones."""
    return multiply_natively(compiled(level), x, packed.matrix("amx"))


def in_plain_c(x: Tensor, packed: PackedMatrix) -> Tensor:
    out, pointer = torch.empty(len(x), packed.outs), ctypes.c_void_p
    matrix = packed.matrix()
    compiled("generic").paceline_linear_plain(
        ctypes.byref(matrix), pointer(x.data_ptr()), ctypes.c_int64(len(x)), pointer(out.data_ptr())
    )
    return out


@st.composite
def matrices(draw: st.DrawFn) -> PackedMatrix:
    """A matrix of any format and shape, with and without bias, minima and float16 scales."""
    format, seed = draw(st.sampled_from(FORMATS)), draw(st.integers(0, 1000))
    outs = draw(st.integers(1, 100))
    bias = draw(st.sampled_from([None, random((outs,), seed)]))
    if format in FLOATS:
        return pack(random((outs, draw(st.integers(1, 130))), seed), bias, format)
    if format == "rotated":
        ins, most = 8 * draw(st.integers(1, 200)), draw(st.sampled_from([1, 8, SIZE, DOWN_SIZE]))
        return pack_rotated(RotatedMatrix.of(random((outs, ins), seed), most), bias)
    ins, bits = 32 * draw(st.integers(1, 40)), 8 if format == "int8" else 4
    return pack_quantised(
        random_blocks(outs, ins, bits, draw(st.booleans()), draw(st.booleans()), seed), bias
    )


@settings(max_examples=30)
@given(packed=matrices(), rows=st.integers(1, 150), seed=st.integers(0, 1000))
def test_every_level_has_the_bits_of_plain_c(
    level: str, packed: PackedMatrix, rows: int, seed: int
) -> None:
    x = random((rows, packed.ins), seed)
    assert torch.equal(at_level(level, x, packed), in_plain_c(x, packed))


@settings(max_examples=20)
@given(
    packed=matrices().filter(lambda packed: packed.format in ("int8", "int4")),
    rows=st.integers(1, 150),
    seed=st.integers(0, 1000),
)
def test_blocks_in_tiles_have_the_bits_of_plain_c(
    level: str, packed: PackedMatrix, rows: int, seed: int
) -> None:
    """In tiles of the processor, or emulated ones."""
    x, first = random((rows, packed.ins), seed), "paceline_tile_rows"
    from_rows = ctypes.c_int64.in_dll(compiled(level), first)
    usual, from_rows.value = from_rows.value, 1
    try:
        assert torch.equal(at_level(level, x, packed), in_plain_c(x, packed))
    finally:
        from_rows.value = usual


@settings(max_examples=15)
@given(groups=st.lists(st.integers(1, 150), min_size=1, max_size=40))
@pytest.mark.parametrize("format", FORMATS)
def test_groups_of_rows_fit_the_scratch_memory_of_experts(groups: list[int], format: str) -> None:
    """The bound of ``experts.h``."""
    matrix = make(random((32, 64)), format).matrix()

    def scratch(rows: int) -> int:
        return int(compiled(FASTEST).paceline_linear_scratch(ctypes.addressof(matrix), rows))

    room = scratch(sum(groups)) + len(groups) * (16 * scratch(1) + 63)
    assert sum(-(-scratch(rows) // 64) * 64 for rows in groups) <= room


@settings(max_examples=40)
@given(
    outs=st.integers(1, 70), ins=st.integers(1, 130), rows=st.integers(1, 100), seed=st.integers()
)
def test_tiles_have_the_bits_of_plain_c_where_sums_are_whole_numbers(
    outs: int, ins: int, rows: int, seed: int
) -> None:
    """They are exact in any order."""
    x, weight = random((rows, ins), seed % 999), random((outs, ins), seed % 1000)
    x, packed = x.mul(9).round(), pack(weight.mul(9).round())
    assert torch.equal(multiplied_in_tiles(FASTEST, x, packed), in_plain_c(x, packed))


def test_tiles_hold_where_pytorch_uses_tiles_on_the_same_threads() -> None:
    x, packed = random((16, 64)), pack(random((32, 64), 1))
    expected = multiplied_in_tiles(FASTEST, x, packed)
    for size in (16, 24, 100, 256):
        a = random((size, size), dtype=torch.bfloat16)
        a @ a  # oneDNN changes the shapes of tiles, or releases them
        assert torch.equal(multiplied_in_tiles(FASTEST, x, packed), expected)


@settings(max_examples=30)
@given(
    outs=st.integers(1, 70), ins=st.integers(1, 130), before=st.integers(0, 40), seed=st.integers()
)
def test_bfloat16_in_tiles_rounds_activations_and_nothing_else(
    outs: int, ins: int, before: int, seed: int
) -> None:
    weight, x = random((outs, ins), seed % 1000), random((before + 5, ins), seed % 999)
    bias = random((outs,))
    packed = pack(weight, bias)
    found = multiplied_in_tiles(FASTEST, x, packed)
    exact = x.bfloat16().double() @ weight.bfloat16().double().T + bias
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
    assert torch.equal(multiplied_in_tiles(FASTEST, x[before:].clone(), packed), found[before:])


@settings(max_examples=30)
@given(
    outs=st.integers(1, 70), eighths=st.integers(1, 30), rows=st.integers(1, 40),
    most=st.sampled_from([1, SIZE, DOWN_SIZE]), seed=st.integers(0, 1000),
)  # fmt: skip
def test_rotated_products_have_the_bits_of_the_definition(
    outs: int, eighths: int, rows: int, most: int, seed: int
) -> None:
    weight = RotatedMatrix.of(random((outs, 8 * eighths), seed), most)
    packed = pack_rotated(weight, random((outs,), seed + 1))
    x = random((rows, packed.ins), seed)
    assert torch.equal(weight.multiply(x, packed.bias), in_plain_c(x, packed))


@settings(max_examples=40)
@given(
    packed=matrices(),
    rows=st.integers(1, 40),
    before=st.integers(0, 60),
    after=st.integers(0, 60),
    threads=st.integers(1, 3),
)
def test_the_bits_of_a_row_do_not_depend_on_its_company(
    level: str, packed: PackedMatrix, rows: int, before: int, after: int, threads: int
) -> None:
    x, company = random((rows, packed.ins)), 1e3 * random((before + after, packed.ins), 1)
    alone = at_level(level, x, packed)
    among = torch.cat([company[:before], x, company[before:]])
    default = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = at_level(level, among, packed)
    finally:
        torch.set_num_threads(default)
    assert torch.equal(found[before : before + rows], alone)


@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (33, 7), (100, 65), (896, 4864), (256, 8192)])
def test_floats_are_the_product(format: str, shape: tuple[int, int]) -> None:
    """Of compiled kernels and of torch; a row has the same bits in any batch."""
    weight, bias, x = random(shape), random(shape[:1], 1), random((150, shape[1]), 2)
    kept = weight.to(getattr(torch, format))
    expected = (x.double() @ kept.double().T + bias).float()
    packed = pack(weight, bias, format)
    for product in (
        lambda rows: multiply(rows, packed),
        lambda rows: multiply_floats(rows, kept.float(), bias),
    ):
        found = product(x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
        for rows in (0, 1, 2, 3, 5, 9, 16, 18, 33, 34, 64, 65):
            assert torch.equal(product(x[:rows]), found[:rows])
            assert torch.equal(product(x[150 - rows :]), found[150 - rows :])


@settings(max_examples=40)
@given(
    rows=st.integers(1, 40), eighths=st.integers(1, 150),
    most=st.sampled_from([1, SIZE, DOWN_SIZE]),
    exponent=st.integers(-130, 120), seed=st.integers(0, 1000),
)  # fmt: skip
def test_rows_are_quantised_as_torch_does(
    level: str, rows: int, eighths: int, most: int, exponent: int, seed: int
) -> None:
    """Values and scales, of weights and of inputs: the definition is that of ``rotated.py``."""
    ins = 8 * eighths
    size = block_size(ins, most)
    x = torch.ldexp(random((rows, ins), seed), torch.tensor(exponent))
    x[rows // 2, ins // 2] = (1.0, float("nan"), float("inf"), 0.0)[seed % 4]
    values, scale = quantise_rows_natively(compiled(level), x, size)
    expected = ReferenceKernels().quantise_rows(x, size)
    assert torch.equal(values, expected[0])
    torch.testing.assert_close(scale, expected[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 9])
def test_the_longest_sums_fit(level: str, rows: int) -> None:
    """All values the largest: of both signs, as far as a sum of 32 bits goes."""
    ins = MAX_INS - MAX_INS % 8
    weight = torch.ones(33, ins)
    weight[1::2] = -1
    packed = pack_rotated(RotatedMatrix.of(weight, 1))
    found = at_level(level, torch.ones(rows, ins), packed)
    assert torch.equal(found, in_plain_c(torch.ones(rows, ins), packed))
    torch.testing.assert_close(found, weight.sum(1).expand(rows, 33), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.1)])
def test_quantised_is_near_the_product(bits: int, error: float) -> None:
    weight, x = random((96, 256)), random((9, 256), 2)
    found, exact = multiply(x, pack_quantised(quantise(weight, bits))), x @ weight.T
    assert (found - exact).norm() < error * exact.norm()


@pytest.mark.parametrize("half", [True, False])
def test_scales_are_float16_where_that_is_exact(half: bool) -> None:
    packed = pack_quantised(random_blocks(40, 64, 4, minima=True, half=half, seed=0))
    assert packed.minima
    assert packed.scales_f16 == half


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e-44, 3e38])
def test_extreme_activations_stay_in_their_row(level: str, format: str, value: float) -> None:
    weight, x = random((20, 64)), random((8, 64), 1)
    packed = make(weight, format)
    usual = at_level(level, x, packed)
    x[3, 40] = value
    found = at_level(level, x, packed)
    others = [r for r in range(8) if r != 3]
    assert torch.equal(found[others], usual[others])
    if x[3].isfinite().all():
        expected = in_plain_c(x, packed)  # sums of large inputs may be infinite
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert not found[3].isfinite().any()


def test_wrong_arguments_are_clear_errors() -> None:
    weight = random((20, 64))
    packed = pack(weight)
    with pytest.raises(ValueError, match=r"float32 \[3, 60\], expected dense float32 \[rows, 64\]"):
        multiply(random((3, 60)), packed)
    with pytest.raises(ValueError, match="format is 'int8', expected float32 or bfloat16"):
        pack(weight, format="int8")
    with pytest.raises(ValueError, match="values must be dense at a multiple of 64 bytes"):
        replace(packed, values=torch.empty(9999, dtype=torch.uint8)[1:])


def test_numerics_are_chosen_by_name() -> None:
    has = {"amx": ["amx", "avx512_bf16"], "avx512bf16": ["avx512_bf16"]}.get(
        cpu_kernels().level, []
    )
    assert choose_numerics("auto") == [*has, "portable"][0]
    for name in ("portable", *has):
        assert choose_numerics(name) == name
    for other in {"fast", "amx", "avx512_bf16"} - {*has}:
        with pytest.raises(ValueError, match=f"numerics is '{other}', expected one of"):
            choose_numerics(other)


@pytest.mark.parametrize("format", FORMATS)
def test_single_rows_are_those_that_were_packed(level: str, format: str) -> None:
    library = compiled(level)
    if format in FLOATS:
        stored = random((50, 96)).to(getattr(torch, format)).float()
        packed = pack(stored, format=format)
    elif format == "rotated":
        weight = random((50, 96))
        packed = pack_rotated(RotatedMatrix.of(weight))
        stored = rotated_rows(RotatedMatrix.of(weight), torch.arange(50))
        assert (stored - weight).norm() < 0.01 * weight.norm(), "they are not rotated any more"
    else:
        blocks = random_blocks(50, 96, 8 if format == "int8" else 4, format == "int4", True, 1)
        stored, packed = blocks.dequantise(), pack_quantised(blocks)
    out, matrix, which = torch.empty(50, 96), packed.matrix(), torch.arange(50)
    library.paceline_rows(ctypes.addressof(matrix), which.data_ptr(), 50, out.data_ptr())
    assert out.equal(stored)
    assert packed.rows(torch.tensor([49, 0, 17])).equal(stored[[49, 0, 17]])
    for outside in (-1, 50):
        with pytest.raises(IndexError, match="outside of the 50 outputs"):
            packed.rows(torch.tensor([0, outside]))


def test_numerics_are_of_a_program_and_not_of_the_process() -> None:
    """Programs over one packed matrix, which run in turns."""
    x, packed = random((5, 64)), pack(random((32, 64), 1))
    programs = ProgramRows(compiled(FASTEST))
    found: dict[str, Tensor] = {}
    for numerics in ("portable", "amx", "portable", "amx"):
        out = programs.multiply(x, packed, numerics)
        assert torch.equal(found.setdefault(numerics, out), out)
    assert torch.equal(found["portable"], at_level(FASTEST, x, packed))
    assert torch.equal(found["amx"], multiplied_in_tiles(FASTEST, x, packed))
    assert not torch.equal(*found.values())
