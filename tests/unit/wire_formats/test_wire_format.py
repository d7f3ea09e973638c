from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from guava_nb.errors import LocalProtocolError, RemoteProtocolError
from guava_nb.wire_formats.registry import WIRE_FORMATS
from guava_nb.wire_formats.top_k import TopK
from guava_nb.wire_formats.wire_format import WireFormat

SPARSE = [
    TopK(), TopK(64, 4096, 4), TopK(3, 20, 8), TopK(3, 20, 32), TopK(9, 20, 4), TopK(20, 20, 2), TopK(1, 1, 4)
]  # fmt: skip
FORMATS = [*WIRE_FORMATS.values(), *SPARSE]
SIZES = st.integers(0, 300) | st.sampled_from([4095, 4096, 4097, 9000])
EVERY = pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: wire.name)


@st.composite
def flat_tensors(draw: Any, sizes: st.SearchStrategy[int] = SIZES) -> Tensor:
    """Elements of very different magnitudes; zeros, denormals and equal ones among them."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    flat = torch.randn(draw(sizes), dtype=dtype, generator=generator) * 10.0 ** draw(st.integers(-45, 37))
    kind = draw(st.sampled_from(["plain", "zeros", "steps", "half zero"]))
    if kind == "steps":
        return (flat * 4).round() / 4
    return flat * {"plain": 1, "zeros": 0}.get(kind, torch.rand(flat.shape, generator=generator) < 0.5)


def arrived(wire: WireFormat, flat: Tensor) -> Tensor:
    return wire.decode(wire.encode(flat), flat.numel(), flat.dtype)


@EVERY
@settings(deadline=None, max_examples=15)
@given(flat=flat_tensors())
def test_a_message_has_the_length_of_the_formula_and_decodes_to_the_same_form(wire: WireFormat, flat: Tensor) -> None:
    message = wire.encode(flat)
    assert len(message) == wire.encoded_bytes(flat.numel(), flat.dtype)
    back = wire.decode(bytes(message), flat.numel(), flat.dtype)
    assert (back.dtype, back.shape) == (flat.dtype, flat.shape) and back.isfinite().all()
    assert bytes(wire.encode(flat.clone())) == bytes(message)
    if wire.is_exact:
        assert torch.equal(back, flat)


@EVERY
@settings(deadline=None, max_examples=15)
@given(flat=flat_tensors(st.integers(1, 300)), bad=st.sampled_from([math.nan, math.inf, -math.inf]), data=st.data())
def test_what_is_not_finite_stays_visible(wire: WireFormat, flat: Tensor, bad: float, data: Any) -> None:
    flat[data.draw(st.integers(0, flat.numel() - 1))] = bad
    assert not arrived(wire, flat).isfinite().all()


@EVERY
@pytest.mark.parametrize("dtype, value", [(torch.float32, 3.4e38), (torch.float64, 1e300), (torch.float32, 1e-45)])
def test_very_large_and_very_small_values_stay_finite(wire: WireFormat, dtype: torch.dtype, value: float) -> None:
    flat = torch.full((70,), value, dtype=dtype)
    flat[::2] *= -1
    back = arrived(wire, flat)
    assert back.isfinite().all() and ((back == 0) | (back.sign() == flat.sign())).all()


@EVERY
@settings(deadline=None, max_examples=30)
@given(numel=st.integers(0, 60), data=st.data())
def test_hostile_bytes_are_refused_or_give_what_was_asked(wire: WireFormat, numel: int, data: Any) -> None:
    message = data.draw(st.binary(min_size=wire.encoded_bytes(numel), max_size=wire.encoded_bytes(numel)))
    try:
        back = wire.decode(message, numel)
    except RemoteProtocolError:
        return
    assert back.shape == (numel,) and back.dtype == torch.float32
    assert isinstance(wire, TopK) or wire.name in ("fp32", "bf16", "fp16") or not back.isinf().any()


@EVERY
def test_other_lengths_are_refused_before_anything_is_made(wire: WireFormat) -> None:
    message = bytes(wire.encode(torch.ones(100)))
    for other in (b"", message[:-1], message + b"\0"):
        with pytest.raises(RemoteProtocolError, match="elements as"):
            wire.decode(other, 100)
    with pytest.raises(RemoteProtocolError, match="take"):
        wire.decode(message, 10**15)


def test_the_bytes_are_the_same_on_every_version_of_torch() -> None:
    """From numbers that no random generator makes; the digest was taken with torch 2.11 and 2.13."""
    whole = torch.arange(10_000)
    flat = ((whole * 7919 % 10_007 - 5000).float() / 3e6) * (1 + whole % 13)
    digest = hashlib.sha256(b"".join(bytes(wire.encode(flat)) for wire in FORMATS)).hexdigest()
    assert digest[:16] == "0e1ba2e084b37b27"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_count_as_float32(dtype: torch.dtype) -> None:
    flat = torch.randn(50).to(dtype)
    assert torch.equal(arrived(WIRE_FORMATS["fp32"], flat), flat.float())


def test_whole_numbers_and_shapes_are_not_encoded() -> None:
    with pytest.raises(LocalProtocolError, match="int64"):
        WIRE_FORMATS["int8"].encode(torch.arange(3))
    with pytest.raises(LocalProtocolError, match="2 axes"):
        WIRE_FORMATS["int8"].encode(torch.zeros(3, 3))
