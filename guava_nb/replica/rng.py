"""Random streams of a run: every shard of every step draws from its own, wherever it is computed.

Knows the process-wide generators of torch, numpy and Python; knows nothing of workers. Because a shard's stream depends
on (seed, step, shard) alone, a shard that is issued again to another worker, or a step that is done again after an
abort, draws the same numbers: there is no random state to save, to send or to roll back.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["seeded", "shard_seed"]


def shard_seed(seed: int, step: int, shard: int) -> int:
    """Return the seed of one shard's stream: 63 bits, well mixed, the same on every machine.

    Args:
        seed: of the run.
        step: its number, from 0.
        shard: of the step.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{shard}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(seed: int, device: torch.device, restore_all: bool = True) -> Iterator[None]:
    """Seed torch (the CPU and `device`), numpy and Python inside; afterwards their streams are as they were.

    Only the generators in use are touched: `torch.manual_seed` also queues work for every kind of device, which costs
    half a millisecond a call where that device was never started.

    Args:
        seed: any integer.
        device: whose generator to seed besides the CPU's.
        restore_all: False leaves numpy's and Python's streams where the block left them: copying their state costs more
            than a small model's whole share of a step may, and in a worker nothing else draws from them.
    """
    others = (random.getstate(), np.random.get_state()) if restore_all else None
    generators = [torch.default_generator, *_device_generators(device)]
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        if others is not None:
            random.setstate(others[0])
            np.random.set_state(others[1])


def _device_generators(device: torch.device) -> list[torch.Generator]:
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        return [torch.cuda.default_generators[index]]
    if device.type == "mps":
        return [torch.mps._get_default_mps_generator()]
    return []
