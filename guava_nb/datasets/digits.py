"""The real handwritten digits that ship in the package, for the demo, the first notebook and tests.

Knows one file; see `guava_nb/assets/ATTRIBUTION.md` for where it comes from.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch

__all__ = ["NUM_TEST", "NUM_TRAIN", "load_digits", "split_digits"]

NUM_TRAIN = 1437
NUM_TEST = 360

ImagesAndLabels = tuple[torch.Tensor, torch.Tensor]


def load_digits() -> ImagesAndLabels:
    """All images and what they show, in the order of the source.

    Returns:
        images: uint8 [1797, 8, 8], values 0 to 16.
        labels: int64 [1797], values 0 to 9.
    """
    with (
        files("guava_nb").joinpath("assets/digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        images, labels = arrays["images"], arrays["labels"]
    return torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))


def split_digits(seed: int = 0) -> tuple[ImagesAndLabels, ImagesAndLabels]:
    """Images to train on and images held out, fixed by a seed.

    Args:
        seed: equal seeds give equal splits on every machine and with every version of torch and numpy.

    Returns:
        (images, labels) to train on, 1,437 of them, and (images, labels) held out, 360 of them, as `load_digits` gives.
    """
    images, labels = load_digits()
    # RandomState and not a Generator or torch: its stream is the one that is promised never to change.
    order = torch.from_numpy(np.random.RandomState(seed).permutation(len(labels)))
    train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]
    return (images[train], labels[train]), (images[test], labels[test])
