"""A budget is never passed, whatever happens in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.config import DistributedConfig
from guava_nb.data.batch_reading import BatchReading
from guava_nb.data.loader_feed import LoadedBatch, LoaderFeed
from guava_nb.data.split import RowSplitter
from guava_nb.errors import CheckpointError, ConfigError
from guava_nb.forecast.batch_bytes import writer_for
from guava_nb.protocol.framing import message_bytes
from guava_nb.protocol.messages import CacheSpec
from guava_nb.sync.step_in_flight import StepHead, plan_step
from guava_nb.training import checkpoint
from guava_nb.training import initial_state as origin
from guava_nb.training.byte_budget import Budget, Costs, Limit, chosen_limit, refuse_small, slack_bytes
from guava_nb.training.plan import Position, TrainingPlan
from tests.support.training import spec


def batch_of(value: Any, rows: int) -> LoadedBatch:
    return LoadedBatch(0, value, tuple(range(rows)), rows)


def costs(**changes: float) -> Costs:
    return Costs(
        **{"start": 1000, "state": 5000, "step": 300, "batch_times": 1, "validation": 0, "workers": 2, **changes}
    )  # type: ignore[arg-type]


@given(
    limit=st.integers(10_000, 400_000),
    steps=st.lists(st.tuples(st.integers(0, 3000), st.floats(0, 1), st.booleans(), st.integers(0, 3)), max_size=60),
)
def test_whatever_is_sent_the_state_still_has_room(limit: int, steps: list[tuple[int, float, bool, int]]) -> None:
    """Steps take any part of what they may take, a connection breaks at any time and sends all under way once more."""
    used, budget = 2000, Budget(Limit(limit, None), costs())
    budget.used = lambda: used
    budget.begin("relay")
    under_way: dict[int, float] = {}
    broken = False
    for number, (batches, part, breaks, applied) in enumerate(steps):
        cost = budget.step_cost(batches)
        if not budget.fits(cost):
            break
        budget.issued(number, cost, batches)
        under_way[number] = cost
        used += int(part * (costs().step + batches))
        if breaks and not broken:
            broken = True
            used += int(sum(under_way.values()))
        for done in list(under_way)[:applied]:
            del under_way[done]
            budget.applied(done)
    if used > 2000:
        # Whatever is still under way comes in full, and then the state.
        assert used + (0 if broken else sum(under_way.values())) + costs().state <= limit


LEAVES = st.sampled_from(
    [
        lambda n: torch.randn(n, 3),
        lambda n: torch.zeros(n, 2, 5, dtype=torch.uint8),
        lambda n: np.arange(n * 2).reshape(n, 2),
        lambda n: [f"sample number {k}" for k in range(n)],
        lambda n: list(range(n)),
        lambda n: torch.ones(7, 7),
        lambda n: "one text for all of them",
    ]
)


def stacked(batch: Any) -> BatchReading:
    """Reads a batch twice, as torch's own collate function may have made it."""
    reading = BatchReading(stacks=True)
    for _ in range(2):
        reading.read(batch, None)
    return reading


@given(
    rows=st.integers(1, 40), leaves=st.lists(LEAVES, min_size=1, max_size=4), workers=st.integers(1, 4), cached=st.booleans()
)  # fmt: skip
def test_a_batch_takes_no_more_than_is_reckoned(rows: int, leaves: list[Any], workers: int, cached: bool) -> None:
    batch = batch_of({"x": torch.randn(rows, 2), **{str(k): leaf(rows) for k, leaf in enumerate(leaves)}}, rows)
    run_spec = spec(cache=CacheSpec("memory", 1 << 20) if cached else None)
    writer = writer_for(run_spec, workers)
    tasks, shards = plan_step(
        StepHead("run-1", 1, 70_000, want_hash=True, solo=workers == 1), [batch], tuple(range(workers)), [1.0] * workers,
        RowSplitter(reading=stacked(batch.batch)), writer,
    )  # fmt: skip
    sent = 0
    for task, (message, parcel) in zip(tasks, shards, strict=True):
        record, buffers = writer.write(task.owner, message, parcel)
        sent += message_bytes(record, sum(buffer.nbytes for buffer in buffers))
    budget = Budget(Limit(1 << 40, None), costs(workers=workers, batch_times=workers))
    assert sent <= budget.batches_cost([batch])


def test_steps_that_take_more_than_was_reckoned_are_believed() -> None:
    used, budget = 0, Budget(Limit(1 << 30, None), costs(step=100))
    budget.used = lambda: used
    budget.begin("direct")
    budget.issued(0, 100, 0)
    used = 5000
    assert budget.step_cost(0) == 5000
    budget.begin("direct")
    assert budget.step_cost(10) == 5010


def test_what_is_done_beside_steps_counts_for_no_step() -> None:
    used, budget = 0, Budget(Limit(1 << 30, None), costs(step=100))
    budget.used = lambda: used
    budget.begin("relay")
    budget.issued(0, 100, 0)
    used = 90_000
    budget.measure(0, validated=True)
    assert budget.step_cost(0) == pytest.approx(105) and budget.validation_cost == 90_000


def test_what_workers_exchange_directly_costs_nothing_here() -> None:
    budget = Budget(Limit(1 << 30, None), costs(step=100, exchanged=10_000, validation_exchanged=500))
    assert budget.step_cost(0) == pytest.approx(10_605)
    budget.begin("direct")
    assert budget.step_cost(0) == pytest.approx(105) and budget.validation_cost == 0


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "900", "much", None])
def test_what_is_no_budget_is_refused(wrong: Any) -> None:
    if wrong is None:
        assert chosen_limit(DistributedConfig(), None, None) is None
        return
    with pytest.raises(ConfigError, match=r"900"):
        chosen_limit(DistributedConfig(), wrong, None)


def test_a_budget_comes_from_the_call_or_from_the_settings(tmp_path: Path) -> None:
    config = DistributedConfig(budget_bytes=700, checkpoint_dir=str(tmp_path))
    assert chosen_limit(config, None, None) == Limit(700, None) and chosen_limit(config, 0, None) is None
    assert chosen_limit(config, "2 kB", tmp_path / "new" / "run.pt") == Limit(2000, tmp_path / "new" / "run.pt")
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_that_could_not_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, said in ((tmp_path, "is a folder"), (tmp_path / "file" / "run.pt", "takes no files")):
        with pytest.raises(ConfigError, match=said):
            chosen_limit(DistributedConfig(), 1000, path)
    with pytest.raises(ConfigError, match="give --budget with it"):
        chosen_limit(DistributedConfig(), None, tmp_path / "run.pt")


def test_a_budget_just_large_enough_is_taken() -> None:
    needed = 1000 + 2 * 300 * 1.05 + 5000 * 1.05 + slack_bytes(2)
    refuse_small(Limit(int(needed) + 1, None), 1000, 300, 5000, 2)
    with pytest.raises(ConfigError, match="too small: 1.0 kB to start, 630 B for the first step"):
        refuse_small(Limit(int(needed) - 1, None), 1000, 300, 5000, 2)


def test_the_end_says_how_to_go_on() -> None:
    budget = Budget(Limit(900_000_000, None), costs(), lambda: 897_000_000)
    path = budget.path(Path("checkpoints"), "run-1", 1234)
    assert budget.sentence(1234, 5000, path) == (
        "budget 900.0 MB, used 897.0 MB, step 1234 of 5000; go on with %guava_resume checkpoints/run-1-step-1234.pt, then "
        "your %guava_train line with a new --budget"
    )
    assert "step 115 of 138 (no room); go on with" in budget.sentence(51, 74, path, 64, " (no room)")
    assert "nothing was learned" in budget.sentence(0, None, None) and "%guava_save" in budget.sentence(3, None, None)
    assert Budget(Limit(1, Path("mine.pt")), costs()).path(Path("a"), "run-1", 3) == Path("mine.pt")


def test_a_checkpoint_that_is_not_there_is_looked_for_where_made_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoint.read(Path("run-2-step-11.pt"))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "run-2-step-115.pt").touch()
    with pytest.raises(CheckpointError, match="in checkpoints there are: run-2-step-115.pt$"):
        checkpoint.read(Path("run-2-step-11.pt"))


@pytest.mark.parametrize(("batches", "epochs"), [(3, 10), (3, 30), (2, 10), (0, 30)])
def test_an_epoch_that_lacks_only_its_end_is_told_at_the_resume(batches: int, epochs: int) -> None:
    plan = TrainingPlan(LoaderFeed([1, 2, 3]), None, epochs, start=Position(9, batches))
    told = origin._only_its_end(Path("a.pt"), plan)
    assert bool(told) == (batches == 3)
    if told:
        assert "a.pt has all steps of epoch 10" in told[0] and ("more than 10 (--epochs)" in told[0]) == (epochs == 10)
