"""The packaged digits are the real ones, and their split is fixed."""

from __future__ import annotations

import hashlib
import random
from importlib.resources import files

import numpy as np
import torch

from guava_nb.datasets.digits import NUM_TEST, NUM_TRAIN, load_digits, split_digits


def test_all_images_are_there_with_their_labels() -> None:
    images, labels = load_digits()
    assert (images.dtype, tuple(images.shape)) == (torch.uint8, (1797, 8, 8))
    assert (labels.dtype, tuple(labels.shape)) == (torch.int64, (1797,))
    assert (int(images.min()), int(images.max()), int(images.sum())) == (0, 16, 561718)
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    sha = hashlib.sha256(images.numpy().tobytes() + labels.to(torch.uint8).numpy().tobytes()).hexdigest()
    assert sha.startswith("87ff0c9e40dc7e2c")


def test_the_split_is_honest_and_fixed_by_its_seed() -> None:
    images, labels = load_digits()
    (train, train_labels), (test, test_labels) = split_digits()
    assert (len(train), len(train_labels), len(test), len(test_labels)) == (NUM_TRAIN, NUM_TRAIN, NUM_TEST, NUM_TEST)
    assert sorted(_raw(train, train_labels) + _raw(test, test_labels)) == sorted(_raw(images, labels))
    assert test_labels[:8].tolist() == [7, 9, 4, 7, 0, 2, 6, 1]
    assert all(torch.equal(one, other) for one, other in zip(split_digits(0)[1], (test, test_labels), strict=True))
    assert not torch.equal(split_digits(1)[1][1], test_labels)


def _raw(images: torch.Tensor, labels: torch.Tensor) -> list[bytes]:
    return [bytes(image.numpy()) + bytes([int(label)]) for image, label in zip(images, labels, strict=True)]


def test_no_random_stream_of_the_process_is_touched() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    before = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
    split_digits(3)
    assert (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()) == before


def test_the_attribution_ships_too() -> None:
    text = files("guava_nb").joinpath("assets/ATTRIBUTION.md").read_text(encoding="utf-8")
    assert "CC BY 4.0" in text
    assert "10.24432/C50P49" in text
