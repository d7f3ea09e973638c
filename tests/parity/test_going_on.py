"""Runs in a row on the same workers equal plain PyTorch: what they hold is neither fetched nor sent again, and lost truly.

Through `Orchestrator`, as a user calls it, with workers that are threads. Here every state counts as large.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from guava_nb import Orchestrator
from guava_nb.errors import ConfigError, WorkerLost
from guava_nb.orchestrator import replica_sets
from guava_nb.protocol.messages import Channel, FetchState, SchedulerStep, State, StepApplied, channel_of
from guava_nb.training.run import Run
from guava_nb.worker.preparation import Preparation
from tests.support.direct import DirectWorker, once_after
from tests.support.links import eventually
from tests.support.session import direct_session, said
from tests.support.training import difference, loader

CELL = """
import os
import threading
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(10, width), nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))

class Locked(Net):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

def Unlike():
    net = Net()
    with torch.no_grad():
        net.first.bias.fill_(int.from_bytes(os.urandom(2), "little"))
    return net
"""
WEIGHTS_BYTES = 8 * (10 * 64 + 64 + 128 + 64 * 4 + 4)
TRAINING: dict[str, Any] = {
    "optimizer": "AdamW", "optimizer_args": {"lr": 0.02}, "precision": "fp64", "progress": False, "num_epochs": 1
}  # fmt: skip
SCHEDULE: dict[str, Any] = {"scheduler": "StepLR", "scheduler_args": {"step_size": 3, "gamma": 0.5}}


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave every state with the workers; its copy is begun by the test, or by a question."""
    monkeypatch.setattr("guava_nb.training.job.MOST_FETCHED_BYTES", -1)
    monkeypatch.setattr("guava_nb.orchestrator.left_state.COPY_AFTER_S", 1e5)


@pytest.fixture(params=[1, 2])
def session(request: pytest.FixtureRequest) -> Iterator[Orchestrator]:
    with _opened(request.param) as made:
        yield made


@pytest.fixture
def lone() -> Iterator[Orchestrator]:
    with _opened(0) as made:
        yield made


class _opened:  # noqa: N801 - a context manager
    def __init__(self, workers: int) -> None:
        self._made = direct_session(workers)

    def __enter__(self) -> Orchestrator:
        self.session = self._made.__enter__()
        self.session.share(CELL, "net")
        self.session.register_model("Net")
        return self.session

    def __exit__(self, *error: Any) -> None:
        self.session._replica_sets.left.wait_no_more()
        self._made.__exit__(*error)


def train(session: Orchestrator, **options: Any) -> Run:
    return session.start_training(loader(), **{**TRAINING, **options})


def plain(session: Orchestrator, runs: int, with_schedule: bool = False) -> nn.Module:
    """So many runs of one epoch in one process; the loader of each begins with the same order."""
    torch.manual_seed(session.config.seed)
    model: nn.Module = session._models.shared().Net().double()  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) if with_schedule else None
    for _ in range(runs):
        for x, y in loader():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
    return model


def state_bytes(session: Orchestrator) -> tuple[int, int]:
    """Bytes of states so far, to the workers and from them."""
    wires = [one.wire for one in session._cluster.seats.counted()]  # type: ignore[union-attr]
    kept = Channel.CHECKPOINT
    return sum(wire.out_bytes[kept] for wire in wires), sum(wire.in_bytes[kept] for wire in wires)


def copied(session: Orchestrator) -> None:
    """Let the background copy come."""
    sets = session._replica_sets.trained
    assert sets is not None and session._cluster is not None
    sets.begin_copy(session._cluster)
    assert sets.copy is not None and sets.copy.wait(session._cluster, 20)


def joined(session: Orchestrator, name: str, hook: Any = lambda worker, message: None) -> DirectWorker:
    assert session._cluster is not None
    worker, cluster = DirectWorker(session._cluster, name, hook).start(), session._cluster
    eventually(lambda: name in [member.name for member in cluster.members()], f"{name} has not joined")
    return worker


@pytest.mark.parametrize("schedule", [{}, SCHEDULE], ids=["plain", "schedule"])
def test_runs_in_a_row_move_no_state_and_equal_one_process(session: Orchestrator, schedule: dict[str, Any]) -> None:
    train(session, **schedule)
    out_bytes, in_bytes = state_bytes(session)
    assert out_bytes < WEIGHTS_BYTES, "the workers have proved to have the weights of step 0"
    for _ in range(2):
        run = train(session, **schedule)
        assert (run.lost_samples, run.duplicated_samples) == (0, 0)
    more_out, more_in = (now - before for now, before in zip(state_bytes(session), (out_bytes, in_bytes), strict=True))
    assert more_out == 0 and more_in + in_bytes < WEIGHTS_BYTES, "only schedules came"
    assert difference(run.model(), plain(session, 3, bool(schedule))) <= 1e-9
    assert "goes on from the weights of the last run; --fresh" in said(session)
    assert ("Its schedule goes on, too" in said(session)) is bool(schedule)


def test_workers_build_a_first_run_while_it_is_built_here_and_once(
    session: Orchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert session._cluster is not None
    workers = len(session._cluster.roster.ready())
    build, build_here, built = Preparation._replica, replica_sets.build_replicas, list[object]()

    def counted(preparation: Preparation, *args: Any) -> Any:
        built.append(preparation)
        return build(preparation, *args)

    def after_the_workers(*args: Any) -> Any:
        eventually(lambda: len(built) == workers, "the workers wait for the run to be built here")
        return build_here(*args)

    monkeypatch.setattr(Preparation, "_replica", counted)
    with pytest.raises(ConfigError, match="no_such"):
        train(session, optimizer_args={"no_such": 1})
    eventually(lambda: len(built) == workers, "the workers were told of what was refused here")
    built.clear()
    monkeypatch.setattr(replica_sets, "build_replicas", after_the_workers)
    run = train(session)
    assert len(built) == workers
    assert state_bytes(session)[0] < WEIGHTS_BYTES and difference(run.model(), plain(session, 1)) <= 1e-9


def test_a_model_that_cannot_be_copied_is_given_itself(lone: Orchestrator) -> None:
    lone.register_model("Locked")
    joined(lone, "w0")
    run = train(lone)
    assert run.model() is run.model() and hasattr(run.model(), "lock")


def test_weights_that_a_worker_builds_otherwise_are_sent(session: Orchestrator) -> None:
    session.register_model("Unlike")
    run = train(session, optimizer_args={"lr": 0.0}, optimizer="SGD")
    assert state_bytes(session)[0] >= WEIGHTS_BYTES
    assert run.model().first.bias.unique().numel() == 1


def test_a_model_that_was_given_stays_as_it_was(session: Orchestrator) -> None:
    first = train(session)
    model = first.model()
    second = train(session)
    assert first.model() is model and difference(model, plain(session, 1)) <= 1e-9
    assert difference(second.model(), plain(session, 2)) <= 1e-9


def test_what_is_done_to_a_model_that_was_given_reaches_neither_checkpoint_nor_training(
    session: Orchestrator, tmp_path: Path
) -> None:
    given = train(session).model().half()
    given.last = nn.Linear(64, 2)
    saved = torch.load(session.save_checkpoint(tmp_path / "saved.pt"), weights_only=True)["model"]
    wanted = plain(session, 1).state_dict()
    assert saved.keys() == wanted.keys() and all(
        torch.allclose(saved[name], wanted[name], atol=1e-9) for name in wanted
    )
    run = train(session)
    assert difference(run.model(), plain(session, 2)) <= 1e-9


def test_an_earlier_run_s_model_comes_of_its_copy_or_is_said_to_be_gone(session: Orchestrator) -> None:
    first = train(session)
    second = train(session)
    with pytest.raises(WorkerLost, match=r"the state after step 4 of run-1 is gone: run-2 trained it further"):
        first.model()
    copied(session)
    third = train(session)
    assert difference(second.model(), plain(session, 2)) <= 1e-9
    assert difference(third.model(), plain(session, 3)) <= 1e-9


def test_a_worker_that_joins_between_two_runs_gets_the_state_from_one_that_holds_it(session: Orchestrator) -> None:
    train(session)
    late = joined(session, "late")
    session._cluster.wait_for(len(session._cluster.members()), 10)  # type: ignore[union-attr]
    run = train(session)
    assert late.error is None and len(run.workers) == len(session._cluster.members())  # type: ignore[union-attr]
    assert difference(run.model(), plain(session, 2)) <= 1e-9


def test_a_state_that_was_asked_for_before_its_copy_began_comes_once(session: Orchestrator) -> None:
    train(session).model()
    before, sets = state_bytes(session), session._replica_sets.trained
    assert sets is not None and session._cluster is not None
    sets.begin_copy(session._cluster)
    assert sets.copy is None and state_bytes(session) == before


def test_another_record_between_two_runs_fetches_as_before(session: Orchestrator) -> None:
    train(session)
    train(session, max_grad_norm=1e9)
    run = train(session)
    assert difference(run.model(), plain(session, 3)) <= 1e-9


def test_a_validation_between_two_runs_leaves_the_state_where_it_is(session: Orchestrator) -> None:
    train(session)
    measured = session.validate(loader(), progress=False)["loss"]
    model = plain(session, 1)
    x, y = loader().dataset.tensors  # type: ignore[attr-defined]
    assert measured == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), abs=1e-12)
    assert difference(train(session).model(), plain(session, 2)) <= 1e-9


def test_one_of_two_that_is_lost_between_two_runs_takes_nothing_with_it(lone: Orchestrator) -> None:
    gone, stays = joined(lone, "gone"), joined(lone, "stays")
    lone._cluster.wait_for(2, 10)  # type: ignore[union-attr]
    train(lone)
    gone.die()
    assert difference(train(lone).model(), plain(lone, 2)) <= 1e-9 and stays.error is None


def test_a_lost_only_copy_is_told_and_what_is_left_goes_on(lone: Orchestrator, tmp_path: Path) -> None:
    holder = joined(lone, "holder")
    run = train(lone)
    assert "holder has the state after step 4 of run-1" in lone.status().state_note
    holder.die()
    joined(lone, "next")
    assert "is lost: the workers that had it are gone. What is left is the state that run-1 began with" in (
        lone.status().state_note
    )
    with pytest.raises(WorkerLost, match="train on from what is left, the state that run-1 began with"):
        train(lone)
    assert difference(run.model(), plain(lone, 0)) == 0
    saved = lone.save_checkpoint(tmp_path / "left.pt")
    kept = torch.load(saved, weights_only=True)
    assert kept["step"] == -1 and (kept["position"]["epoch"], kept["position"]["batches"]) == (0, 0)
    assert difference(train(lone).model(), plain(lone, 1)) <= 1e-9


@pytest.mark.parametrize("is_there", [True, False])
def test_a_lost_state_names_the_newest_checkpoint_that_is_there(
    lone: Orchestrator, tmp_path: Path, is_there: bool
) -> None:
    holder = joined(lone, "holder")
    train(lone, save_every=2, keep=1, checkpoint_dir=tmp_path)
    train(lone)  # the next run goes on from it, and writes none
    (file,) = tmp_path.glob("run-1-*-step-4.pt")
    holder.die()
    joined(lone, "next")
    if is_there:
        assert f"and its newest checkpoint, {file}" in lone.status().state_note
        told = re.escape(f"Go on from its newest checkpoint with resume={str(file)!r} (--resume {file})")
    else:
        file.unlink()
        told = r"Train anew with fresh=True \(--fresh\), or go on from a checkpoint \(--resume\)"
    with pytest.raises(WorkerLost, match=told):
        lone.save_checkpoint(tmp_path / "lost.pt")


@pytest.mark.parametrize("mode", ["whole", "at the workers"])
def test_a_state_that_is_asked_for_before_its_schedule_was_told_of_the_epoch_is_that_after_it(
    lone: Orchestrator, monkeypatch: pytest.MonkeyPatch, mode: str, tmp_path: Path
) -> None:
    """Ticks travel behind the batches, questions do not: here each question for a state comes first."""
    if mode == "whole":
        monkeypatch.setattr("guava_nb.training.job.MOST_FETCHED_BYTES", 1 << 30)
    worker = joined(lone, "w")
    take, late = worker.take, list[SchedulerStep]()

    def overtaking(message: Any, payload: memoryview) -> None:
        if isinstance(message, SchedulerStep):
            late.append(message)
            return
        if isinstance(message, FetchState):
            take(message, payload)
        if isinstance(message, FetchState) or channel_of(message) is Channel.BATCH:
            while late:
                take(late.pop(0), memoryview(b""))
        if not isinstance(message, FetchState):
            take(message, payload)

    worker.take = overtaking  # type: ignore[method-assign]
    by_epoch = {**SCHEDULE, "scheduler_args": {"step_size": 1, "gamma": 0.5}, "scheduler_interval": "epoch"}
    train(lone, num_epochs=2, **by_epoch)
    kept = torch.load(lone.save_checkpoint(tmp_path / "after.pt"), weights_only=True)
    assert kept["scheduler"]["last_epoch"] == 2 and kept["scheduler"]["_last_lr"] == [0.005]
    assert kept["optimizer"]["param_groups"][0]["lr"] == 0.005


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_holder_lost_in_the_next_run(lone: Orchestrator, is_copied: bool) -> None:
    die = once_after(6, StepApplied, DirectWorker.die)  # the second step of the second run
    joined(lone, "holder", die)
    train(lone)
    if is_copied:
        copied(lone)
    spare = threading.Thread(target=lambda: joined(lone, "spare"))
    hook = die

    def replaced(worker: Any, message: Any) -> None:
        fired = hook.fired  # type: ignore[attr-defined]
        hook(worker, message)
        if hook.fired and not fired:  # type: ignore[attr-defined]
            spare.start()

    lone._cluster.seats.of(0)._worker._hook = replaced  # type: ignore[union-attr]
    run = train(lone)
    spare.join(10)
    lost = "the state after step 4 of run-1 is lost: only workers that are gone had it"
    assert (lost in said(lone)) == (not is_copied) and len(run.history) == 4
    assert difference(run.model(), plain(lone, 1 + is_copied)) <= 1e-9


def test_a_session_that_closes_waits_for_the_only_copy(lone: Orchestrator) -> None:
    go_on = threading.Event()
    slow = once_after(3, State, lambda worker: go_on.wait(20))
    joined(lone, "holder", slow)
    train(lone)
    run = train(lone)  # each run asks for the schedule once
    closing = threading.Thread(target=lone.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    go_on.set()
    closing.join(20)
    assert lone._cluster is None and difference(run.model(), plain(lone, 2)) <= 1e-9


def test_a_session_that_closes_without_the_copy_says_what_is_lost(lone: Orchestrator) -> None:
    holder = joined(lone, "holder")
    train(lone)
    holder.die()
    with pytest.warns(
        UserWarning, match="ends without the state after step 4 of run-1.*What is left is the state that run-1"
    ):
        lone.close()


def test_a_worker_that_leaves_between_two_runs_hands_its_copy_over(lone: Orchestrator) -> None:
    holder = joined(lone, "holder")
    run = train(lone)
    holder.loop.leave("asked to leave")
    holder.thread.join(20)
    assert holder.left and not lone.status().state_note
    assert difference(run.model(), plain(lone, 1)) <= 1e-9


def test_what_the_user_s_code_changed_beside_the_state_begins_anew_as_before(session: Orchestrator) -> None:
    counting = CELL.replace("        self.first,", "        self.calls = 1\n        self.first,")
    session.share(
        counting.replace("        return self.last(", "        self.calls += 1\n        return self.last("), "net"
    )
    train(session)
    run = train(session)
    assert "calls: the last run changed this outside of parameters" in said(session)
    assert difference(run.model(), plain(session, 2)) <= 1e-9


_COUNTING = """
import torch

class Counting(torch.optim.AdamW):
    times = 0

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.seen = getattr(parameter, "seen", 0) + 1
        self.times = self.times + 1
        return super().step(closure)

def counting(named):
    made = Counting([parameter for _, parameter in named], lr=0.02)
    made.times = 1
    return made
"""


@pytest.mark.parametrize("by_itself", [False, True], ids=["saved", "save_every"])
@pytest.mark.parametrize("site", ["workers", "orchestrator"])
def test_what_no_checkpoint_has_is_told_by_the_run_that_goes_on_from_one(
    session: Orchestrator, tmp_path: Path, by_itself: bool, site: str
) -> None:
    session.share(_COUNTING, "counting")
    words: dict[str, Any] = {"optimizer": "counting", "optimizer_args": None, "optimizer_site": site}
    train(session, **words, max_steps=2, **({"save_every": 2, "checkpoint_dir": tmp_path} if by_itself else {}))
    path = next(tmp_path.iterdir()) if by_itself else session.save_checkpoint(tmp_path / "two.pt")
    run = train(session, **words, resume=path)
    told = next(text for text in said(session).split("\n") if f"the run of {path} changed this outside" in text)
    named = told.partition(": ")[0].split(", ")
    assert {"optimizer.times", "model.first.weight.seen"} <= set(named)
    assert difference(run.model(), plain(session, 1)) <= 1e-9
    with pytest.raises(ConfigError, match="optimizer.times"):
        train(session, **words, resume=path, check="strict")
