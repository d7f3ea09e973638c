"""Batches over a real session: they arrive identical, and the wire carries hardly more than their bytes."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch

from guava_nb.data.codec import class_resolver, pack, unpack
from guava_nb.link.session_events import MessageArrived
from guava_nb.protocol.messages import BatchShard, Channel
from guava_nb.protocol.tensor_bounds import ITEM_BYTES
from tests.support.links import FOREVER, world

DTYPES = sorted(name for name in ITEM_BYTES if hasattr(torch, name))
SHAPES = [(), (0,), (1, 0, 2), (7,), (3, 5)]
Point = namedtuple("Point", "x y")  # noqa: PYI024 - as users write them


@dataclass
class Sample:
    """As a cell defines it."""

    image: torch.Tensor
    name: str
    weight: float | None = None


def values(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = getattr(torch, dtype)
    raw = torch.arange(max(1, torch.Size(shape).numel()) * kind.itemsize, dtype=torch.uint8) % (
        2 if kind is torch.bool else 60
    )
    return raw.view(kind)[: torch.Size(shape).numel()].reshape(shape)


def batches() -> dict[str, Any]:
    images = torch.arange(2 * 3 * 8 * 8, dtype=torch.uint8).reshape(2, 3, 8, 8)
    found: dict[str, Any] = {f"{name}{shape}": values(name, shape) for name in DTYPES for shape in SHAPES}
    return found | {
        "strided": torch.arange(40.0).reshape(4, 10)[:, ::3],
        "channels last": images.to(memory_format=torch.channels_last),
        "transposed": torch.arange(12).reshape(3, 4).t(),
        "expanded": torch.ones(1, 4).expand(64, 4),
        "text": {"ids": torch.arange(4), "words": ["a", "b\n", "", "\u00e9"], "nothing": None, "big": 1 << 60},
        "classes": [Sample(images, "one"), Sample(images[:1], "two", 0.5), Point(torch.zeros(2), (1, b"\x00"))],
        "ragged": [torch.arange(length) for length in (3, 0, 17, 1)],
        "a usual one": (torch.randint(0, 256, (256, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (256,))),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        raw = [t.contiguous().reshape(-1).view(torch.uint8).tolist() if t.numel() else [] for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and raw[0] == raw[1]
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Sample):
        return same(vars(a), vars(b))
    return bool(a == b)


def tensor_bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Sample):
        value = vars(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(tensor_bytes_of, parts))


def test_batches_arrive_identical_and_cost_hardly_more_than_their_bytes() -> None:
    module = __import__(__name__, fromlist=["Sample"])
    with world(FOREVER, tls=True) as made:
        ours, _ = made.dial()
        for number, (name, batch) in enumerate(batches().items()):
            before = ours.wire.out_bytes[Channel.BATCH]
            tree, buffers = pack([batch])
            ours.send(
                BatchShard(
                    run_id="run-1",
                    generation=1,
                    step=number,
                    shard=0,
                    rows=4,
                    global_rows=4,
                    batch=tree,
                ),
                Channel.BATCH,
                buffers,
            )
            event = made.here.wait_for(MessageArrived, number + 1)[-1]
            (came,) = unpack(event.message.batch, event.payload, class_resolver(module))
            assert same(came, batch), name
            cost = ours.wire.out_bytes[Channel.BATCH] - before
            payload = tensor_bytes_of(batch)
            assert cost <= payload + max(512, payload // 50), (name, cost, payload)
