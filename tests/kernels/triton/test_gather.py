"""Rows in pages are gathered by tables of places alone."""

import pytest
import torch

from paceline.cuda.triton.gather import NO_PLACE, RECORD, gather_kv, gather_states
from paceline.kernels import SINKS, streaming


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_keys_and_values_of_texts_in_two_pools(dtype: torch.dtype) -> None:
    """With pages of several sizes, of texts shorter than the sinks, within a page and over many;
    one text has none. Slots behind a text stay as they are."""
    torch.manual_seed(0)
    layers, heads, dim, slots = 3, 2, 24, 80
    out = torch.full((5, 2, heads, slots, dim), 7.0, dtype=dtype)
    expected = out.clone()
    records = torch.zeros(5, RECORD, dtype=torch.int64)
    pages = torch.zeros(5, 9, dtype=torch.int32)
    source, pools = torch.zeros(4, dtype=dtype), []
    for text, (length, budget, size, layer) in enumerate(
        [(3, 64, 16, 0), (70, 80, 16, 2), (200, 60, 16, 1), (0, 64, 16, 0), (900, 66, 256, 1)]
    ):
        count = -(-max(1, length) // size)
        pool = torch.randn(count + 2, layers, 2, heads, size, dim).to(dtype)
        pools.append(pool)
        if not length:
            continue
        table = torch.randperm(count + 2)[:count]
        ranges = streaming(length, budget)
        positions = torch.tensor([at for each in ranges for at in each])
        first = ranges[1].start if len(ranges) > 1 else SINKS
        item = pool.element_size()
        place = (pool[0, layer].data_ptr() - source.data_ptr()) // item
        records[text] = torch.tensor([place, pool.stride(0), size, len(positions), first])
        listed = torch.cat([table[:1], table[first // size : -(-length // size)]])
        pages[text, : len(listed)] = listed
        rows = pool[table[positions // size], layer, :, :, positions % size]
        expected[text, :, :, : len(positions)] = rows.permute(1, 2, 0, 3)
    gather_kv(source, records, pages, out)
    assert torch.equal(out, expected)


def test_hidden_states_of_rows_apart() -> None:
    """Rows without a place stay as they are."""
    torch.manual_seed(0)
    pool, source = torch.randn(40, 1100), torch.zeros(4)
    which = torch.tensor([[3, 39], [0, 3], [7, 8]])
    places = (pool.data_ptr() - source.data_ptr()) // 4 + which * 1100
    places[1, 0] = NO_PLACE
    out = torch.full((3, 2200), 5.0)
    expected = pool[which].view(3, 2200)
    expected[1, :1100] = 5.0
    gather_states(source, places, out)
    assert torch.equal(out, expected)
