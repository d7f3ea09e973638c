"""Batches of any form over several workers equal plain PyTorch on whole batches, or are refused before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from guava_nb.cluster.cluster import Cluster
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import CacheSpec, Factory, RunSpec
from guava_nb.training.job import TrainingJob
from guava_nb.training.plan import TrainingPlan
from tests.support import reading_programs as programs
from tests.support.direct import DirectWorker, make_cluster
from tests.support.training import difference, job_for, losses_of, replica, spec

HERE = programs.__name__


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    yield made
    made.close()


def run_spec(model: str, step: str | None, **changes: Any) -> RunSpec:
    how = {"criterion": None, "step": Factory(f"{HERE}:{step}")} if step else {}
    return spec(model=Factory(f"{HERE}:{model}"), optimizer=Factory("SGD", {"lr": 0.1}), **how, **changes)


def boxes(collate: Any, batch_size: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(9)
    return DataLoader(programs.Boxes(), batch_size, shuffle=True, collate_fn=collate, generator=generator)


def frames(collate: Any, batch_size: int = 8, longest: int = 6) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(9)
    return DataLoader(
        programs.Frames(longest=longest), batch_size, shuffle=True, collate_fn=collate, generator=generator
    )


def train(
    cluster: Cluster, workers: int, record: RunSpec, data: Any, batch: str | None = None, **changes: Any
) -> TrainingJob:
    started = [DirectWorker(cluster, f"w{k}").start() for k in range(workers)]
    cluster.wait_for(workers, 10)
    job = job_for(cluster, record, TrainingPlan(LoaderFeed(data, batch=batch), None, 2, batch=batch, **changes))
    job.start()
    assert job.run.wait(60), job.run
    assert [w.error for w in started] == [None] * workers
    return job


def plain(record: RunSpec, data: Any, accumulate: int = 1) -> tuple[torch.nn.Module, list[float]]:
    """One process, whole batches; the mean of accumulated batches is weighted by their samples."""
    model = replica(record).model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []

    def loss_of(batch: Any) -> torch.Tensor:
        if record.step is None:
            return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        return getattr(programs, record.step.name.rpartition(":")[2])(model, batch)

    for _ in range(2):
        batches = list(data)
        for at in range(0, len(batches), accumulate):
            group = batches[at : at + accumulate]
            counts = [len(batch["y"]) if accumulate > 1 else 1 for batch in group]
            optimizer.zero_grad()
            total = sum(loss_of(batch) * count for batch, count in zip(group, counts, strict=True)) / sum(counts)
            total.backward()
            optimizer.step()
            losses.append(total.item())
    return model, losses


PROGRAMS: dict[str, tuple[str, str | None, Any, dict[str, Any]]] = {
    "a list of targets": ("Finder", "lists_step", lambda: boxes(programs.as_lists), {}),
    "a list of two targets": ("Finder", "lists_step", lambda: boxes(programs.as_lists, 2), {}),
    "joined boxes with split_fn": (
        "Finder", "joined_step", lambda: boxes(programs.joined), {"split_fn": programs.split_joined},
    ),
    "joined boxes on one worker": ("Finder", "joined_step", lambda: boxes(programs.joined), {"shares": [0, 1]}),
    "padded, with lengths": ("BatchFirst", None, lambda: frames(programs.padded), {}),
    "time first, found by itself": ("Reader", None, lambda: frames(programs.time_first), {}),
    "time first, as long as the batch": ("Reader", None, lambda: frames(programs.time_first, 6), {}),
    "time first, from a list": (
        "Reader", None, lambda: list(frames(programs.time_first)), {"batch": "cut on axis 1: inputs; cut: targets"},
    ),
    "hidden states": ("Reader", "states_step", lambda: frames(programs.with_states), {}),
    "namedtuple": ("linear", "attribute_step", lambda: frames(programs.as_named), {}),
    "dataclass": ("linear", "attribute_step", lambda: frames(programs.as_fields), {}),
    "BatchEncoding": ("linear", "key_step", lambda: frames(programs.as_encoding), {}),
    "constant anchors": ("linear", "anchors_step", lambda: frames(programs.with_anchors), {}),
    "anchors, accumulated": (
        "linear", "anchors_step", lambda: frames(programs.with_anchors), {"accumulation_steps": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_batch_of_any_form_equals_plain_pytorch(cluster: Cluster, name: str, workers: int) -> None:
    model, step, data, changes = PROGRAMS[name]
    record = run_spec(model, step)
    run = train(cluster, workers, record, data(), **changes).run.result()
    expected, losses = plain(record, data(), changes.get("accumulation_steps", 1))
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), expected) <= 1e-9
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)
    assert sum(record["samples"] for record in run.history) == 60


@pytest.mark.parametrize(
    "name", ["a list of targets", "constant anchors", "time first, found by itself", "BatchEncoding"]
)
def test_with_a_cache_of_rows(cluster: Cluster, name: str) -> None:
    model, step, data, _ = PROGRAMS[name]
    record = run_spec(model, step, cache=CacheSpec("memory", 1 << 20))
    run = train(cluster, 2, record, data()).run.result()
    expected, losses = plain(record, data())
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), expected) <= 1e-9


REFUSED: dict[str, tuple[str, str | None, Any, str]] = {
    "joined boxes": ("Finder", "joined_step", lambda: boxes(programs.joined), "bboxes .*would travel whole.*split_fn"),
    "two targets in a list of batches": (
        "Finder",
        "lists_step",
        lambda: [(torch.rand(2, 3, 2, 2).double(), [{"boxes": torch.rand(2, 4).double()} for _ in range(2)])] * 3,
        "targets is a list of 2 elements in a batch of 2 samples",
    ),
    "time first in a list of batches": (
        "Reader", None, lambda: list(frames(programs.time_first)), "taken from its first tensor.*cut on axis 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused_before_the_first_step(cluster: Cluster, name: str) -> None:
    model, step, data, sentence = REFUSED[name]
    job = train(cluster, 2, run_spec(model, step), data())
    with pytest.raises(ConfigError, match=sentence):
        job.run.result()
    assert job.run.history == []


def test_one_worker_is_right_and_one_that_joins_gets_no_share(cluster: Cluster) -> None:
    record, joined = run_spec("Finder", "joined_step"), []

    class Joins:
        def on_step(self, run: Any, step: dict[str, Any]) -> None:
            if not joined:
                joined.append(DirectWorker(cluster, "late").start())

        def on_epoch(self, run: Any, epoch: dict[str, Any]) -> None:
            cluster.wait_for(2, 10)

    notices: list[str] = []
    cluster.notice = notices.append  # type: ignore[method-assign]
    run = train(cluster, 1, record, boxes(programs.joined), callbacks=[Joins()]).run.result()
    expected, losses = plain(record, boxes(programs.joined))
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), expected) <= 1e-9
    assert any("further workers get no share, because bboxes" in sentence for sentence in notices)


def test_the_reading_is_told_and_an_error_of_the_first_steps_has_it(cluster: Cluster) -> None:
    record = run_spec("linear", "attribute_step")  # of a dict, which has no attribute
    job = train(cluster, 2, record, frames(programs.with_anchors))
    told = "cut: x [8, 5], y [8]; whole to every worker: anchors [7, 5]"
    with pytest.raises(Exception, match=r"no attribute 'x'.*how batches are read: cut: x \[8, 5\], y \[8\]; whole"):
        job.run.result()
    assert job.run.status().batch == job.run.report()["batch"] == told
