"""What every contestant of `gpu.py` trains: GPT-2 124M with a tied head, in plain PyTorch, and its batches.

Knows torch alone, so a worker of any commit can build it: `gpu_rows.model:make` with this file's grandparent on the path.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """Shape of a GPT-2 and of the samples it is given."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    tokens: int


#: The vocabulary of GPT-2 (50,257) is filled up to a multiple of 64, as is usual.
SIZES = {"gpt2": Size(12, 12, 768, 50304, 1024), "tiny": Size(4, 2, 32, 512, 16)}


class Block(nn.Module):
    """A block of GPT-2. Query, key and value of a head lie side by side in `qkv`, so its rows can be cut by heads."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_width = size.width // size.heads
        self.norm_1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm_2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, tokens, width]` in and out."""
        rows, tokens, _ = x.shape
        qkv = self.qkv(self.norm_1(x)).view(rows, tokens, -1, 3, self.head_width)
        query, key, value = (part.squeeze(3).transpose(1, 2) for part in qkv.split(1, dim=3))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, tokens, -1))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2: token numbers `[rows, tokens]` to logits `[rows, tokens, vocabulary]`."""

    def __init__(self, size: str) -> None:
        super().__init__()
        shape = SIZES[size]
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.tokens, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("weight") and parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(size: str, compiled: bool = False) -> nn.Module:
    """Return the model as a worker builds it, and let the worker be watched from outside where `gpu.py` asked for it."""
    model = GPT(size)
    if compiled:
        model.compile(backend="inductor" if size == "gpt2" else "eager")
    importlib.import_module("gpu_rows.watch").watch_worker()
    return model


def batches(size: str, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Token numbers and the ones that follow them, `[rows, tokens]` each on the CPU; eight batches, over and over."""
    shape, generator = SIZES[size], torch.Generator().manual_seed(0)
    drawn = torch.randint(0, shape.vocabulary, (8, rows, shape.tokens + 1), generator=generator)
    while True:
        for one in drawn:
            yield one[:, :-1].contiguous(), one[:, 1:].contiguous()


def optimizer_args(fused: bool) -> dict[str, Any]:
    """Arguments of AdamW for every contestant; torch's own choice of kernels where `fused` is not asked for."""
    return {"lr": 1e-4, "fused": True} if fused else {"lr": 1e-4}


def flat_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
