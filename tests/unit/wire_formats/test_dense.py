from __future__ import annotations

import pytest
import torch

from guava_nb.wire_formats.registry import WIRE_FORMATS


@pytest.mark.parametrize("name, dtype, part", [("bf16", torch.bfloat16, 2**-8), ("fp16", torch.float16, 2**-11)])
def test_halves_round_to_the_nearest_and_take_two_bytes(name: str, dtype: torch.dtype, part: float) -> None:
    wire, flat = WIRE_FORMATS[name], torch.randn(1001)
    back = wire.decode(wire.encode(flat), 1001)
    assert torch.equal(back, flat.to(dtype).float()) and ((back - flat).abs() <= flat.abs() * part).all()
    assert 2 * len(wire.encode(flat)) == len(WIRE_FORMATS["fp32"].encode(flat))


def test_fp16_keeps_large_values_finite() -> None:
    wire = WIRE_FORMATS["fp16"]
    assert wire.decode(wire.encode(torch.tensor([1e6, -1e9])), 2).tolist() == [65504.0, -65504.0]


def test_float64_stays_float64_unchanged() -> None:
    flat = torch.randn(9, dtype=torch.float64)
    wire = WIRE_FORMATS["fp32"]
    assert torch.equal(wire.decode(wire.encode(flat), 9, torch.float64), flat)
