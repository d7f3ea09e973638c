"""Final loss against bytes: step sync with each wire format beside rounds of local steps, many runs at once on one device.

    python -m tests.benchmarks.frontier [--steps 10000] [--seeds 3] [--cases NAMES] [--list]

A byte-level GPT of 0.39 M parameters learns the sources of Python's standard library on 4 workers of 8 x 96 bytes a step, AdamW.
Workers are rows of stacked tensors: no process and no line is between them. What they exchange goes through the product's own
formats, error feedback and outer step, so losses are those of the algorithm and bytes those of its messages. Cases see the same
batches seed by seed. Prints one JSON line for each case: validation loss on files not trained on, its part above that of step
sync (mean over seeds, in percent), and the bytes up plus down at a worker, where 8 bytes a parameter and step are 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from guava_nb.outer_methods.outer_methods import OUTER_METHODS, OuterMethod, sparse_format
from guava_nb.wire_formats.error_feedback import ErrorFeedback
from guava_nb.wire_formats.registry import WIRE_FORMATS
from guava_nb.wire_formats.top_k import TopK
from guava_nb.wire_formats.wire_format import WireFormat

MEMBERS, BATCH, CONTEXT, WIDTH, LAYERS, HEADS = 4, 8, 96, 96, 3, 4
PEAK_RATE, WARM_STEPS, WEIGHT_DECAY, BETAS = 2e-3, 100, 0.1, (0.9, 0.95)
EVALUATED = 64  # batches of a validation
_CHUNK = 4096


@dataclass
class Case:
    """One way to exchange. `method` None: the gradients of every step, in `wire`; `every` 0: not at all."""

    name: str
    method: OuterMethod | None = None
    every: int = 1
    wire: WireFormat | None = None
    numel: int = 0

    def message(self) -> WireFormat:
        """Return the format of what a member sends."""
        if self.wire is not None:
            return self.wire
        return WIRE_FORMATS["fp32"] if self.method is None else self.method.wire_format

    @property
    def is_forwarded(self) -> bool:
        """Whether a member gets the messages of all others, as of sparse ones."""
        return isinstance(self.message(), TopK)

    def bytes_of_exchange(self) -> int:
        """Return the bytes up plus down at a worker."""
        return self.message().encoded_bytes(self.numel) * (MEMBERS if self.is_forwarded else 2)


def rate(step: int, steps: int) -> float:
    """Return the inner learning rate of step n (from 0): warm-up, then a cosine to a tenth."""
    if step < WARM_STEPS:
        return PEAK_RATE * (step + 1) / WARM_STEPS
    done = (step - WARM_STEPS) / max(1, steps - WARM_STEPS)
    return PEAK_RATE * (0.55 + 0.45 * math.cos(math.pi * done))


def outer(name: str, learning_rate: float | None = None, density: float = 1 / 64, bits: int = 2) -> OuterMethod:
    """Return an outer method, with another learning rate, or of a sparse one with other messages."""
    known = OUTER_METHODS[name]
    wire = sparse_format(density, bits) if isinstance(known.wire_format, TopK) else known.wire_format
    return replace(known, learning_rate=learning_rate or known.learning_rate, wire_format=wire)


class OnDevice(WireFormat):
    """A format whose messages stay on their device: the same numbers, sooner."""

    def __init__(self, inner: WireFormat) -> None:
        self.inner, self.name, self.is_exact = inner, inner.name, inner.is_exact

    def encoded_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return self.inner.encoded_bytes(numel, dtype)

    def encode(self, flat: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cat([part.reshape(-1).contiguous().view(torch.uint8) for part in self.inner._encode(flat)])

    def decode(
        self, message: Tensor, numel: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        return self.inner._decode(message, numel, dtype)

    def _encode(self, values: Tensor) -> Sequence[Tensor]:
        return self.inner._encode(values)

    def _decode(self, raw: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return self.inner._decode(raw, numel, dtype)


# ------------------------------------------------------------------------------------------------------------- the model


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the parameters of one model."""
    found: dict[str, tuple[int, ...]] = {"bytes": (256, WIDTH), "places": (CONTEXT, WIDTH)}
    for layer in range(LAYERS):
        for name, shape in (
            ("norm1", (2, WIDTH)),
            ("qkv", (WIDTH, 3 * WIDTH)),
            ("out", (WIDTH, WIDTH)),
            ("norm2", (2, WIDTH)),
            ("up", (WIDTH, 4 * WIDTH)),
            ("down", (4 * WIDTH, WIDTH)),
        ):
            found[f"{layer}.{name}"] = shape
    return found | {"norm": (2, WIDTH), "head": (WIDTH, 256)}


def initial(seed: int, device: torch.device) -> Tensor:
    """Return the flat weights of one model, `[numel]`."""
    generator, parts = torch.Generator().manual_seed(seed), []
    for name, shape in shapes().items():
        if "norm" in name:
            parts.append(torch.stack([torch.ones(WIDTH), torch.zeros(WIDTH)]).flatten())
        else:
            scale = 0.02 / math.sqrt(2 * LAYERS) if name.endswith(("out", "down")) else 0.02
            parts.append(torch.randn(math.prod(shape), generator=generator) * scale)
    return torch.cat(parts).to(device)


def losses(flat: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss of each model, `[N]`, of flat weights `[N, numel]` on bytes `[N, B, T + 1]`."""
    number, batch = tokens.shape[:2]
    pieces = torch.split(flat, [math.prod(shape) for shape in shapes().values()], 1)
    named = {name: piece.view(number, *shape) for (name, shape), piece in zip(shapes().items(), pieces, strict=True)}
    x, y = tokens[..., :-1], tokens[..., 1:]
    offsets = torch.arange(number, device=flat.device).view(-1, 1, 1) * 256
    h = functional.embedding(x + offsets, named["bytes"].reshape(-1, WIDTH)) + named["places"].unsqueeze(1)
    h = h.view(number, batch * CONTEXT, WIDTH)

    def normed(h: Tensor, name: str) -> Tensor:
        weight, bias = named[name].unbind(1)
        return torch.addcmul(bias.unsqueeze(1), functional.layer_norm(h, (WIDTH,)), weight.unsqueeze(1))

    for layer in range(LAYERS):
        qkv = normed(h, f"{layer}.norm1") @ named[f"{layer}.qkv"]
        q, k, v = (part.reshape(number * batch, CONTEXT, HEADS, -1).transpose(1, 2) for part in qkv.chunk(3, -1))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + seen.transpose(1, 2).reshape(number, batch * CONTEXT, WIDTH) @ named[f"{layer}.out"]
        h = h + functional.gelu(normed(h, f"{layer}.norm2") @ named[f"{layer}.up"]) @ named[f"{layer}.down"]
    logits = normed(h, "norm") @ named["head"]
    each = functional.cross_entropy(logits.view(-1, 256).float(), y.reshape(-1), reduction="none")
    return each.view(number, -1).mean(1)


# -------------------------------------------------------------------------------------------------------------- the data


def corpus(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the bytes to learn from and those to validate on: each ninth file of the standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    files = [path for path in files if "site-packages" not in path.parts and "test" not in path.parts]
    texts = [path.read_bytes() for path in files]
    parts = [b"".join(text for n, text in enumerate(texts) if (n % 9 == 0) == held) for held in (False, True)]
    learned, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8).to(device) for part in parts)
    return learned, held_out


def cut(text: Tensor, begins: Tensor) -> Tensor:
    """Return pieces of T + 1 bytes that begin there, `[*begins.shape, T + 1]`."""
    return text[begins.unsqueeze(-1) + torch.arange(CONTEXT + 1, device=text.device)].long()


# --------------------------------------------------------------------------------------------------------------- the runs


def _read(feedback: ErrorFeedback, number: int, flat: Tensor) -> Tensor:
    """Return what every receiver reads in the message of a tensor, `[numel]`."""
    return feedback.wire_format.decode(feedback.encode(number, flat), flat.numel(), flat.dtype, flat.device)


class Runs:
    """All cases and seeds side by side: weights and Adam's moments `[cases, seeds, members, numel]`."""

    def __init__(self, cases: Sequence[Case], seeds: int, steps: int, device: torch.device) -> None:
        self.cases, self.seeds, self.steps, self.device = cases, seeds, steps, device
        firsts = torch.stack([initial(seed, device) for seed in range(seeds)])
        self.numel = firsts.shape[1]
        # Fused, a step takes 0.4 of its time on a GPU.
        self.losses = torch.compile(losses, dynamic=False) if device.type == "cuda" else losses
        self.start = firsts.expand(len(cases), -1, -1).clone()  # of the open rounds
        self.weights = self.start.unsqueeze(2).repeat(1, 1, MEMBERS, 1)
        self.first, self.second = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self.exchanged = [0] * len(cases)
        self.momentum: list[Tensor | None] = [None] * len(cases)
        self.feedback = [
            ErrorFeedback(OnDevice(one.message()), one.method.decay if one.method else 1.0) for one in cases
        ]
        self.hub = [ErrorFeedback(OnDevice(one.message())) for one in cases]
        for one in cases:
            one.numel = self.numel

    def step(self, index: int, tokens: Tensor) -> None:
        """Take one inner step of all members on bytes `[seeds, members, B, T + 1]`, then end the rounds that end here."""
        flat = self.weights.view(-1, self.numel).requires_grad_()
        given = tokens.expand(len(self.cases), *tokens.shape).reshape(-1, *tokens.shape[2:])
        (gradient,) = torch.autograd.grad(self.losses(flat, given).sum(), flat)
        self.weights = self.weights.detach()
        gradient = gradient.view_as(self.weights)
        for number, case in enumerate(self.cases):
            if case.method is None:
                gradient[number] = self._mean(number, gradient[number]).unsqueeze(1)
                self.exchanged[number] += case.bytes_of_exchange()
        self._adam(index, gradient)
        for number, case in enumerate(self.cases):
            if case.method is not None and case.every and ((index + 1) % case.every == 0 or index + 1 == self.steps):
                self._end_round(number, case.method)

    def _adam(self, index: int, gradient: Tensor) -> None:
        beta1, beta2 = BETAS
        self.first.lerp_(gradient, 1 - beta1)
        self.second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        now = rate(index, self.steps)
        self.weights.mul_(1 - now * WEIGHT_DECAY)
        scale = now / (1 - beta1 ** (index + 1))
        root = (self.second / (1 - beta2 ** (index + 1))).sqrt_().add_(1e-8)
        self.weights.addcdiv_(self.first, root, value=-scale)

    def _sent(self, number: int, each: Tensor) -> Tensor:
        """Return what is read of what each member sends of `[seeds, members, numel]`; the whole, padded to whole chunks.

        So one message of all has the same bits as the messages of each side by side.
        """
        feedback = self.feedback[number]
        padded = functional.pad(each, (0, -self.numel % _CHUNK))
        if feedback.wire_format.is_exact:
            return padded
        decoded = _read(feedback, number, padded.reshape(-1))
        feedback.commit()
        return decoded.view_as(padded)

    def _mean(self, number: int, each: Tensor) -> Tensor:
        """Return what members read of the mean of what each sends, `[seeds, numel]` of `[seeds, members, numel]`."""
        mean = self._sent(number, each).mean(1)
        if not (self.cases[number].is_forwarded or self.hub[number].wire_format.is_exact):
            mean = _read(self.hub[number], number, mean.reshape(-1)).view_as(mean)
            self.hub[number].commit()
        return mean[..., : self.numel]

    def _end_round(self, number: int, method: OuterMethod) -> None:
        went, rest = self.start[number].unsqueeze(1) - self.weights[number], None
        if method.keeps_rest:
            self.feedback[number] = ErrorFeedback(self.feedback[number].wire_format)  # the rest is in `went`
            sent = self._sent(number, went)[..., : self.numel]
            mean, rest = sent.sum(1) / (sent != 0).sum(1).clamp(min=1), went - sent
        else:
            mean = self._mean(number, went)
        after, self.momentum[number] = method.step(self.start[number], mean, self.momentum[number])
        self.start[number], self.weights[number] = after, after.unsqueeze(1)
        if rest is not None:
            self.weights[number] -= rest
        self.exchanged[number] += self.cases[number].bytes_of_exchange()

    @torch.no_grad()
    def validated(self, held_out: Tensor) -> Tensor:
        """Return the validation loss of each case and seed, `[cases, seeds]`."""
        lone = [number for number, case in enumerate(self.cases) if not case.every]
        for number, case in enumerate(self.cases):
            if case.method is None:
                self.start[number] = self.weights[number, :, 0]
        self.start[lone] = self.weights[lone, :, 0]
        flat = self.start.view(-1, self.numel)
        generator = torch.Generator().manual_seed(12345)
        total = torch.zeros(flat.shape[0], device=self.device)
        for _ in range(EVALUATED):
            begins = torch.randint(held_out.numel() - CONTEXT - 1, (32,), generator=generator).to(self.device)
            total += losses(flat, cut(held_out, begins).expand(flat.shape[0], -1, -1))
        return (total / EVALUATED).view(len(self.cases), self.seeds)


def train(cases: Sequence[Case], seeds: int, steps: int, device: torch.device) -> Runs:
    """Train all cases at once and return them as they ended."""
    learned, held_out = corpus(device)
    runs = Runs(cases, seeds, steps, device)
    generators = [torch.Generator(device=device).manual_seed(1000 + seed) for seed in range(seeds)]
    for index in range(steps):
        size = (MEMBERS, BATCH)
        begins = [torch.randint(learned.numel() - CONTEXT - 1, size, generator=g, device=device) for g in generators]
        runs.step(index, cut(learned, torch.stack(begins)))
    _report(runs, runs.validated(held_out))
    return runs


def _report(runs: Runs, ended: Tensor) -> None:
    plain = next((n for n, one in enumerate(runs.cases) if one.name == "step"), None)
    for number, case in enumerate(runs.cases):
        share = runs.exchanged[number] / (8 * runs.numel * runs.steps)
        row = {
            "case": case.name,
            "steps": runs.steps,
            "bytes_share": share,
            "fold": round(1 / share, 1) if share else None,
            "loss": round(float(ended[number].mean()), 4),
            "losses": [round(float(one), 4) for one in ended[number]],
        }
        if plain is not None:
            above = (ended[number] / ended[plain] - 1) * 100
            row |= {
                "above_step_percent": round(float(above.mean()), 2),
                "each": [round(float(one), 2) for one in above],
            }
        print(json.dumps(row), flush=True)


def known_cases() -> Iterator[Case]:
    """Yield the cases of the table."""
    yield Case("step")
    for wire in ("bf16", "int8", "int4"):
        yield Case(f"step+{wire}", wire=WIRE_FORMATS[wire])
    yield Case("a quarter of the tokens alone", outer("average"), 0)
    yield Case("average-30", outer("average"), 30)
    for every in (5, 15, 30, 60, 120):
        yield Case(f"nesterov-{every}", outer("nesterov"), every)
    for every in (15, 30, 60):
        yield Case(f"nesterov-{every}+int4", outer("nesterov"), every, WIRE_FORMATS["int4"])
    for every in (5, 15, 30, 60, 120):
        yield Case(f"sparse-{every}", outer("sparse"), every)
    for every, part in (
        (5, 64), (5, 128), (5, 256), (10, 64), (10, 128), (10, 256), (15, 32), (15, 64), (15, 128), (15, 256),
        (30, 64), (30, 128), (60, 64), (60, 128),
    ):  # fmt: skip
        yield Case(f"partial-{every} 1/{part}", outer("partial", density=1 / part), every)


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", help="only these; step is always among them")
    parser.add_argument("--list", action="store_true", help="print the names of all cases")
    given = parser.parse_args()
    cases = [one for one in known_cases() if not given.cases or one.name in ("step", *given.cases)]
    if given.list:
        print("\n".join(one.name for one in cases))
        return
    torch.set_float32_matmul_precision("high")
    began, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train(cases, given.seeds, given.steps, device)
    print(json.dumps({"cases": len(cases), "seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main()
