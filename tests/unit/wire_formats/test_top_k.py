from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.errors import ConfigError, RemoteProtocolError
from guava_nb.wire_formats.top_k import TopK, _largest


@settings(deadline=None, max_examples=50)
@given(
    numel=st.integers(0, 250), chunk=st.integers(1, 40), bits=st.sampled_from([1, 2, 4, 8, 32]), seed=st.integers(0, 10**6),
    data=st.data(), coarse=st.booleans(),
)  # fmt: skip
def test_the_largest_of_each_chunk_arrive(
    numel: int, chunk: int, bits: int, seed: int, data: st.DataObject, coarse: bool
) -> None:
    wire = TopK(count := data.draw(st.integers(1, chunk)), chunk, bits)
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) + 1e-3
    flat = flat.round() if coarse else flat
    back = wire.decode(wire.encode(flat), numel)
    assert not numel or torch.equal(wire.decode_sparse(wire.encode(flat), numel).to_dense(), back)
    for got, given_ in zip(back.split(chunk), flat.split(chunk), strict=True):
        if not given_.numel():  # split gives one empty part of an empty tensor
            continue
        most = -(-count * len(given_) // chunk)
        chosen = given_.abs().sort(descending=True, stable=True).indices[:most]
        mask = torch.zeros(len(given_), dtype=torch.bool).index_fill_(0, chosen, True)
        assert not got[~mask].any()
        sizes, error = given_[mask].abs(), (got - given_)[mask].abs()
        if bits == 32:
            assert not error.any()
        elif bits > 2:
            assert (error <= (sizes.max() - sizes.min()) / (2 ** (bits - 1) - 1) + sizes.max() / 100).all()
        else:
            assert (got * given_ >= 0).all()
            assert not got[mask & (given_ == 0)].any()
            levels = got[mask & (given_ != 0)].abs().unique()
            assert len(levels) <= bits and got.abs().max() <= sizes.max() * (1 + 2**-7)


def test_a_chunk_of_sparse_loco_takes_84_bytes() -> None:
    assert TopK().encoded_bytes(4096) == 4 + 64 * 8 // 8 + 64 * 2 // 8
    assert TopK(64, 4096, 32).encoded_bytes(4096, torch.float64) == 64 + 64 * 8


def test_two_bit_levels_are_the_means_of_small_and_large() -> None:
    flat = torch.tensor([1.0, -1.0, 8.0, -8.0, 0.5, 0.25])
    wire = TopK(4, 6, 2)
    assert wire.decode(wire.encode(flat), 6).tolist() == [1.0, -1.0, 8.0, -8.0, 0.0, 0.0]


def test_one_bit_is_the_sign_and_the_mean_of_what_is_not_zero() -> None:
    wire, flat = TopK(4, 8, 1), torch.zeros(20)
    flat[:8] = torch.tensor([0.0, 3.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0])  # two of four places are taken
    flat[8:16] = torch.arange(8.0) - 1
    message = wire.encode(flat)
    assert len(message) == wire.encoded_bytes(20)
    places, values = wire.sent(message, 20)
    assert wire.decode(message, 20).tolist() == [0, 2, 0, 0, -2, 0, 0, 0, 0, 0, 0, 0, 4.5, 4.5, 4.5, 4.5, 0, 0, 0, 0]
    assert places.tolist() == [1, 4, 12, 13, 14, 15] and values.tolist() == [2, -2, 4.5, 4.5, 4.5, 4.5]
    assert torch.equal(wire.left_out(flat, message), flat - wire.decode(message, 20))


def test_density_one_at_32_bits_is_exact() -> None:
    assert TopK(7, 7, 32).is_exact and not TopK(7, 7, 8).is_exact and not TopK(6, 7, 32).is_exact
    assert TopK(7, 7, 32).encoded_bytes(70) == 280


def test_levels_that_no_encoder_writes_are_refused() -> None:
    wire = TopK(2, 16, 8)
    message = bytearray(wire.encode(torch.arange(16.0)))
    nan = b"\xc0\x7f"
    for levels in (bytes(message[2:4] + message[:2]), nan + bytes(message[2:4]), bytes(message[:2]) + nan):
        message[:4] = levels
        with pytest.raises(RemoteProtocolError, match="levels"):
            wire.decode(message, 16)


@pytest.mark.parametrize("numbers", [(0, 4, 2), (5, 4, 2), (1, 4, 3)])
def test_numbers_that_make_no_format_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="top-k of"):
        TopK(*numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kept", [0, 1, 3, 4, 5, 16])
def test_where_few_elements_are_not_zero_the_first_zeros_are_sent_with_them(kept: int, dtype: torch.dtype) -> None:
    """A table whose rows are seldom seen has many of these; the least number above zero is none of the zeros."""
    generator = torch.Generator().manual_seed(kept)
    values = torch.zeros(40, 16, dtype=dtype)
    for row in values:
        row[torch.randperm(16, generator=generator)[:kept]] = torch.randn(kept, generator=generator, dtype=dtype)
    values[3, 11] = torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype))
    expected = values.abs().argsort(dim=1, descending=True, stable=True)[:, :4].sort(1).values
    assert torch.equal(_largest(values, 4), expected)
