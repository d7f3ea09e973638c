"""What `frontier` trains: many models of one kind at once, as rows of flat weights, each on a batch of its own."""

from __future__ import annotations

import math
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from guava_nb.datasets.digits import load_digits

__all__ = ["TASKS", "ByteGPT", "Digits", "Task"]

Between = Callable[[int, Tensor], Tensor]

EVALUATED = 64  # batches of a validation
EVALUATED_ROWS = 32


class Task(ABC):
    """A model and its data.

    Attributes:
        batch: rows of a batch of one worker.
    """

    batch: int

    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the parameters of one model, by name."""

    @abstractmethod
    def initial(self, seed: int) -> Tensor:
        """Return the flat weights of one model, `[numel]`."""

    @abstractmethod
    def losses(self, flat: Tensor, rows: Tensor) -> Tensor:
        """Return the mean loss of each model, `[N]`, of flat weights `[N, numel]` on rows `[N, B, ...]`."""

    @abstractmethod
    def load(self, device: torch.device) -> None:
        """Read the data, once, before rows are drawn."""

    @abstractmethod
    def draw(self, generators: Sequence[torch.Generator], members: int) -> Tensor:
        """Draw a batch of each member with each seed's generator, `[seeds, members, B, ...]`."""

    @abstractmethod
    def held_out(self, generator: torch.Generator) -> Tensor:
        """Draw a batch of what is not trained on, `[B, ...]`, with a generator of the CPU."""

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of flat weights `[N, numel]` by name, `[N, *shape]`."""
        shapes = self.shapes()
        pieces = torch.split(flat, [math.prod(shape) for shape in shapes.values()], 1)
        return {
            name: piece.view(len(flat), *shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
        }


class ByteGPT(Task):
    """A byte-level GPT on the sources of Python's standard library; each ninth file is for validation."""

    context, batch = 96, 8

    def __init__(self, width: int, layers: int, heads: int) -> None:
        self.width, self.layers, self.heads = width, layers, heads

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        width = self.width
        found: dict[str, tuple[int, ...]] = {"bytes": (256, width), "places": (self.context, width)}
        for layer in range(self.layers):
            for name, shape in (
                ("norm1", (2, width)),
                ("qkv", (width, 3 * width)),
                ("out", (width, width)),
                ("norm2", (2, width)),
                ("up", (width, 4 * width)),
                ("down", (4 * width, width)),
            ):
                found[f"{layer}.{name}"] = shape
        return found | {"norm": (2, width), "head": (width, 256)}

    def initial(self, seed: int) -> Tensor:
        generator, parts = torch.Generator().manual_seed(seed), []
        for name, shape in self.shapes().items():
            if "norm" in name:
                parts.append(torch.stack([torch.ones(self.width), torch.zeros(self.width)]).flatten())
            else:
                scale = 0.02 / math.sqrt(2 * self.layers) if name.endswith(("out", "down")) else 0.02
                parts.append(torch.randn(math.prod(shape), generator=generator) * scale)
        return torch.cat(parts)

    def losses(self, flat: Tensor, rows: Tensor, between: Between | None = None) -> Tensor:
        """As of `Task`; `between` takes the number of a layer and what goes into it, `[N, B * T, width]`, and returns that."""
        (number, batch), width, context, named = rows.shape[:2], self.width, self.context, self.named(flat)
        x, y = rows[..., :-1], rows[..., 1:]
        offsets = torch.arange(number, device=flat.device).view(-1, 1, 1) * 256
        h = functional.embedding(x + offsets, named["bytes"].reshape(-1, width)) + named["places"].unsqueeze(1)
        h = h.view(number, batch * context, width)

        def normed(h: Tensor, name: str) -> Tensor:
            weight, bias = named[name].unbind(1)
            return torch.addcmul(bias.unsqueeze(1), functional.layer_norm(h, (width,)), weight.unsqueeze(1))

        for layer in range(self.layers):
            h = h if between is None else between(layer, h)
            qkv = normed(h, f"{layer}.norm1") @ named[f"{layer}.qkv"]
            q, k, v = (
                part.reshape(number * batch, context, self.heads, -1).transpose(1, 2) for part in qkv.chunk(3, -1)
            )
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + seen.transpose(1, 2).reshape(number, batch * context, width) @ named[f"{layer}.out"]
            h = h + functional.gelu(normed(h, f"{layer}.norm2") @ named[f"{layer}.up"]) @ named[f"{layer}.down"]
        logits = normed(h, "norm") @ named["head"]
        each = functional.cross_entropy(logits.view(-1, 256).float(), y.reshape(-1), reduction="none")
        return each.view(number, -1).mean(1)

    def load(self, device: torch.device) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
        files = [path for path in files if "site-packages" not in path.parts and "test" not in path.parts]
        texts = [path.read_bytes() for path in files]
        parts = [b"".join(text for n, text in enumerate(texts) if (n % 9 == 0) == held) for held in (False, True)]
        self._learned, self._held_out = (
            torch.frombuffer(bytearray(part), dtype=torch.uint8).to(device) for part in parts
        )

    def draw(self, generators: Sequence[torch.Generator], members: int) -> Tensor:
        size, last, device = (members, self.batch), self._learned.numel() - self.context - 1, self._learned.device
        begins = [torch.randint(last, size, generator=one, device=device) for one in generators]
        return self._cut(self._learned, torch.stack(begins))

    def held_out(self, generator: torch.Generator) -> Tensor:
        last = self._held_out.numel() - self.context - 1
        return self._cut(
            self._held_out, torch.randint(last, (EVALUATED_ROWS,), generator=generator).to(self._held_out.device)
        )

    def pieces(self, most: int) -> Tensor:
        """Return the first `most` pieces to learn from, one after the other, `[rows, T + 1]`."""
        last = self._learned.numel() - self.context - 1
        begins = torch.arange(min(most, last // (self.context + 1)), device=self._learned.device)
        return self._cut(self._learned, begins * (self.context + 1))

    def _cut(self, text: Tensor, begins: Tensor) -> Tensor:
        """Return pieces of T + 1 bytes that begin there, `[*begins.shape, T + 1]`."""
        return text[begins.unsqueeze(-1) + torch.arange(self.context + 1, device=text.device)].long()


class Digits(Task):
    """Three convolutions and two linear layers on the handwritten digits that the package has, shifted and with noise.

    Each draw is moved by up to one pixel and gets noise of half of the brightest pixel, in training and validation alike, so
    that 1,797 images do not end in a loss of 0. A row is 64 pixels and the label.
    """

    batch = 16
    _channels = (1, 32, 64, 64)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for number, (inner, outer) in enumerate(zip(self._channels[:-1], self._channels[1:], strict=True)):
            found |= {f"conv{number}": (outer, inner * 9), f"conv{number}.bias": (outer, 1)}
        return found | {"up": (64 * 16, 128), "up.bias": (1, 128), "head": (128, 10), "head.bias": (1, 10)}

    def initial(self, seed: int) -> Tensor:
        generator, parts = torch.Generator().manual_seed(seed), []
        for name, shape in self.shapes().items():
            inner = shape[1] if name.startswith("conv") else shape[0]
            scale = 0.0 if name.endswith("bias") else math.sqrt(2 / inner)
            parts.append(torch.randn(math.prod(shape), generator=generator) * scale)
        return torch.cat(parts)

    def losses(self, flat: Tensor, rows: Tensor) -> Tensor:
        (number, batch), named = rows.shape[:2], self.named(flat)
        h = rows[..., :64].reshape(number * batch, 1, 8, 8)
        for layer, stride in enumerate((1, 2, 1)):
            size = h.shape[-1] // stride
            columns = functional.unfold(h, 3, padding=1, stride=stride)  # [N * B, inner * 9, size * size]
            columns = columns.view(number, batch, *columns.shape[1:]).transpose(1, 2).flatten(2)
            h = torch.relu(named[f"conv{layer}"] @ columns + named[f"conv{layer}.bias"])
            h = h.view(number, -1, batch, size * size).transpose(1, 2).reshape(number * batch, -1, size, size)
        h = torch.relu(h.view(number, batch, -1) @ named["up"] + named["up.bias"])
        logits = h @ named["head"] + named["head.bias"]
        labels = rows[..., 64].long().reshape(-1)
        return functional.cross_entropy(logits.view(-1, 10), labels, reduction="none").view(number, -1).mean(1)

    def load(self, device: torch.device) -> None:
        images, labels = load_digits()
        pixels = torch.as_tensor(images).float().view(-1, 64).to(device) / 16
        rows = torch.cat([pixels, torch.as_tensor(labels).float().view(-1, 1).to(device)], 1)
        is_held = torch.arange(len(rows), device=device) % 5 == 0
        self._learned, self._held_out = rows[~is_held], rows[is_held]

    def draw(self, generators: Sequence[torch.Generator], members: int) -> Tensor:
        return torch.stack(
            [self._drawn(self._learned, members * self.batch, one).view(members, self.batch, 65) for one in generators]
        )

    def held_out(self, generator: torch.Generator) -> Tensor:
        return self._drawn(self._held_out.cpu(), EVALUATED_ROWS, generator).to(self._held_out.device)

    @staticmethod
    def _drawn(rows: Tensor, number: int, generator: torch.Generator) -> Tensor:
        device = rows.device
        chosen = rows[torch.randint(len(rows), (number,), generator=generator, device=device)]
        moved = torch.randint(3, (2, number, 1), generator=generator, device=device)
        noise = torch.randn(number, 64, generator=generator, device=device) * 0.5
        padded = functional.pad(chosen[:, :64].view(-1, 8, 8), (1, 1, 1, 1)).flatten(1)
        places = torch.arange(64, device=device)
        pixels = padded.gather(1, (places // 8 + moved[0]) * 10 + places % 8 + moved[1])
        return torch.cat([pixels + noise, chosen[:, 64:]], 1)


TASKS: Mapping[str, Task] = {
    "gpt-0.4M": ByteGPT(96, 3, 4),
    "gpt-3M": ByteGPT(256, 4, 8),
    "digits": Digits(),
}
