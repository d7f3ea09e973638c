"""Images: convolutions, residual nets, patches, mixing, labels that are no single class, segmentation."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.parity.programs.program import COUPLED, NOISY, STATISTICS, Program, batches, draw, labels


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 6, 3, padding=1)
        self.fc = nn.Linear(6 * 2 * 2, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


class Residual(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class ResNet(nn.Module):
    def __init__(self, norm=nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.layers = nn.Sequential(Residual(4, norm), Residual(4, norm))
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


def group_resnet():
    return ResNet(lambda width: nn.GroupNorm(2, width))


class ViT(nn.Module):
    def __init__(self, width=8, dropout=0.0) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.norm(self.encoder(x)[:, 0]))


def dropped_vit():
    return ViT(dropout=0.2)


class AutoEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU())
        self.decoder = nn.Sequential(nn.ConvTranspose2d(4, 1, 4, stride=2, padding=1), nn.Sigmoid())

    def forward(self, x):
        return self.decoder(self.encoder(x))


def images(size=8, channels=1, n=22):
    return draw(n, channels, size, size)


def classified():
    return batches(images(), labels(5, 22))


def mixed_up():
    """MixUp in the collate function: soft labels."""

    def collate(samples):
        x, y = torch.utils.data.default_collate(samples)
        lam = 0.3
        order = torch.arange(len(x)).flip(0)
        soft = F.one_hot(y, 5).double()
        return lam * x + (1 - lam) * x[order], lam * soft + (1 - lam) * soft[order]

    return batches(torch.utils.data.TensorDataset(images(), labels(5, 22)), collate_fn=collate)


def cutmix_step(model, batch):
    x, y = batch
    other = torch.arange(len(x)).flip(0)
    x = x.clone()
    x[:, :, 2:6, 2:6] = x[other][:, :, 2:6, 2:6]
    out = model(x)
    return 0.75 * F.cross_entropy(out, y) + 0.25 * F.cross_entropy(out, y[other])


def bytes_images():
    return batches((images().abs() * 60).to(torch.uint8), labels(5, 22))


def scale(batch):
    x, y = batch
    return x.to(torch.float64).div(255).sub(0.5), y


def flip(batch):
    x, y = batch
    return x.flip(-1), y


def random_flip(batch):
    x, y = batch
    return torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x), y


def channels_last():
    return Cnn().to(memory_format=torch.channels_last)


# ------------------------------------------------------------------------------------------------------- segmentation


class Segmenter(nn.Module):
    def __init__(self, classes=3) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 6, 2, stride=2)
        self.out = nn.Conv2d(6, classes, 1)

    def forward(self, x):
        return self.out(F.relu(self.up(F.relu(self.down(x)))))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.main, self.aux = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 3, 1), nn.Conv2d(6, 3, 1)

    def forward(self, x):
        y = F.relu(self.body(x))
        return self.main(y), self.aux(y)


def masks():
    y = labels(3, 22, 8, 8)
    y[:, 0, ::2] = 255
    return batches(images(), y)


def clean_masks():
    return batches(images(), labels(3, 22, 8, 8))


def two_head_loss(outputs, targets):
    main, aux = outputs
    return F.cross_entropy(main, targets) + 0.4 * F.cross_entropy(aux, targets)


def dice_of_batch(outputs, targets):
    p = outputs.softmax(1)
    t = F.one_hot(targets, 3).movedim(-1, 1).to(p.dtype)
    both = (p * t).sum((0, 2, 3))
    return 1 - (2 * both / (p.sum((0, 2, 3)) + t.sum((0, 2, 3)))).mean()


def dice_of_samples(outputs, targets):
    p = outputs.softmax(1)
    t = F.one_hot(targets, 3).movedim(-1, 1).to(p.dtype)
    both = (p * t).sum((2, 3))
    return 1 - (2 * both / (p.sum((2, 3)) + t.sum((2, 3)))).mean()


def focal(outputs, targets):
    ce = F.cross_entropy(outputs, targets, reduction="none")
    return ((1 - (-ce).exp()) ** 2 * ce).mean()


CE = "CrossEntropyLoss"
PROGRAMS = [
    Program(name="cnn", model=Cnn, data=classified, criterion=CE),
    Program(
        name="cnn, label smoothing", model=Cnn, data=classified, criterion=CE, criterion_args={"label_smoothing": 0.1}
    ),
    Program(
        name="cnn, class weights", model=Cnn, data=classified, criterion=CE,
        criterion_args={"weight": [1.0, 2.0, 0.5, 1.5, 3.0]},
    ),
    Program(name="cnn, focal loss", model=Cnn, data=classified, criterion=focal),
    Program(
        name="resnet, synced batch norm", model=ResNet, data=classified, criterion=CE, settings={"sync_batchnorm": True},
        refused={"relay": "sync_batchnorm", "site": "sync_batchnorm", "pipeline": "statistics"},
    ),
    Program(
        name="resnet, batch norm", model=ResNet, data=classified, criterion=CE,
        told=dict.fromkeys(("data", "relay", "site", "zero 1", "zero 3", "pipeline"), STATISTICS),
    ),
    Program(name="resnet, group norm", model=group_resnet, data=classified, criterion=CE),
    Program(name="vit", model=ViT, data=classified, criterion=CE, optimizer="AdamW", optimizer_args={"lr": 1e-3}),
    Program(name="vit, dropout", model=dropped_vit, data=classified, criterion=CE, told={"*": NOISY}),
    Program(name="mixup in collate", model=Cnn, data=mixed_up, criterion=CE),
    Program(name="cutmix in step", model=Cnn, data=classified, step=cutmix_step,
            told=dict.fromkeys(("data", "relay", "site", "zero 1", "zero 3"), COUPLED)),
    Program(name="uint8 preprocessed", model=Cnn, data=bytes_images, criterion=CE, options={"preprocess": scale}),
    Program(name="flipped on device", model=Cnn, data=classified, criterion=CE, options={"augment": flip}),
    Program(name="autoencoder", model=AutoEncoder, data=lambda: batches(images(), images()), criterion="MSELoss"),
    Program(name="channels_last model", model=channels_last, data=classified, criterion=CE),
    Program(
        name="segmentation, ignored pixels", model=Segmenter, data=masks, criterion=CE, criterion_args={"ignore_index": 255}
    ),
    Program(name="segmentation, two heads", model=TwoHeads, data=clean_masks, criterion=two_head_loss),
    Program(name="dice over the batch", model=Segmenter, data=clean_masks, criterion=dice_of_batch,
            told={"*": COUPLED}),
    Program(name="dice per image", model=Segmenter, data=clean_masks, criterion=dice_of_samples),
]  # fmt: skip
