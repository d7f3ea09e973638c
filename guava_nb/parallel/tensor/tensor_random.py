"""Random numbers between split and whole activations.

Ranks that share each layer seed themselves alike, so dropout on whole activations draws the same mask everywhere.
Where activations are split, masks should differ, and ranks with unequal parts draw unequally many numbers. So a region
between a column and a row layer has random numbers of its own, and afterwards all ranks go on from one state.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SplitRandomness"]

_LARGE = 2**62


class SplitRandomness:
    """The random state around one split region; entered by its first column layer, left by its row layer."""

    def __init__(self, rank: int) -> None:
        """Take this rank's index among those that share the region."""
        self._rank = rank
        self._entered: set[int] = set()
        self._after: Tensor | None = None

    def enter(self, layer: int, device: torch.device) -> None:
        """A column layer of the region ran; `layer` tells it from the others.

        The second run of one layer begins a new region: torch's checkpoint stops a recomputation as soon as it has
        what it needs, so a region may never have been left.
        """
        if self._after is None or layer in self._entered:
            self._entered = set()
            seed = int(torch.randint(_LARGE, (), device=device))
            self._after = _state(device)
            _seed(device, (seed + 7919 * (self._rank + 1)) % _LARGE)
        self._entered.add(layer)

    def leave(self, device: torch.device) -> None:
        """The region's row layer is about to run."""
        if self._after is not None:
            _restore(device, self._after)
            self._after = None


def _state(device: torch.device) -> Tensor:
    """Return the state of torch's generator of a device, `[bytes]` uint8 on the CPU."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _restore(device: torch.device, state: Tensor) -> None:
    """Put a state of `_state`, `[bytes]`, back."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _seed(device: torch.device, seed: int) -> None:
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
