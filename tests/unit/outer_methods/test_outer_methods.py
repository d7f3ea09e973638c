"""Against plain loops of local SGD, DiLoCo and SparseLoCo, written from the papers and with none of our functions."""

from __future__ import annotations

import copy
import math
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from guava_nb.outer_methods.outer_methods import OUTER_METHODS, OuterMethod, mixed, pseudo_gradient
from guava_nb.wire_formats.error_feedback import ErrorFeedback
from guava_nb.wire_formats.top_k import TopK

WORKERS, STEPS, ROUNDS = 3, 4, 6
#: Of the plain loop: takes the global model after each round's pseudo-gradients, one list of tensors a worker.
Outer = Callable[[nn.Module, list[list[Tensor]]], None]


class Members:
    """Several workers in one process: each has its model, its AdamW, its batches."""

    def __init__(self, dtype: torch.dtype, optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)
        self.replicas = [copy.deepcopy(self.model) for _ in range(WORKERS)]
        self.optimizers = [optimizer(replica) for replica in self.replicas]
        self.batches = torch.randn(ROUNDS, WORKERS, STEPS, 8, 6, dtype=torch.float64).to(dtype)
        self.labels = torch.randint(3, (ROUNDS, WORKERS, STEPS, 8))

    def inner(self, number: int) -> None:
        for worker, (replica, optimizer) in enumerate(zip(self.replicas, self.optimizers, strict=True)):
            replica.load_state_dict(self.model.state_dict())
            for batch, labels in zip(self.batches[number, worker], self.labels[number, worker], strict=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(replica(batch), labels).backward()
                optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.02)


def plain(dtype: torch.dtype, outer: Outer, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw) -> Tensor:
    members = Members(dtype, optimizer)
    for number in range(ROUNDS):
        members.inner(number)
        with torch.no_grad():
            old = list(members.model.parameters())
            deltas = [[p - q for p, q in zip(old, r.parameters(), strict=True)] for r in members.replicas]
        outer(members.model, deltas)
    return torch.cat([p.detach().reshape(-1) for p in members.model.parameters()])


def ours(
    dtype: torch.dtype, method: OuterMethod, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
) -> Tensor:
    members = Members(dtype, optimizer)
    feedbacks = [ErrorFeedback(method.wire_format, method.decay) for _ in range(WORKERS)]
    weights, buffer = nn.utils.parameters_to_vector(members.model.parameters()).detach(), None
    for number in range(ROUNDS):
        members.inner(number)
        after = [nn.utils.parameters_to_vector(replica.parameters()) for replica in members.replicas]
        arrived = []
        for feedback, ended in zip(feedbacks, after, strict=True):
            way = pseudo_gradient(weights, ended)
            arrived.append(method.wire_format.decode(feedback.encode("weights", way), way.numel(), way.dtype))
            feedback.commit()
        weights, buffer = method.step(weights, torch.stack(arrived).mean(0), buffer)
        nn.utils.vector_to_parameters(weights, members.model.parameters())
    return weights


def local_sgd(model: nn.Module, deltas: list[list[Tensor]]) -> None:
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.stack([parameter - delta[index] for delta in deltas]).mean(0))


class DiLoCo:
    """The outer optimizer is torch's own."""

    optimizer: torch.optim.SGD | None = None

    def __call__(self, model: nn.Module, deltas: list[list[Tensor]]) -> None:
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = torch.stack([delta[index] for delta in deltas]).mean(0)
        self.optimizer.step()


class SparseLoCo:
    """Chunk by chunk and element by element."""

    def __init__(self, count: int, chunk: int, bits: int, decay: float) -> None:
        self.count, self.chunk, self.bits, self.decay = count, chunk, bits, decay
        self.memory: list[Tensor] = []

    def __call__(self, model: nn.Module, deltas: list[list[Tensor]]) -> None:
        flats = [torch.cat([part.reshape(-1) for part in delta]) for delta in deltas]
        self.memory = self.memory or [torch.zeros_like(flat) for flat in flats]
        total = torch.zeros_like(flats[0])
        for worker, flat in enumerate(flats):
            memory = self.decay * self.memory[worker] + flat
            sent = self.compressed(memory)
            self.memory[worker] = memory - sent
            total += sent / len(flats)
        at = 0
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= total[at : at + parameter.numel()].view_as(parameter)
                at += parameter.numel()

    def compressed(self, memory: Tensor) -> Tensor:
        out = torch.zeros_like(memory)
        for begin in range(0, len(memory), self.chunk):
            chunk = memory[begin : begin + self.chunk].tolist()
            count = -(-self.count * len(chunk) // self.chunk)
            chosen = sorted(sorted(range(len(chunk)), key=lambda place: -abs(chunk[place]))[:count])  # noqa: B023
            values = [chunk[place] for place in chosen]
            sent = {1: one_bit, 2: two_bits}.get(self.bits, list)(values)
            for place, value in zip(chosen, sent, strict=True):
                out[begin + place] = value
        return out


def one_bit(values: list[float]) -> list[float]:
    """Sign, and the mean magnitude of what is not zero."""
    sizes = [abs(value) for value in values]
    units = [round(size / max(sizes) * 2**20) for size in sizes]
    level = up_to_bfloat16(sum(units) // sum(size > 0 for size in sizes) / 2**20 * max(sizes))
    return [math.copysign(level, value) if value else 0.0 for value in values]


def two_bits(values: list[float]) -> list[float]:
    """Sign, and the mean of the smaller or of the larger magnitudes."""
    sizes = [abs(value) for value in values]
    units = [round(size / max(sizes) * 2**20) for size in sizes]
    small = [unit for unit in units if unit * len(units) <= sum(units)]
    large = [unit for unit in units if unit * len(units) > sum(units)] or small
    low, high = (up_to_bfloat16(sum(part) // len(part) / 2**20 * max(sizes)) for part in (small, large))
    nearest = [high if abs(size - high) < abs(size - low) else low for size in sizes]
    return [size if value > 0 else -size for size, value in zip(nearest, values, strict=True)]


def up_to_bfloat16(size: float) -> float:
    (bits,) = struct.unpack("<I", struct.pack("<f", size))
    (single,) = struct.unpack("<f", struct.pack("<I", bits))
    bits += single < size
    (up,) = struct.unpack("<f", struct.pack("<I", (bits + 0xFFFF) >> 16 << 16))
    return float(up)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-6)])
@pytest.mark.parametrize(
    "method, outer",
    [
        (OUTER_METHODS["average"], lambda: local_sgd),
        (OUTER_METHODS["nesterov"], DiLoCo),
        (replace(OUTER_METHODS["sparse"], wire_format=TopK(3, 20, 32)), lambda: SparseLoCo(3, 20, 32, 0.95)),
        (replace(OUTER_METHODS["sparse"], wire_format=TopK(5, 20, 2)), lambda: SparseLoCo(5, 20, 2, 0.95)),
        (replace(OUTER_METHODS["sparse"], wire_format=TopK(5, 20, 1)), lambda: SparseLoCo(5, 20, 1, 0.95)),
    ],
    ids=["local SGD", "DiLoCo", "SparseLoCo", "SparseLoCo at 2 bits", "SparseLoCo at 1 bit"],
)
def test_ours_equals_the_plain_loop(
    method: OuterMethod, outer: Callable[[], Outer], dtype: torch.dtype, tolerance: float
) -> None:
    assert (ours(dtype, method) - plain(dtype, outer())).abs().max() <= tolerance


def test_density_one_at_32_bits_and_nesterov_without_momentum_are_the_average() -> None:
    expected = ours(torch.float64, OUTER_METHODS["average"])
    dense = replace(OUTER_METHODS["sparse"], wire_format=TopK(16, 16, 32))
    assert torch.equal(ours(torch.float64, dense), expected)
    still = replace(OUTER_METHODS["nesterov"], learning_rate=1.0, momentum=0.0)
    assert torch.equal(ours(torch.float64, still), expected)


def test_one_member_goes_on_as_if_alone() -> None:
    before, after = torch.randn(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    weights, buffer = OUTER_METHODS["average"].step(before, pseudo_gradient(before, after))
    assert (weights - after).abs().max() < 1e-15 and buffer is None


def test_one_step_of_sgd_a_round_is_step_sync() -> None:
    """By samples: members of 3 and 5 rows move as one batch of 8."""
    weights, rows, targets = torch.randn(6, dtype=torch.float64), torch.randn(8, 6).double(), torch.randn(8).double()

    def gradient(some: slice) -> Tensor:
        return 2 * rows[some].T @ (rows[some] @ weights - targets[some]) / len(rows[some])

    moved = [len(rows[some]) / 8 * 0.1 * gradient(some) for some in (slice(3), slice(3, 8))]
    stepped, _ = OUTER_METHODS["average"].step(weights, moved[0] + moved[1])
    assert (stepped - (weights - 0.1 * gradient(slice(8)))).abs().max() < 1e-14


def test_half_weights_stay_half_and_their_difference_is_taken_in_float32() -> None:
    before = torch.ones(4, dtype=torch.bfloat16)
    delta = pseudo_gradient(before, before * 1.5)
    assert delta.dtype == torch.float32
    assert OUTER_METHODS["average"].step(before, delta)[0].tolist() == [1.5] * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_are_mixed_as_they_are_weighed_or_keep_the_steps_since(dtype: torch.dtype) -> None:
    own, sent, common = (torch.tensor(values).to(dtype) for values in ([1.0, -2.0], [0.5, -1.0], [3.0, 6.0]))
    assert torch.equal(mixed(own, sent, common, 0.0), common)
    assert torch.equal(mixed(own, sent, common, 0.25), torch.tensor([2.5, 4.0]).to(dtype))
    assert torch.equal(mixed(own, sent, common), torch.tensor([3.5, 5.0]).to(dtype))
    assert mixed(own, sent, common).dtype == mixed(own, sent, common, 0.5).dtype == dtype and own[0] == 1
