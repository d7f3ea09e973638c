"""What happens between two steps, with none in flight: members join, the model is validated, its state is saved."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from guava_nb.errors import GuavaError
from guava_nb.evaluation.passes import Pass
from guava_nb.training.budget_gate import BudgetGate
from guava_nb.training.membership import Membership
from guava_nb.training.plan import TrainingPlan
from guava_nb.training.run import Run
from guava_nb.training.saving.snapshots import Snapshots
from guava_nb.training.schedule_check import followed
from guava_nb.training.step_accounting import StepAccounting

__all__ = ["Boundary", "BoundaryCalls"]

Asked = tuple[Callable[[], None], "Future[None]"]


class _NotYet(Exception):  # noqa: N818 - no error: the call is queued again
    """A call waits for a later boundary."""


class BoundaryCalls:
    """A queue of calls, each with a future that its asker may wait for. Thread-safe."""

    def __init__(self) -> None:
        """Start empty."""
        self._asked: deque[Asked] = deque()

    def __bool__(self) -> bool:
        """Whether a call waits to be done."""
        return bool(self._asked)

    def ask(self, call: Callable[[], None]) -> Future[None]:
        """Queue a call; the future tells its end."""
        future: Future[None] = Future()
        self._asked.append((call, future))
        return future

    def ask_after(self, is_time: Callable[[], bool], call: Callable[[], None]) -> Future[None]:
        """Queue a call for the first boundary at which `is_time` says yes; the future tells its end."""
        future: Future[None] = Future()

        def when_it_is_time() -> None:
            if is_time():
                call()
            else:
                self._asked.append((when_it_is_time, future))
                raise _NotYet

        self._asked.append((when_it_is_time, future))
        return future

    def answer(self) -> None:
        """Do all calls that were asked for by now; an error goes to the future of its call."""
        for _ in range(len(self._asked)):
            if (asked := self._next()) is None:
                return
            call, future = asked
            try:
                call()
            except _NotYet:
                continue
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def refuse(self, error: GuavaError) -> None:
        """Fail all calls that were asked for."""
        while (asked := self._next()) is not None:
            asked[1].set_exception(error)

    def _next(self) -> Asked | None:
        try:
            return self._asked.popleft()
        except IndexError:  # none is left; another thread may have taken the last one just now
            return None


@dataclass(eq=False)
class Boundary:
    """Does what is due between two steps of a run.

    Attributes:
        walk: passes over the data of a validation.
        drain: waits until no step is in flight.
        save: begins to write a checkpoint of the master, of a kind: "" by period, "best".
        due: what shall be done at the next boundary: "validate", "snapshot", "save", "best".
        calls: that other threads want done there.
        snapshots: asks for those that come while steps go on.
        stop: ends the run after the present step, for this reason.
    """

    membership: Membership
    plan: TrainingPlan
    run: Run
    accounting: StepAccounting
    walk: Pass
    budget_gate: BudgetGate
    drain: Callable[[], None]
    save: Callable[[str], None]
    snapshots: Snapshots
    stop: Callable[[str], None]
    due: set[str] = field(default_factory=set)
    calls: BoundaryCalls = field(default_factory=BoundaryCalls)

    def __post_init__(self) -> None:
        """Nothing was saved yet, and no validation done."""
        self._saved_at, self._validated_at = time.monotonic(), -1
        self._told_no_figure = False
        self._told_metrics: set[str] = set()

    def mark_due(self, issued: int, num_steps: int = 1) -> None:
        """Note what shall follow when so many optimizer steps are issued from the very beginning, `num_steps` just now."""
        for name, every in (
            ("validate", self.plan.val_interval if self.plan.val_feed is not None else None),
            ("snapshot", self.plan.snapshot_every_steps),
            ("save", self.plan.save_every_steps),
        ):
            if every and issued // every > (issued - num_steps) // every:
                self.due.add(name)

    def reach(self) -> None:
        """Do what is due; each of these needs a moment without a step in flight."""
        if self.plan.save_every_s and time.monotonic() >= self._saved_at + self.plan.save_every_s:
            self.due.add("save")
        self.snapshots.look()
        if self.snapshots.there.wants_base():
            self.drain()
            self.snapshots.there.set_base()
        newcomers, spares = self.membership.newcomers(), self.membership.spares()
        if not (self.due or newcomers or spares or self.calls):
            return
        self.drain()
        if spares:
            self.membership.prepare(spares)
        if newcomers and self.budget_gate.affords_newcomers(newcomers):
            with self.budget_gate.aside():
                self.membership.bring_in(newcomers)
        self._validate_if("validate" in self.due)
        saves = ("save", partial(self._save_state, "")), ("best", partial(self._save_state, "best"))
        for name, action in (("snapshot", self._take_snapshot), *saves):
            if name in self.due:
                if self.budget_gate.affords_state(name):
                    with self.budget_gate.aside():
                        action()
                self.due.discard(name)
        with self.budget_gate.aside():
            self.calls.answer()

    def call_with_state(self, call: Callable[[], None]) -> None:
        """Bring the state of the last committed step here, then call."""
        self.budget_gate.refuse_save()
        self.membership.fetch()
        call()

    def call_at(self, step: int, call: Callable[[], None]) -> None:
        """Do what a callback wanted of the state after this step when that is there again; a failure then is a notice."""
        replica_set, notice = self.membership.replica_set, self.membership.cluster.notice

        def tell(done: Future[None]) -> None:
            if (error := done.exception()) is not None:
                notice(f"what a callback asked for with the state after {replica_set.nth(step)} was not done: {error}")

        notice(f"the state after {replica_set.nth(step)} is not here now: what a callback asked for is done when it is")
        do = partial(self.call_with_state, call)
        self.calls.ask_after(lambda: replica_set.step >= step, do).add_done_callback(tell)

    def end_epoch(self, is_whole: bool = True) -> None:
        """Validate if that is due after each epoch, or was due anyway.

        Args:
            is_whole: the epoch was trained to its end; else the run ends in it. No schedule counts the validation that this alone
                brings, since a run that goes on from its checkpoint has the one after the whole epoch.
        """
        was_due = "validate" in self.due
        is_due = self.plan.val_feed is not None and (self.plan.val_interval is None or was_due)
        self._validate_if(is_due, ticks=is_whole or was_due)

    def _validate_if(self, due: bool, ticks: bool = True) -> None:
        if due:
            self._validate(ticks)
            self.due.discard("validate")

    def _validate(self, ticks: bool) -> None:
        assert self.plan.val_feed is not None
        self.run.move("validating")
        question = self.plan.validation()
        with self.budget_gate.validation():
            self.walk.run(self.plan.val_feed, question)
        self.accounting.note_validated()
        result = question.result()
        notes = {name: note for name, note in question.notes().items() if name not in self._told_metrics}
        self._told_metrics |= notes.keys()
        for note in notes.values():
            self.membership.cluster.notice(note)
        record = {"step": self.accounting.steps, **result.record()}
        self.run.add_validation(record)
        self.run.move("training")
        if ticks:
            self.tick("validation", record)
        self._note_best()
        self.accounting.call("on_validation", record)
        steps, total = self.accounting.steps - self.accounting.first_step, self.run.total_steps
        is_early = total is None or steps < total
        if is_early and (why := self.plan.is_out_of_patience(self.run.validations)):
            self.membership.cluster.notice(f"{self.run.run_id} ends early by its {why}")
            self.stop(why)

    def tick(self, interval: str, record: Mapping[str, Any]) -> None:
        """Advance the scheduler, if the run has one of this interval: "epoch" or "validation".

        Args:
            record: what was measured, of which a scheduler may follow one figure.

        Raises:
            ConfigError: that figure is no number.
        """
        replica_set = self.membership.replica_set
        if replica_set.spec.scheduler is None or replica_set.spec.scheduler_interval != interval:
            return
        metric = followed(replica_set.master.scheduler, self.plan.scheduler_metric, record)
        replica_set.tick(self.membership.cluster, self.membership.current(), metric)

    def _take_snapshot(self) -> None:
        replica_set = self.membership.replica_set
        if self.snapshots.in_background and replica_set.master_step != replica_set.step:
            self.snapshots.begin()
            return
        began = time.monotonic()
        self.accounting.keep(self.membership.fetch())
        self.snapshots.took_one(began)

    def _note_best(self) -> None:
        """The best is saved at the next boundary, when all that belongs to this step or epoch is done."""
        best, self._validated_at = self.plan.save_best, self.accounting.steps
        is_best = None if best is None else best.is_newest(self.run.validations)
        if is_best:
            self.due.add("best")
        elif best is not None and is_best is None and not self._told_no_figure:
            self._told_no_figure = True
            self.membership.cluster.notice(
                f"save_best follows {best.metric}, and this validation gave no number for it: nothing is saved for it"
            )

    def save_best_at_the_end(self) -> None:
        """Save the best where the run was stopped before the next boundary, and its state is here."""
        replica_set = self.membership.replica_set
        here = replica_set.master_step == replica_set.step
        if "best" in self.due and here and self.accounting.steps == self._validated_at:
            self.due.discard("best")
            self.save("best")

    def _save_state(self, kind: str) -> None:
        self.membership.fetch()
        self._saved_at = time.monotonic() if not kind else self._saved_at
        self.save(kind)
