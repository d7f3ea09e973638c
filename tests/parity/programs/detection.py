"""Detection: boxes in lists of dicts, joined with the number of their image, as padded rows, as dense maps."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.parity.programs.program import POSITIONS, Program, batches, draw, labels


class Boxes(Dataset):
    """Images with 1 to 3 boxes each."""

    def __init__(self, n=18, most=3, sizes=(8,)):
        self.n, self.most, self.sizes = n, most, sizes

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        size, count = self.sizes[index % len(self.sizes)], index % self.most + 1
        return draw(1, size, size, seed=index), {
            "boxes": draw(count, 4, seed=100 + index).abs(),
            "labels": labels(3, count, seed=index),
        }


class Pair(Boxes):
    """Two boxes in every image: as many as images in a batch of two."""

    def __getitem__(self, index):
        image, _ = super().__getitem__(index)
        return image, {"boxes": draw(2, 4, seed=100 + index).abs(), "labels": labels(3, 2, seed=index)}


class Detector(nn.Module):
    """One box and one class for each image, from pooled features."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.box, self.cls = nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, x):
        h = self.body(x)
        return self.box(h), self.cls(h)


def torchvision_collate(samples):
    return tuple(zip(*samples, strict=True))


def stacked_collate(samples):
    return torch.stack([x for x, _ in samples]), [t for _, t in samples]


def joined_collate(samples):
    """As ultralytics does: all boxes in one tensor, with the number of the image each is of."""
    index = torch.cat([torch.full((len(t["boxes"]),), k) for k, (_, t) in enumerate(samples)])
    return {
        "img": torch.stack([x for x, _ in samples]),
        "bboxes": torch.cat([t["boxes"] for _, t in samples]),
        "cls": torch.cat([t["labels"] for _, t in samples]),
        "batch_idx": index,
    }


def list_step(model, batch):
    images, targets = batch
    total = 0.0
    for image, target in zip(images, targets, strict=True):
        box, scores = model(image[None])
        n = len(target["boxes"])
        total = total + F.smooth_l1_loss(box.expand(n, 4), target["boxes"])
        total = total + F.cross_entropy(scores.expand(n, 3), target["labels"])
    return total / len(images)


def stacked_step(model, batch):
    images, targets = batch
    boxes, scores = model(images)
    losses = [
        F.l1_loss(boxes[k].expand_as(t["boxes"]), t["boxes"])
        + F.cross_entropy(scores[k].expand(len(t["labels"]), 3), t["labels"])
        for k, t in enumerate(targets)
    ]
    return torch.stack(losses).mean()


def joined_step(model, batch):
    boxes, _ = model(batch["img"])
    losses = []
    for k in range(len(batch["img"])):
        own = batch["bboxes"][batch["batch_idx"] == k]
        losses.append((boxes[k] - own).abs().mean() if len(own) else boxes[k].sum() * 0)
    return torch.stack(losses).mean()


class Anchors(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(1, 6, 3, stride=2, padding=1)
        self.box, self.score = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 1, 1)

    def forward(self, x):
        h = F.relu(self.body(x))
        return {"boxes": self.box(h).flatten(2).transpose(1, 2), "scores": self.score(h).flatten(1)}


def anchored():
    """Targets for 16 anchors of each image: offsets, and 1, 0 or -1 (not counted)."""
    return batches(TensorData(draw(22, 1, 8, 8), draw(22, 16, 4, seed=3), labels(3, 22, 16) - 1))


class TensorData(Dataset):
    def __init__(self, *tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        x, offsets, match = (t[index] for t in self.tensors)
        return x, {"offsets": offsets, "match": match}


def anchor_loss(outputs, targets):
    """Sum over positives, and how many: the mean is over all positives of the batch."""
    match = targets["match"]
    positive, counted = match == 1, match >= 0
    box = F.smooth_l1_loss(outputs["boxes"][positive], targets["offsets"][positive], reduction="sum")
    score = F.binary_cross_entropy_with_logits(
        outputs["scores"][counted], match[counted].to(outputs["scores"].dtype), reduction="sum"
    )
    return box + score, positive.sum()


class Heat(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 2, 1))

    def forward(self, x):
        return self.net(x).sigmoid()


def heat_loss(outputs, targets):
    """CenterNet's focal loss: divided by the number of peaks in the batch."""
    p = outputs.clamp(1e-4, 1 - 1e-4)
    peak = targets.eq(1)
    positive = -((1 - p) ** 2) * p.log() * peak
    negative = -((1 - targets) ** 4) * p**2 * (1 - p).log() * ~peak
    return (positive + negative).sum(), peak.sum()


def heat_maps():
    maps = draw(22, 2, 8, 8, seed=4).sigmoid() * 0.9
    maps[:, :, 3, 4] = 1.0
    maps[::2, 0, 6, 1] = 1.0
    return batches(draw(22, 1, 8, 8), maps)


class Padded(Boxes):
    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        boxes = torch.zeros(self.most, 4, dtype=torch.float64)
        boxes[: len(target["boxes"])] = target["boxes"]
        return image, boxes, len(target["boxes"])


def padded_step(model, batch):
    images, boxes, counts = batch
    out, _ = model(images)
    keep = torch.arange(boxes.shape[1]) < counts[:, None]
    distance = (out[:, None] - boxes).abs().sum(-1)
    return (distance * keep).sum(), keep.sum()


def boxes(data, collate=None, size=6):
    return DataLoader(data, size, collate_fn=collate)


PROGRAMS = [
    Program(name="detection, lists of unlike images", model=Detector, step=list_step,
            data=lambda: boxes(Boxes(sizes=(8, 10, 12)), torchvision_collate)),
    Program(name="detection, lists of equal images", model=Detector, step=list_step,
            data=lambda: boxes(Boxes(), torchvision_collate)),
    Program(name="detection, stacked with list of dicts", model=Detector, step=stacked_step,
            data=lambda: boxes(Boxes(), stacked_collate)),
    Program(name="detection, two images with two boxes", model=Detector, step=list_step,
            data=lambda: boxes(Pair(), torchvision_collate, 2)),
    Program(name="detection, boxes joined by image number", model=Detector, step=joined_step,
            data=lambda: boxes(Boxes(), joined_collate), refused={"*": POSITIONS}),
    Program(name="detection, padded boxes", model=Detector, step=padded_step, data=lambda: boxes(Padded())),
    Program(name="detection, anchors", model=Anchors, criterion=anchor_loss, data=anchored),
    Program(name="detection, heat maps", model=Heat, criterion=heat_loss, data=heat_maps),
]  # fmt: skip
