"""Programs whose batches have other forms than a pair of tensors: models and steps as their users write them."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset


class Finder(nn.Module):
    """Scores boxes of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.box = nn.Linear(12, 6), nn.Linear(4, 6)

    def forward(self, images: Tensor, boxes: list[Tensor]) -> list[Tensor]:
        seen = self.image(images.flatten(1))
        return [self.box(own) @ one for own, one in zip(boxes, seen, strict=True)]


def lists_step(model: nn.Module, batch: Any) -> Tensor:
    """One list entry per sample: the mean over images of the summed score of their boxes."""
    images, targets = batch
    scores = model(images, [target["boxes"] for target in targets])
    return torch.stack([torch.tanh(score).sum() for score in scores]).mean()


def joined_step(model: nn.Module, batch: Any) -> Tensor:
    """Boxes of all images joined, with the place of their image."""
    boxes = [batch["bboxes"][batch["batch_idx"] == place] for place in range(len(batch["img"]))]
    scores = model(batch["img"], boxes)
    return torch.stack([torch.tanh(score).sum() for score in scores]).mean()


class Boxes(Dataset[Any]):
    """Images with 1 to 3 boxes each."""

    def __init__(self, samples: int = 30) -> None:
        generator = torch.Generator().manual_seed(4)
        self.images = torch.randn(samples, 3, 2, 2, generator=generator, dtype=torch.float64)
        self.boxes = [torch.randn(1 + k % 3, 4, generator=generator, dtype=torch.float64) for k in range(samples)]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.images[index], {"boxes": self.boxes[index], "image_id": index}


def as_lists(samples: list[Any]) -> Any:
    return torch.stack([image for image, _ in samples]), [target for _, target in samples]


def joined(samples: list[Any]) -> dict[str, Tensor]:
    counts = torch.tensor([len(target["boxes"]) for _, target in samples])
    return {
        "img": torch.stack([image for image, _ in samples]),
        "bboxes": torch.cat([target["boxes"] for _, target in samples]),
        "batch_idx": torch.repeat_interleave(torch.arange(len(samples)), counts),
    }


def split_joined(batch: Any, ranges: Any) -> list[Any]:
    """As a user cuts joined boxes."""
    parts = []
    for start, stop in ranges:
        own = (batch["batch_idx"] >= start) & (batch["batch_idx"] < stop)
        parts.append(
            {
                "img": batch["img"][start:stop],
                "bboxes": batch["bboxes"][own],
                "batch_idx": batch["batch_idx"][own] - start,
            }
        )
    return parts


# ------------------------------------------------------------------------------------------------------------ sequences


class Reader(nn.Module):
    """A GRU over frames."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(5, 7, batch_first=batch_first), nn.Linear(7, 3)

    def forward(self, frames: Any, start: Tensor | None = None) -> Tensor:
        frames, lengths = frames if isinstance(frames, tuple | list) else (frames, None)
        hidden, last = self.gru(frames, start)
        if lengths is None:
            return self.out(last[-1])
        return self.out(hidden[torch.arange(len(lengths)), lengths - 1])


class BatchFirst(Reader):
    """The same, samples on the first axis."""

    def __init__(self) -> None:
        super().__init__(batch_first=True)


def states_step(model: nn.Module, batch: Any) -> Tensor:
    """Frames in time, hidden state [layers, samples, units], labels."""
    return functional.cross_entropy(model(batch["frames"], batch["state"]), batch["label"])


class Frames(Dataset[Any]):
    def __init__(self, samples: int = 30, longest: int = 6) -> None:
        generator = torch.Generator().manual_seed(4)
        self.frames = torch.randn(samples, longest, 5, generator=generator, dtype=torch.float64)
        self.longest, self.generator = longest, generator

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> Any:
        return self.frames[index], 1 + index % self.longest, index % 3


def time_first(samples: list[Any]) -> Any:
    return torch.stack([frames for frames, _, _ in samples], 1), torch.tensor([label for *_, label in samples])


def with_states(samples: list[Any]) -> Any:
    frames, labels = time_first(samples)
    return {"frames": frames, "state": 0.1 * frames[:1, :, :1].expand(1, -1, 7).contiguous(), "label": labels}


def padded(samples: list[Any]) -> Any:
    """((frames padded to the longest of the batch, lengths), labels)."""
    longest = max(length for _, length, _ in samples)
    frames = torch.stack([frames[:longest] for frames, _, _ in samples])
    lengths = torch.tensor([length for _, length, _ in samples])
    return (frames, lengths), torch.tensor([label for *_, label in samples])


# ----------------------------------------------------------------------------------------------------------- containers


class Named(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Fields:
    x: Tensor
    y: Tensor
    note: str = "kept"


class Encoding(UserDict[str, Any]):
    """As a tokenizer's padding collate function returns."""


def linear() -> nn.Module:
    return nn.Linear(5, 3)


def attribute_step(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch.x), batch.y)


def key_step(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def anchors_step(model: nn.Module, batch: Any) -> Tensor:
    """A constant [7, 5] stands first: it is no number of samples."""
    scores = model(batch["x"]) + model(batch["anchors"]).mean(0)
    return functional.cross_entropy(scores, batch["y"])


def _xy(samples: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([frames[0] for frames, *_ in samples]), torch.tensor([label for *_, label in samples])


def as_named(samples: list[Any]) -> Named:
    return Named(*_xy(samples))


def as_fields(samples: list[Any]) -> Fields:
    return Fields(*_xy(samples))


def as_encoding(samples: list[Any]) -> Encoding:
    x, y = _xy(samples)
    return Encoding(x=x, y=y)


ANCHORS = torch.linspace(-1, 1, 35, dtype=torch.float64).view(7, 5)


def with_anchors(samples: list[Any]) -> dict[str, Tensor]:
    x, y = _xy(samples)
    return {"anchors": ANCHORS.clone(), "x": x, "y": y}


class FormFirst(nn.Module):
    """The first layer of a stack; it takes a batch's inputs apart."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 6)

    def forward(self, inputs: Any) -> Tensor:
        if isinstance(inputs, Fields):
            return self.linear(inputs.x)
        if isinstance(inputs, dict):
            return self.linear(inputs["frames"].mean(0)) + self.linear(inputs["table"]).mean(0)
        return self.linear(inputs)


def formed() -> nn.Module:
    """Return a stack whose stages may be cut anywhere."""
    return nn.Sequential(FormFirst(), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def fields_and_labels(samples: list[Any]) -> Any:
    return as_fields(samples), _xy(samples)[1]


def frames_and_table(samples: list[Any]) -> Any:
    """Frames in time beside a table that is the same in every batch."""
    frames, labels = time_first(samples)
    return {"table": ANCHORS.clone(), "frames": frames}, labels


def noise_and_labels(samples: list[Any]) -> Any:
    """A table that belongs to the batch."""
    frames, labels = time_first(samples)
    return {"table": frames[:, 0].clone(), "frames": frames}, labels
