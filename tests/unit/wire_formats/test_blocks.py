from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.errors import RemoteProtocolError
from guava_nb.wire_formats.blocks import Blocks, checked_scales, rounded_up

BITS = pytest.mark.parametrize("bits", [8, 4])


@BITS
@settings(deadline=None, max_examples=30)
@given(numel=st.integers(1, 200), power=st.integers(-28, 30), seed=st.integers(0, 10**6))
def test_an_element_is_off_by_half_a_scale_at_most(bits: int, numel: int, power: int, seed: int) -> None:
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 10.0**power
    wire, most = Blocks(bits, 32), 2 ** (bits - 1) - 1
    back = wire.decode(wire.encode(flat), numel)
    for element, block in zip((back - flat).split(32), flat.split(32), strict=True):
        assert element.abs().max() <= 0.5 * block.abs().max() / most * (1 + 2**-7 + 2**-20)


@BITS
def test_multiples_of_a_scale_are_exact(bits: int) -> None:
    most = 2 ** (bits - 1) - 1
    flat = (torch.arange(600) % (2 * most + 1) - most).float() * 0.25
    assert torch.equal((wire := Blocks(bits, 300)).decode(wire.encode(flat), 600), flat)


def test_blocks_that_are_not_finite_leave_the_others_alone() -> None:
    flat = torch.ones(128)
    flat[3], flat[70] = torch.inf, -torch.nan
    back = (wire := Blocks(8, 32)).decode(wire.encode(flat), 128)
    assert back.isnan().nonzero().flatten().tolist() == [3, 70]  # so the parameter that has it can be named
    assert torch.allclose(back[96:], torch.ones(32), rtol=0.01)


@settings(deadline=None)
@given(scale=st.floats(0, 3e38) | st.floats(0, 1e300))
def test_scales_are_rounded_up_by_one_128th_at_most(scale: float) -> None:
    up = rounded_up(torch.tensor([scale], dtype=torch.float64), 1e38).double().item()
    if 2.0**-110 <= scale <= 9e37:
        assert scale <= up <= scale * (1 + 2**-7)
    else:
        assert up == 0 or 8e37 <= up <= 1e38


@pytest.mark.parametrize("scale", [-1.0, float("inf"), 1e38, -0.0, 1e-38, 1e-40])
def test_scales_that_no_encoder_writes_are_refused(scale: float) -> None:
    raw = torch.tensor([1.0, scale], dtype=torch.bfloat16).view(torch.uint8)
    with pytest.raises(RemoteProtocolError, match="a block has the scale"):
        checked_scales(raw, 1e37)
