"""Random state of a process as plain data: torch's and numpy's default streams, Python's, and given generators.

Knows three libraries' state formats; knows nothing of loaders or checkpoints. A plain state holds tensors, numbers and
text only, so `torch.load(weights_only=True)` reads it back and `pack` takes it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from guava_nb.errors import CheckpointError

__all__ = ["RandomState"]


@dataclass(frozen=True, slots=True)
class RandomState:
    """What `take` found; cheap to take (some 30 microseconds), turned into plain data only when it is saved."""

    torch_state: torch.Tensor
    numpy_state: Any
    python_state: Any
    generator_states: dict[str, torch.Tensor]

    @classmethod
    def take(cls, generators: Mapping[str, torch.Generator]) -> RandomState:
        """The state of this moment.

        Args:
            generators: torch generators beside the default one, by a name that means the same when putting back.
        """
        return cls(
            torch.get_rng_state(),
            np.random.get_state(),  # the stream that data sets draw from
            random.getstate(),
            {name: generator.get_state() for name, generator in generators.items()},
        )

    def put(self, generators: Mapping[str, torch.Generator]) -> None:
        """Go back to this state; generators without a state here are left alone."""
        torch.set_rng_state(self.torch_state)
        np.random.set_state(self.numpy_state)
        random.setstate(self.python_state)
        for name, generator in generators.items():
            if name in self.generator_states:
                generator.set_state(self.generator_states[name])

    def to_plain(self) -> dict[str, Any]:
        """Tensors, numbers and text that hold the same."""
        kind, keys, position, has_gauss, gauss = self.numpy_state
        version, words, python_gauss = self.python_state
        return {
            "torch": self.torch_state,
            "numpy": [str(kind), torch.tensor(keys.tolist()), int(position), int(has_gauss), float(gauss)],
            "python": [version, torch.tensor(words), python_gauss],
            "generators": dict(self.generator_states),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RandomState:
        """The inverse of `to_plain`.

        Raises:
            CheckpointError: it is not what `to_plain` gives.
        """
        try:
            kind, keys, position, has_gauss, gauss = plain["numpy"]
            version, words, python_gauss = plain["python"]
            return cls(
                plain["torch"],
                (kind, np.array(keys.tolist(), dtype=np.uint32), position, has_gauss, gauss),
                (version, tuple(words.tolist()), python_gauss),
                dict(plain["generators"]),
            )
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise CheckpointError(f"the random state in a saved position cannot be read ({error!r})") from error
