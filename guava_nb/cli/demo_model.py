"""The demo's network, importable on every machine as "guava_nb.cli.demo_model:DigitNet"."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["DigitNet"]

FULL_INK = 16  # the images hold 0 (paper) to 16 (ink)
PIXELS_AFTER_STRIDE = 4 * 4


class DigitNet(nn.Module):
    """A small CNN for 8 x 8 digit images, 38 thousand parameters, ten classes.

    Smooth on purpose: GELU and a strided convolution instead of ReLU and max-pooling. At a kink a difference in the
    last bit picks another branch, and after some steps of Adam two runs that sum in another order differ by 1e-3 in the
    loss; here they stay together to 1e-6, in float32 too. No batch statistics, for the same reason.
    """

    def __init__(self, channels: int = 16, hidden: int = 64) -> None:
        """Make the layers; `channels` of the first convolution, units of the `hidden` layer."""
        super().__init__()
        self.fine = nn.Conv2d(1, channels, kernel_size=3, padding=1)
        self.coarse = nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1, stride=2)
        self.hidden = nn.Linear(2 * channels * PIXELS_AFTER_STRIDE, hidden)
        self.classes = nn.Linear(hidden, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map uint8 images [N, 8, 8] to scores [N, 10] in the precision of the weights."""
        pixels = images.unsqueeze(1).to(self.fine.weight.dtype) / (FULL_INK / 2) - 1
        features = functional.gelu(self.coarse(functional.gelu(self.fine(pixels))))
        scores: torch.Tensor = self.classes(functional.gelu(self.hidden(features.flatten(1))))
        return scores
