"""Rounds of local steps equal the loops that one would write by hand: everything above the link, without a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from guava_nb.cluster.cluster import Cluster
from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import Factory, RoundSpec
from tests.parity.test_star import train
from tests.support.direct import make_cluster
from tests.support.training import by_hand, difference, loader, losses_of, plain, replica, spec

AVERAGE = RoundSpec("average", 1.0, 0.0)
NESTEROV = RoundSpec("nesterov", 0.7, 0.9)
SPARSE, PARTIAL = RoundSpec("sparse", 1.0, 0.0), RoundSpec("partial", 1.0, 0.0)
SGD = Factory("SGD", {"lr": 0.1})
#: Formats and methods of which complex parameters travel exactly, so that they are averaged.
EXACT = [
    {"wire": "int8"},
    {"wire": "int4"},
    {"wire": "bf16"},
    {"wire": "fp16"},
    {"rounds": SPARSE},
    {"rounds": PARTIAL},
]
STEP_LR = Factory("StepLR", {"step_size": 3, "gamma": 0.5})


class Turn(torch.nn.Module):
    """Complex parameters, or the same numbers as pairs of real ones; buffers of short types, two of which move."""

    def __init__(self, pairs: bool, dtype: str = "complex64") -> None:
        super().__init__()
        turn = torch.randn(10, 4, 2)
        self.pairs = pairs
        self.turn = torch.nn.Parameter(turn if pairs else torch.view_as_complex(turn).to(getattr(torch, dtype)))
        self.shift = torch.nn.Parameter(torch.zeros(2) if pairs else torch.zeros((), dtype=torch.complex64))
        self.none = torch.nn.Parameter(torch.zeros(0, 2) if pairs else torch.zeros(0, dtype=torch.complex64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("count", torch.zeros(2, dtype=torch.uint8))
        self.register_buffer("scale", torch.ones(2).to(torch.float8_e5m2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turn, shift = (
            (torch.view_as_complex(self.turn), torch.view_as_complex(self.shift))
            if self.pairs
            else (self.turn, self.shift)
        )
        wide = torch.promote_types(x.dtype, torch.complex64)
        if self.training:
            self.count += 1
            self.scale.copy_(torch.full((2,), 0.5))
        return (x.to(wide) @ turn.to(wide) + shift).abs()


class Narrow(torch.nn.Module):
    """A parameter of one byte an element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(10, 4).to(torch.float8_e4m3fn))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.to(x.dtype)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    yield made
    made.close()


def steps_of(run: Any) -> list[int]:
    return [record["step"] for record in run.history]


@pytest.mark.parametrize("every", [1, 3, 50])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_lone_worker_equals_plain_training(cluster: Cluster, every: int, accumulate: int) -> None:
    run_spec = spec(
        model=Factory("tests.support.training:SmallNet", {"norm": True}), scheduler=STEP_LR, max_grad_norm=0.3,
        rounds=RoundSpec("average", 1.0, 0.0, accumulate),
    )  # fmt: skip
    _, run = train(cluster, 1, run_spec, loader(101, 16), sync_every=every, accumulation_steps=accumulate)
    model, losses = plain(run_spec, loader(101, 16), accumulate=accumulate)
    assert difference(run.model(), model) <= 1e-9
    assert steps_of(run)[-1] == len(losses) == run.status().step == run.status().total_steps
    assert sum(record["samples"] for record in run.history) == 202


def test_dropout_of_a_lone_worker_is_that_of_step_sync(cluster: Cluster) -> None:
    model = Factory("tests.support.training:SmallNet", {"dropout": 0.5})
    _, one = train(cluster, 1, spec(model=model), loader(101, 16))
    other = make_cluster()
    _, two = train(other, 1, spec(model=model, rounds=AVERAGE), loader(101, 16), sync_every=4)
    assert difference(one.model(), two.model()) <= 1e-9
    other.close()


@pytest.mark.parametrize("workers", [2, 3])
def test_rounds_of_one_step_of_sgd_equal_step_sync(cluster: Cluster, workers: int) -> None:
    run_spec = spec(optimizer=SGD, rounds=AVERAGE)
    _, run = train(cluster, workers, run_spec, loader(), sync_every=1)
    model, losses = plain(run_spec, loader())
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9


@pytest.mark.parametrize("rounds", [AVERAGE, NESTEROV])
@pytest.mark.parametrize(
    ("workers", "every", "shares", "batch"), [(2, 3, None, 16), (3, 2, None, 16), (2, 4, (3, 1), 16), (3, 5, None, 2)]
)
def test_local_steps_equal_loops_by_hand(
    cluster: Cluster, rounds: RoundSpec, workers: int, every: int, shares: Sequence[float] | None, batch: int
) -> None:
    run_spec = spec(rounds=rounds, scheduler=STEP_LR, max_grad_norm=0.5)
    rows = 101 if batch > 2 else 21  # of batches of 2 the third worker gets nothing
    _, run = train(cluster, workers, run_spec, loader(rows, batch), sync_every=every, shares=shares)
    model, losses = by_hand(run_spec, loader(rows, batch), workers, every, shares=shares)
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9


@pytest.mark.parametrize(
    ("workers", "changes"),
    [
        *((workers, {}) for workers in (1, 2, 3)),
        *((2, one) for one in EXACT),
        (2, {"rounds": NESTEROV}),
        (3, {"rounds": RoundSpec("average", 1.0, 0.0, sync_delay=1)}),
        (2, {"rounds": RoundSpec("average", 1.0, 0.0, sync_delay=1, mixing=0.5)}),
    ],
)
def test_complex_parameters_equal_pairs_of_real_ones(workers: int, changes: dict[str, Any]) -> None:
    found = []
    for pairs, own in ((False, changes), (True, {} if changes in EXACT else changes)):
        cluster = make_cluster()
        run_spec = spec(**{"model": Factory(f"{__name__}:Turn", {"pairs": pairs}), "rounds": AVERAGE, **own})
        _, run = train(cluster, workers, run_spec, loader(48, 16), sync_every=2)
        found.append((run.model(), losses_of(run)))
        cluster.close()
    (model, losses), (twin, expected) = found
    assert losses == pytest.approx(expected, abs=1e-12)
    assert float((torch.view_as_real(model.turn) - twin.turn).detach().abs().max()) <= 1e-9
    assert model.turn.imag.any() and model.count.tolist() == [6, 6] and model.scale.float().tolist() == [0.5, 0.5]


@pytest.mark.parametrize("rounds", [None, AVERAGE])
def test_short_complex_numbers_travel_as_longer_ones(cluster: Cluster, rounds: RoundSpec | None) -> None:
    model = Factory(f"{__name__}:Turn", {"pairs": False, "dtype": "complex32"})
    run_spec = spec(model=model, rounds=rounds, precision="fp32", optimizer=SGD)
    _, run = train(cluster, 2, run_spec, loader(48, 16, torch.float32), **({"sync_every": 1} if rounds else {}))
    _, losses = plain(run_spec, loader(48, 16, torch.float32))
    assert losses_of(run) == pytest.approx(losses, abs=1e-3)  # the weights are rounded to 11 bits


@pytest.mark.parametrize("rounds", [None, AVERAGE])
def test_parameters_that_torch_cannot_train_are_refused_before_the_run(rounds: RoundSpec | None) -> None:
    with pytest.raises(ConfigError, match=r"'weight' is float8_e4m3fn, .* or freeze it"):
        replica(spec(model=Factory(f"{__name__}:Narrow"), precision="fp32", rounds=rounds))


@pytest.mark.parametrize(
    ("workers", "rounds", "wire"),
    [
        (1, AVERAGE, "int8"),
        (2, NESTEROV, "bf16"),
        (2, NESTEROV, "int4"),
        (3, AVERAGE, "int8"),
        (3, AVERAGE, "fp16"),
    ],
)
def test_quantised_rounds_equal_loops_by_hand(cluster: Cluster, rounds: RoundSpec, workers: int, wire: str) -> None:
    run_spec = spec(rounds=rounds, wire=wire, hash_every_steps=1, bucket_bytes=1 << 20)
    _, run = train(cluster, workers, run_spec, loader(101, 16), sync_every=3)
    model, losses = by_hand(run_spec, loader(101, 16), workers, 3)
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9
    exact, _ = by_hand(replace(run_spec, wire="fp32"), loader(101, 16), workers, 3)
    assert (difference(run.model(), exact) > 1e-9) == (workers > 1)


@pytest.mark.parametrize(
    ("workers", "args"),
    [(2, {}), (3, {}), (2, {"density": 0.3, "bits": 32}), (3, {"density": 0.1, "bits": 32, "decay": 1.0})],
)
def test_sparse_rounds_equal_loops_by_hand(cluster: Cluster, workers: int, args: dict[str, Any]) -> None:
    run_spec = spec(rounds=RoundSpec("sparse", 1.0, 0.0, **args), hash_every_steps=1, bucket_bytes=1 << 20)
    _, run = train(cluster, workers, run_spec, loader(101, 16), sync_every=2)
    model, losses = by_hand(run_spec, loader(101, 16), workers, 2)
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9


@pytest.mark.parametrize(
    ("workers", "density", "bits", "step"),
    [
        (1, 0.1, 2, 1.0), (2, 1 / 64, 2, 1.4), (3, 0.3, 2, 1.0), (3, 0.1, 32, 1.4), (2, 1.0, 2, 1.0), (2, 0.1, 1, 1.4),
        (3, 0.7, 32, 1.0),  # their mean is shorter than the messages of two others
    ],
)  # fmt: skip
def test_partial_rounds_equal_loops_by_hand(
    cluster: Cluster, workers: int, density: float, bits: int, step: float
) -> None:
    rounds = RoundSpec("partial", step, 0.0, density=density, bits=bits)
    run_spec = spec(rounds=rounds, hash_every_steps=1, bucket_bytes=1 << 20)
    _, run = train(cluster, workers, run_spec, loader(101, 16), sync_every=2)
    model, losses = by_hand(run_spec, loader(101, 16), workers, 2)
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9


def test_partial_rounds_of_one_worker_equal_plain_training(cluster: Cluster) -> None:
    _, run = train(cluster, 1, spec(rounds=RoundSpec("partial", 1.4, 0.0)), loader(101, 16), sync_every=3)
    model, _ = by_hand(spec(rounds=AVERAGE), loader(101, 16), 1, 1)
    assert difference(run.model(), model) <= 1e-9


@pytest.mark.parametrize("outer", ["sparse", "partial"])
@pytest.mark.parametrize("workers", [1, 3])
def test_sparse_rounds_of_all_elements_at_32_bits_are_the_average(cluster: Cluster, workers: int, outer: str) -> None:
    whole = RoundSpec(outer, 1.0, 0.0, density=1.0, bits=32)
    _, run = train(cluster, workers, spec(rounds=whole), loader(101, 16), sync_every=3)
    model, losses = by_hand(spec(rounds=AVERAGE), loader(101, 16), workers, 3)
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9


@pytest.mark.parametrize("outer", [AVERAGE, NESTEROV])
@pytest.mark.parametrize(
    ("workers", "every", "delay", "mixing", "shares", "batch"),
    [
        (1, 3, 2, None, None, 16),
        (1, 3, 2, 0.5, None, 16),
        (2, 3, 1, None, None, 16),
        (2, 3, 2, 0.5, None, 16),
        (2, 3, 2, 0.0, None, 16),  # the last round of an epoch has one step
        (3, 4, 2, 0.7, None, 16),
        (3, 4, 3, None, None, 16),
        (2, 2, 1, None, (3, 1), 16),
        (3, 5, 3, None, None, 2),  # the third worker gets nothing
    ],
)
def test_delayed_rounds_equal_delayed_averaging_and_streaming_diloco_by_hand(
    cluster: Cluster,
    outer: RoundSpec,
    workers: int,
    every: int,
    delay: int,
    mixing: float | None,
    shares: Any,
    batch: int,
) -> None:
    rounds = replace(outer, sync_delay=delay, mixing=mixing)
    run_spec = spec(rounds=rounds, scheduler=STEP_LR, max_grad_norm=0.5, hash_every_steps=1)
    rows = 101 if batch > 2 else 21
    _, run = train(cluster, workers, run_spec, loader(rows, batch), sync_every=every, shares=shares)
    model, losses = by_hand(run_spec, loader(rows, batch), workers, every, shares=shares)
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9
    at_once, _ = by_hand(replace(run_spec, rounds=outer), loader(rows, batch), workers, every, shares=shares)
    assert (difference(run.model(), at_once) > 1e-9) == (workers > 1)


@pytest.mark.parametrize(
    ("workers", "outer", "wire"),
    [
        (2, NESTEROV, "int8"),
        (3, AVERAGE, "bf16"),
        (2, SPARSE, "fp32"),
        (3, SPARSE, "fp32"),
        (2, PARTIAL, "fp32"),
        (3, PARTIAL, "fp32"),
    ],
)
def test_delayed_rounds_of_short_messages_equal_loops_by_hand(
    cluster: Cluster, workers: int, outer: RoundSpec, wire: str
) -> None:
    rounds = replace(outer, sync_delay=2)
    run_spec = spec(rounds=rounds, wire=wire, hash_every_steps=1, bucket_bytes=1 << 20)
    _, run = train(cluster, workers, run_spec, loader(101, 16), sync_every=3)
    model, losses = by_hand(run_spec, loader(101, 16), workers, 3)
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9


def test_a_round_sends_the_gradient_bytes_of_one_step(cluster: Cluster) -> None:
    """Seven steps an epoch by step sync against one round: a seventh up and down, whatever else travels."""
    _, one = train(cluster, 2, spec(), loader(101, 16))
    other = make_cluster()
    _, two = train(other, 2, spec(rounds=NESTEROV), loader(101, 16), sync_every=7)
    assert len(one.history) == 14 and len(two.history) == 2
    assert (two.status().step, two.status().rounds, one.status().rounds) == (14, 2, 0)
    assert (two.report()["sync"], two.report()["steps"]) == ("local", 14)
    assert two.wire.gradient_bytes * 7 == one.wire.gradient_bytes > 0
    other.close()
