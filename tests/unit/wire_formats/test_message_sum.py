from __future__ import annotations

import pytest
import torch

from guava_nb.errors import RemoteProtocolError
from guava_nb.wire_formats.message_sum import mean_of_senders, sum_of_messages
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


def test_an_element_is_the_mean_of_those_that_sent_it() -> None:
    wire = TopK(1, 4, 32)
    flats = [torch.tensor([9.0, 0, 0, 1]), torch.tensor([-3.0, 0, 0, 2]), torch.tensor([0.0, 5, 1, 2])]
    mean = mean_of_senders(wire, map(wire.encode, flats), 4)
    assert mean.tolist() == [3, 5, 0, 0]  # of the first two; of the third alone; of none


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_all_send_all_it_is_the_mean_of_all(dtype: torch.dtype) -> None:
    wire, flats = TopK(32, 32, 32), [torch.randn(40, dtype=dtype) + 9 for _ in range(3)]
    mean = mean_of_senders(wire, map(wire.encode, flats), 40, dtype)
    torch.testing.assert_close(mean, torch.stack(flats).mean(0))
    assert mean_of_senders(wire, [], 3, dtype).tolist() == [0, 0, 0]


def test_no_messages_are_zeros_and_a_foreign_one_is_refused() -> None:
    wire = WIRE_FORMATS["int8"]
    assert torch.equal(sum_of_messages(wire, [], 3, torch.float64), torch.zeros(3, dtype=torch.float64))
    with pytest.raises(RemoteProtocolError):
        sum_of_messages(wire, [wire.encode(torch.ones(3)), b"123"], 3)
