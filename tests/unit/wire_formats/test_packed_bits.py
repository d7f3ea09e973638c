from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.wire_formats.packed_bits import packed, packed_bytes, unpacked


@pytest.mark.parametrize("bits", [0, 1, 2, 3, 4, 6, 8, 12])
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_numbers_come_back(bits: int, data: st.DataObject) -> None:
    numbers = torch.tensor(data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=50)), dtype=torch.int64)
    raw = packed(numbers, bits)
    assert raw.dtype == torch.uint8 and raw.numel() == packed_bytes(len(numbers), bits)
    assert unpacked(raw, len(numbers), bits).tolist() == numbers.tolist()


def test_the_lowest_bits_come_first() -> None:
    assert packed(torch.tensor([1, 2, 3]), 4).tolist() == [0x21, 0x03]
    assert packed(torch.tensor([5, 1]), 3).tolist() == [0b001101]
