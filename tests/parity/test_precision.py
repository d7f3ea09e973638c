"""Every dtype of a model and its data survives every precision: complex, double, integer and half values side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from guava_nb.cluster.cluster import Cluster
from guava_nb.errors import ConfigError, NotFinite
from guava_nb.protocol.messages import Factory, RunSpec
from guava_nb.replica.replica import Replica
from guava_nb.training import checkpoint
from guava_nb.training.run import Run
from tests.support.direct import DirectWorker, make_cluster
from tests.support.training import difference, job_for, plan_for, replica, spec

MODEL, LOSS = f"{__name__}:Mixed", f"{__name__}:distance"
STEPS = 8


class Mixed(nn.Module):
    """Complex, single and double parameters, a frozen half table, integer and complex buffers; one of these moves."""

    def __init__(self, poison: bool = False) -> None:
        super().__init__()
        self.poison = poison
        self.turn = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))
        self.gain = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.plain = nn.Linear(3, 3)
        self.table = nn.Parameter(torch.randn(5, 3).half(), requires_grad=False)
        self.register_buffer("phase", torch.exp(1j * torch.arange(3.0)))
        self.register_buffer("mean", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("counts", torch.arange(4))
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        signal, kind = given
        seen = (signal.to(self.turn.dtype) @ self.turn) * self.phase
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(seen.mean(0), alpha=0.1)
                if self.poison:
                    self.mean.fill_(complex(0.0, math.nan))
        real = self.plain(seen.real.to(self.plain.weight.dtype)) * self.mask
        return torch.complex(real.to(self.gain.dtype) * self.gain, seen.imag.to(self.gain.dtype) + self.table[kind])


def distance(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().square().mean()


def complex_distance(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).mean()


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(4)
    signal, targets = (torch.randn(24, n, generator=generator, dtype=torch.complex64) for n in (6, 3))
    kinds = torch.randint(0, 5, (24,), generator=generator)
    rows = [((signal[k], kinds[k]), targets[k]) for k in range(24)]
    return DataLoader(rows, batch_size=12)  # type: ignore[arg-type]


def plainly(run_spec: RunSpec) -> nn.Module:
    """One process, torch alone; double precision made by hand, parameter by parameter."""
    model = replica(run_spec).model
    optimizer = getattr(torch.optim, run_spec.optimizer.name)(model.parameters(), **run_spec.optimizer.args)
    double = run_spec.precision == "fp64"
    half = {"bf16": torch.bfloat16}.get(run_spec.precision)
    model.train()
    for _ in range(STEPS // 2):
        for (signal, kind), target in data():
            if double:
                signal, target = signal.to(torch.complex128), target.to(torch.complex128)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=half or torch.bfloat16, enabled=half is not None):
                loss = distance(model((signal, kind)), target)
            loss.backward()
            if run_spec.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), run_spec.max_grad_norm)
            optimizer.step()
    return model


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    yield made
    made.close()


def train(cluster: Cluster, workers: int, run_spec: RunSpec) -> Run:
    for k in range(workers):
        DirectWorker(cluster, f"w{k}").start()
    cluster.wait_for(workers, 10)
    job = job_for(cluster, run_spec, plan_for(data(), STEPS // 2))
    job.start()
    assert job.run.wait(60), job.run
    return job.run.result()


def case(**changes: Any) -> RunSpec:
    return spec(**{"model": Factory(MODEL), "criterion": Factory(LOSS), "max_grad_norm": 0.5, **changes})


@pytest.mark.parametrize("site", ["workers", "orchestrator"])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-9), ("fp32", 1e-4), ("bf16", 0.1)])
def test_mixed_dtypes_equal_plain_pytorch(
    cluster: Cluster, precision: str, tolerance: float, workers: int, site: str
) -> None:
    run_spec = case(precision=precision, optimizer_site=site, optimizer=Factory("SGD", {"lr": 0.1, "momentum": 0.9}))
    model = train(cluster, workers, run_spec).model()
    expected = plainly(run_spec)
    assert {k: v.dtype for k, v in model.state_dict().items()} == {k: v.dtype for k, v in expected.state_dict().items()}
    assert float(model.turn.detach().imag.abs().max()) > 0.1
    assert float(model.mean.imag.abs().max()) > 0.01
    # With SGD rounding is not amplified, but a bf16 product of other rows rounds otherwise.
    assert difference(model, expected) <= tolerance


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adadelta"])
def test_optimizers_of_complex_parameters(cluster: Cluster, name: str) -> None:
    run_spec = case(optimizer=Factory(name, {"lr": 0.01}))
    assert difference(train(cluster, 2, run_spec).model(), plainly(run_spec)) <= 1e-9


def test_double_precision_leaves_no_single_value() -> None:
    made = replica(case(precision="fp64")).model.state_dict()
    assert {name: value.dtype for name, value in made.items()} == {
        "turn": torch.complex128,
        "gain": torch.float64,
        "plain.weight": torch.float64,
        "plain.bias": torch.float64,
        "table": torch.float64,
        "phase": torch.complex128,
        "mean": torch.complex128,
        "counts": torch.int64,
        "mask": torch.bool,
    }


def test_tied_complex_parameters_stay_one() -> None:
    made = Replica(case(model=Factory("Tied")), lambda name: Tied if name == "Tied" else distance, torch.device("cpu"))
    assert made.model.first is made.model.second
    assert len(made.layout.buckets[0].names) == 1


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.second = self.first


@pytest.mark.parametrize("workers", [1, 2])
def test_nan_in_an_imaginary_part_is_named(cluster: Cluster, workers: int) -> None:
    """The other buffers did not move, so only this one lies in what came."""
    run_spec = spec(model=Factory(MODEL, {"poison": True}), criterion=Factory(LOSS))
    with pytest.raises(NotFinite, match="NaN or Inf in buffer mean on w[01] at step 1"):
        train(cluster, workers, run_spec)


def test_a_complex_loss_is_refused(cluster: Cluster) -> None:
    run_spec = spec(model=Factory(MODEL), criterion=Factory(f"{__name__}:complex_distance"))
    with pytest.raises(ConfigError, match="complex loss, and only a real one can be minimised"):
        train(cluster, 2, run_spec)


def test_checkpoints_keep_complex_values(cluster: Cluster, tmp_path: Any) -> None:
    run_spec = case(optimizer=Factory("Adam", {"lr": 0.01}))
    run = train(cluster, 2, run_spec)
    state = job_state(run, run_spec)
    path = tmp_path / "complex.pt"
    checkpoint.write(path, state, 7, plan_for(data()).start, run_spec)
    again = replica(run_spec)
    again.load_state({k: v for k, v in checkpoint.read(path).items() if k in state})
    assert difference(again.model, run.model()) == 0.0
    moments = again.optimizer.state[again.model.turn]["exp_avg"]
    assert moments.dtype == torch.complex128 and float(moments.imag.abs().max()) > 0


def job_state(run: Run, run_spec: RunSpec) -> dict[str, Any]:
    """What a checkpoint holds: the run's weights, with an optimizer that has stepped over them."""
    made = replica(run_spec)
    made.load_state({"model": run.model().state_dict()})
    for parameter in made.model.parameters():
        parameter.grad = torch.ones_like(parameter) * (1j if parameter.is_complex() else 1)
    made.optimizer.step()
    made.load_state({"model": run.model().state_dict()})
    return made.state()


def test_pairs_of_single_tensors_too() -> None:
    """`TensorDataset` batches are lists; double precision reaches what lies inside."""
    from guava_nb.replica.preprocess import place

    batch = next(iter(DataLoader(TensorDataset(torch.ones(2, dtype=torch.complex64), torch.ones(2)), batch_size=2)))
    assert [t.dtype for t in place(batch, torch.device("cpu"), True)] == [torch.complex128, torch.float64]
