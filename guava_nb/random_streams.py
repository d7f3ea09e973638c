"""Streams of random numbers of the user's own: where they are, and putting them back there.

torch's own stream and those of `random` and `numpy.random` are left alone; each step seeds them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["STREAMS", "place_in", "put_back", "streams_kept"]

STREAMS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def place_in(stream: Any) -> Any:
    """Return where a stream of random numbers is; None for one that has no place, as that of the system."""
    if isinstance(stream, random.Random):
        return None if isinstance(stream, random.SystemRandom) else stream.getstate()
    return stream.bit_generator.state if isinstance(stream, np.random.Generator) else stream.get_state()


def put_back(stream: Any, place: Any) -> None:
    """Let a stream go on from a place that `place_in` gave, or from one that JSON made of it."""
    if place is None:
        return
    if isinstance(stream, random.Random):
        version, words, gauss = place
        stream.setstate((version, tuple(words), gauss))
    elif isinstance(stream, np.random.Generator):
        stream.bit_generator.state = place
    else:
        stream.set_state(place)


@contextmanager
def streams_kept(module: nn.Module) -> Iterator[None]:
    """Put back the streams that a module holds, or that globals beside its forwards hold, whatever runs inside."""
    found = {id(one): (one, place_in(one)) for one in _streams(module)}
    try:
        yield
    finally:
        for stream, place in found.values():
            put_back(stream, place)


def _streams(module: nn.Module) -> Iterator[Any]:
    spaces = {id(space): space for part in module.modules() for space in _namespaces(part)}
    for space in spaces.values():
        for value in list(space.values()):
            for one in (
                value.values() if isinstance(value, Mapping) else value if type(value) in (list, tuple) else (value,)
            ):
                if isinstance(one, STREAMS) and one is not torch.default_generator:
                    yield one


def _namespaces(part: nn.Module) -> Iterator[dict[str, Any]]:
    yield vars(part)
    for cls in type(part).__mro__:
        forward: Any = vars(cls).get("forward")
        if not cls.__module__.startswith("torch.") and hasattr(forward, "__globals__"):
            yield forward.__globals__
