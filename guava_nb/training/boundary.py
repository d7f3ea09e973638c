"""What happens between two steps, with none in flight: members join, the model is validated, its state is saved."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guava_nb.errors import GuavaError
from guava_nb.evaluation.passes import Pass
from guava_nb.training.budget_gate import BudgetGate
from guava_nb.training.membership import Membership
from guava_nb.training.plan import TrainingPlan
from guava_nb.training.run import Run
from guava_nb.training.schedule_check import followed
from guava_nb.training.step_accounting import StepAccounting

__all__ = ["Boundary", "BoundaryCalls"]

Asked = tuple[Callable[[], None], "Future[None]"]


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

    def answer(self) -> None:
        """Do all calls that were asked for; an error goes to the future of its call."""
        while (asked := self._next()) is not None:
            call, future = asked
            try:
                call()
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
        save: writes a checkpoint of the master.
        due: what shall be done at the next boundary: "validate", "snapshot", "save".
        calls: that other threads want done there.
    """

    membership: Membership
    plan: TrainingPlan
    run: Run
    accounting: StepAccounting
    walk: Pass
    budget_gate: BudgetGate
    drain: Callable[[], None]
    save: Callable[[Path], None]
    due: set[str] = field(default_factory=set)
    calls: BoundaryCalls = field(default_factory=BoundaryCalls)

    def mark_due(self, issued: int, num_steps: int = 1) -> None:
        """Note what shall follow when so many optimizer steps of the run are issued, `num_steps` of them just now."""
        for name, every in (
            ("validate", self.plan.val_interval if self.plan.val_feed is not None else None),
            ("snapshot", self.plan.snapshot_every_steps),
            ("save", self.plan.save_every_steps),
        ):
            if every and issued // every > (issued - num_steps) // every:
                self.due.add(name)

    def reach(self) -> None:
        """Do what is due; each of these needs a moment without a step in flight."""
        newcomers = self.membership.newcomers()
        if not (self.due or newcomers or self.calls):
            return
        self.drain()
        if newcomers and self.budget_gate.affords_newcomers(newcomers):
            with self.budget_gate.aside():
                self.membership.bring_in(newcomers)
        self._validate_if("validate" in self.due)
        for name, action in (("snapshot", self._take_snapshot), ("save", self._save_state)):
            if name in self.due:
                if self.budget_gate.affords_state(name):
                    with self.budget_gate.aside():
                        action()
                self.due.discard(name)
        with self.budget_gate.aside():
            self.calls.answer()

    def end_epoch(self) -> None:
        """Validate if that is due after each epoch, or was due anyway."""
        self._validate_if(self.plan.val_feed is not None and (self.plan.val_interval is None or "validate" in self.due))

    def _validate_if(self, due: bool) -> None:
        if due:
            self._validate()
            self.due.discard("validate")

    def _validate(self) -> None:
        assert self.plan.val_feed is not None
        self.run.move("validating")
        question = self.plan.validation()
        with self.budget_gate.validation():
            self.walk.run(self.plan.val_feed, question)
        result = question.result()
        record = {"step": self.accounting.steps, **result.record()}
        self.run.add_validation(record)
        self.run.move("training")
        self.tick("validation", record)
        self.accounting.call("on_validation", record)

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
        self.accounting.keep(self.membership.fetch())

    def _save_state(self) -> None:
        assert self.plan.save_path is not None
        self.membership.fetch()
        self.save(self.plan.save_path)
