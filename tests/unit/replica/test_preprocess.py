"""preprocess and augment on the worker: order, randomness, and what is refused."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import Factory
from guava_nb.replica.preprocess import Preprocessing
from guava_nb.replica.shard import ShardWork
from tests.support.star import CPU, replica, resolver, spec


class Mean(nn.Module):
    """Its loss is the mean of what it was given, so a test sees what a function drew."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x.mean()


def mean_step(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"])


def noise(batch: Any) -> Any:
    return {"x": batch["x"] + torch.rand(batch["x"].shape)}


def double(batch: Any) -> Any:
    return {"x": batch["x"] * 2}


class Scale:
    """A class whose object is the function."""

    def __call__(self, batch: Any) -> Any:
        return {"x": batch["x"] * 10}


def losses(augment: str | None, preprocess: str | None, *places: tuple[int, int], seed: int = 0) -> list[float]:
    run = spec(
        criterion=None, step=Factory("step"), seed=seed,
        augment=augment and Factory(augment), preprocess=preprocess and Factory(preprocess),
    )  # fmt: skip
    made = replica(Mean, run, step=mean_step, noise=noise, double=double, Scale=Scale)
    out = []
    for step, shard in places:
        work = ShardWork(step, shard, [{"x": torch.zeros(4, 3)}], 4, 4)
        out.append(made.run_shard(work, lambda *_: None).loss_sum / 4)
        made.restore()
    return out


def test_random_numbers_differ_between_workers_and_steps_and_repeat_from_the_seed() -> None:
    places = [(step, shard) for step in range(3) for shard in range(3)]
    drawn = losses("noise", None, *places)
    assert len(set(drawn)) == len(places)
    assert losses("noise", None, *reversed(places)) == drawn[::-1]  # whoever computes it, and whenever
    assert losses("noise", None, *places) == drawn
    assert not set(losses("noise", None, *places, seed=1)) & set(drawn)


def test_augment_comes_first_and_only_in_training() -> None:
    (plain,), (treated,) = losses("noise", None, (0, 0)), losses("noise", "double", (0, 0))
    assert treated == pytest.approx(2 * plain)
    run = spec(criterion=None, step=Factory("step"), augment=Factory("noise"), preprocess=Factory("Scale"))
    made = replica(Mean, run, step=mean_step, noise=noise, Scale=Scale)
    assert made.evaluate({"x": torch.ones(4, 3)}).loss_sum / 4 == pytest.approx(10.0)


def treat(function: Any, batch: Any, **changes: Any) -> Any:
    return Preprocessing(spec(preprocess=Factory("f"), **changes), resolver(f=function), CPU).for_evaluation(batch)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda batch: None, "preprocess 'f' returned None instead of a batch"),
        (lambda batch: (batch[0][:2], batch[1]), "was given 3 samples and returned 2 samples"),
        (lambda batch: "no tensor", "returned nothing that can be counted"),
        (lambda batch: batch[0].sum(), "returned nothing that can be counted"),
    ],
)
def test_nonsense_is_named(function: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        treat(function, (torch.ones(3, 2), torch.ones(3)))


def test_what_is_no_function_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="cannot be called"):
        Preprocessing(spec(preprocess=Factory("f")), resolver(f=3), CPU)
    with pytest.raises(ConfigError, match="cannot be found"):
        Preprocessing(spec(augment=Factory("missing")), resolver(), CPU)


def test_structure_and_dtype_stay_unless_the_run_is_in_float64() -> None:
    batch = OrderedDict(image=torch.ones(2, 3, dtype=torch.uint8), text=["a", "b"])
    same = treat(lambda b: b, batch)
    assert same["image"].dtype == torch.uint8 and same["text"] == ["a", "b"]
    assert treat(lambda b: b["image"].float(), batch, precision="fp64").dtype == torch.float64


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (lambda batch: batch["x"].numel(), 12),
        (lambda batch: (batch["x"] != 0).sum(), 12),  # a tensor, which is read when the loss is
        (lambda batch: 2.5, 2.5),
        (lambda batch: np.int64(6), 12),
        (lambda batch: np.float32(6), 12),
        (lambda batch: np.array([6]), 12),
    ],
)
def test_tokens_are_counted_on_the_batch_as_the_model_gets_it(count: Any, expected: float) -> None:
    run = spec(criterion=None, step=Factory("step"), tokens=Factory("count"), preprocess=Factory("ones"))
    made = replica(Mean, run, step=mean_step, count=count, ones=lambda batch: {"x": torch.ones_like(batch["x"])})
    parts = [{"x": torch.zeros(2, 3)}, {"x": torch.zeros(2, 3)}]
    result = made.run_shard(ShardWork(0, 0, parts, 4, 4), lambda *_: None)
    assert result.tokens == (expected if expected != 2.5 else 5.0)
    assert spec().tokens is None and not spec().wants_whole_batches and run.wants_whole_batches


@pytest.mark.parametrize(
    "bad",
    [
        None, "7", [7], torch.ones(2), -1, float("nan"), torch.tensor(-3), 10**400, 1j, torch.tensor(1j), np.complex64(1),
        np.ones(2), np.array(["7"]), torch.ones(1, device="meta"),
    ],
)  # fmt: skip
def test_what_is_no_number_of_tokens_is_refused_by_name(bad: Any) -> None:
    run = spec(criterion=None, step=Factory("step"), tokens=Factory("count"))
    made = replica(Mean, run, step=mean_step, count=lambda batch: bad)
    with pytest.raises(ConfigError, match="tokens 'count' returned"):
        made.run_shard(ShardWork(0, 0, [{"x": torch.zeros(4, 3)}], 4, 4), lambda *_: None)


def test_without_a_count_a_shard_has_no_tokens() -> None:
    made = replica(Mean, spec(criterion=None, step=Factory("step")), step=mean_step)
    assert made.run_shard(ShardWork(0, 0, [{"x": torch.zeros(4, 3)}], 4, 4), lambda *_: None).tokens is None
