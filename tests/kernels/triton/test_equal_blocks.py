"""The work of a draft's levels is found with arrays, and is that of each block."""

import numpy as np
import pytest
import torch

from paceline.cuda.triton.tiles import Tiling, _any_work, _equal_work
from paceline.kernels import EqualBlocks, LevelBlock, QueryBlock
from paceline.kernels.trees import ContextBlock

STARTS = (0, 1, 63, 255, 256, 700, 4096, 5000, 12288, 20_000)


@pytest.mark.parametrize("window", [None, 5, 512])
@pytest.mark.parametrize("levels", [(1,), (4, 16), (4, 16, 16, 16)])
@pytest.mark.parametrize("kind", ["level", "context"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_one_shape(
    kind: str, levels: tuple[int, ...], window: int | None, dtype: torch.dtype
) -> None:
    count = sum(levels)
    tiling = Tiling.of(4, torch.empty(2, 1, 64, dtype=dtype), window)
    first: QueryBlock = LevelBlock(0, STARTS[0], None, count, levels=levels)
    if kind == "context":
        first = ContextBlock(0, STARTS[0], None, count)
    blocks = EqualBlocks(first, np.array(STARTS))
    assert [(each.sequence, each.start) for each in blocks] == list(enumerate(STARTS))
    found, right = (each(blocks, tiling, 1 << 30) for each in (_equal_work, _any_work))
    assert found is not None
    assert found.part_rows == right.part_rows
    for mine, other in zip(found.arrays, right.arrays, strict=True):
        assert mine.dtype == other.dtype
        assert mine.tolist() == other.tolist()
    assert _equal_work(blocks, tiling, found.part_rows // 2) is None, "it takes several launches"
