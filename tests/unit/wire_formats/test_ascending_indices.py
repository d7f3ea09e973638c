from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.errors import RemoteProtocolError
from guava_nb.wire_formats.ascending_indices import decoded_indices, encoded_indices, index_bytes


@settings(deadline=None, max_examples=100)
@given(rows=st.integers(1, 4), length=st.integers(1, 70), data=st.data())
def test_places_come_back_in_the_length_of_the_formula(rows: int, length: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, length))
    one = st.sets(st.integers(0, length - 1), min_size=count, max_size=count).map(sorted)
    places = torch.tensor([data.draw(one) for _ in range(rows)])
    raw = torch.cat(encoded_indices(places, length))
    assert raw.numel() == index_bytes(rows, length, count)
    assert torch.equal(decoded_indices(raw, rows, length, count), places)


@settings(deadline=None, max_examples=100)
@given(length=st.integers(1, 70), data=st.data())
def test_any_bytes_give_ascending_places_in_the_row_or_are_refused(length: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, length))
    size = index_bytes(2, length, count)
    raw = torch.tensor(list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    try:
        places = decoded_indices(raw, 2, length, count)
    except RemoteProtocolError:
        return
    assert (places.diff(dim=1) > 0).all() and places.min() >= 0 and places.max() < length


def test_sizes() -> None:
    assert index_bytes(1, 4096, 64) == 64  # 8 bits a place
    assert index_bytes(1, 4096, 4096) == 0 and index_bytes(1, 4096, 2000) == 512
