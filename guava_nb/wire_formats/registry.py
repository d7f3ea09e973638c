"""The formats that a user names."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from guava_nb.wire_formats.blocks import Blocks
from guava_nb.wire_formats.dense import Half, Unchanged
from guava_nb.wire_formats.wire_format import WireFormat

__all__ = ["WIRE_FORMATS"]

#: By name, from the most exact to the shortest. Sparse ones are `TopK`, whose numbers are chosen for a purpose.
WIRE_FORMATS: Mapping[str, WireFormat] = {
    one.name: one
    for one in (Unchanged(), Half("bf16", torch.bfloat16), Half("fp16", torch.float16), Blocks(8, 128), Blocks(4, 64))
}
