from __future__ import annotations

import pytest
import torch

from guava_nb.errors import RemoteProtocolError
from guava_nb.wire_formats.message_sum import WayDown, shorter_way_down, sum_of_messages
from guava_nb.wire_formats.registry import WIRE_FORMATS
from guava_nb.wire_formats.top_k import TopK
from guava_nb.wire_formats.wire_format import WireFormat


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wire", [*WIRE_FORMATS.values(), TopK(4, 30, 4)], ids=lambda wire: wire.name)
def test_messages_are_added_in_their_order(wire: WireFormat, dtype: torch.dtype) -> None:
    flats = [torch.randn(100, dtype=dtype) * 10.0**power for power in (0, 6, -3)]
    messages = [wire.encode(flat) for flat in flats]
    total = sum_of_messages(wire, messages, 100, dtype)
    first, second, third = (wire.decode(message, 100, dtype) for message in messages)
    assert torch.equal(total, first + second + third) and total.dtype == dtype


def test_no_messages_are_zeros_and_a_foreign_one_is_refused() -> None:
    wire = WIRE_FORMATS["int8"]
    assert torch.equal(sum_of_messages(wire, [], 3, torch.float64), torch.zeros(3, dtype=torch.float64))
    with pytest.raises(RemoteProtocolError):
        sum_of_messages(wire, [wire.encode(torch.ones(3)), b"123"], 3)


def test_the_shorter_way_down() -> None:
    int8, sparse = WIRE_FORMATS["int8"], TopK()
    assert shorter_way_down(int8, int8, 1280, 2) == WayDown(True, 1300)
    assert shorter_way_down(int8, int8, 1280, 3) == WayDown(False, 1300)
    assert shorter_way_down(sparse, TopK(256, 4096), 4096, 4) == WayDown(True, 252)
    assert shorter_way_down(sparse, TopK(512, 4096), 4096, 8) == WayDown(False, 452)
    assert shorter_way_down(sparse, sparse, 4096, 4) == WayDown(False, 84)
