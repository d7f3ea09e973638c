"""A training job's dealings with its budget: asks before it sends, waits for what is under way, or gives up in time.

Without a budget nothing is asked and nothing is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from guava_nb.config.units import show_bytes
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.errors import CheckpointError
from guava_nb.training.byte_budget import Budget, BudgetSpent

if TYPE_CHECKING:
    from guava_nb.training.job import TrainingJob

__all__ = ["BudgetGate"]


class BudgetGate:
    """The budget of one job.

    Args:
        job: asks.
        budget: None allows everything.
    """

    def __init__(self, job: TrainingJob, budget: Budget | None) -> None:
        """Nothing was sent yet."""
        self._job, self._budget = job, budget
        self._batches = 0.0
        self._asking = 0.0  # batches of a validation that are not answered, taken as a whole pass
        self._told: set[str] = set()

    def begin(self) -> None:
        """An epoch begins: what was used so far is no step's."""
        if self._budget is not None:
            self._budget.begin(self._job.replica_set.route.path)

    def afford_step(self, group: Sequence[LoadedBatch]) -> float:
        """Wait until a step of these batches has room; returns what it takes at most.

        Raises:
            BudgetSpent: it has none, and nothing is under way any more.
        """
        if self._budget is None:
            return 0.0
        self._budget.goes_by(self._job.replica_set.route.path)  # another group may have come to stand
        self._batches = self._budget.batches_cost(group)
        cost = self._budget.step_cost(self._batches)
        if not self._has_room(cost):
            self._job.drain()
            cost = self._budget.step_cost(self._batches)
            if not self._has_room(cost):
                raise BudgetSpent
        return cost

    def issued(self, step: int, cost: float) -> None:
        """A step was sent that takes so much at most."""
        if self._budget is not None:
            self._budget.issued(step, cost, self._batches)

    def _has_room(self, cost: float) -> bool:
        assert self._budget is not None
        self._note_applied()
        return self._budget.fits(cost)

    def _note_applied(self) -> None:
        """Steps that every member has applied are paid for: their sums were sent to everybody."""
        assert self._budget is not None
        at = self._job.replica_set.at
        current = self._job.current()
        if current:
            self._budget.applied(min(at.get(rank, -1) for rank in current))

    # ------------------------------------------------------------------------------------------------ what else is sent

    def affords_newcomers(self, ranks: Sequence[int]) -> bool:
        """Whether these may be given the run and its state; who may not works in a later run."""
        if self._budget is None or self._has_room(self._budget.costs.start * len(ranks) + self._budget.costs.state):
            return True
        self._job.leave_out(ranks)
        names = " and ".join(self._job.cluster.name(rank) for rank in ranks)
        self._tell(f"{names} came too late for this run: its state has no room in what is left of the budget")
        return False

    def affords_state(self, name: str) -> bool:
        """Whether the state may come here for a snapshot or a checkpoint; that of the end is in reserve anyway."""
        if self._budget is None or self._has_room(self._budget.costs.state):
            return True
        self._tell(
            f"no further {'checkpoint' if name == 'save' else 'snapshot'}: what is left of the budget is for the last one"
        )
        return False

    def affords_handover(self) -> bool:
        """Whether the state may come here from those who leave with it, and the run go on: else it is the last one."""
        here = self._job.replica_set.master_step == self._job.replica_set.step
        return self._budget is None or here or self._has_room(self._budget.costs.state)

    def refuse_save(self) -> None:
        """Refuse a checkpoint that a user asks for in the middle of the run, where it would take the reserve of the last one.

        Raises:
            CheckpointError: how much is left, and that there will be one.
        """
        if self._budget is None or self._job.replica_set.master_step == self._job.replica_set.step:
            return
        if not self._has_room(self._budget.costs.state):
            left = self._budget.limit.limit_bytes - self._budget.used()
            raise CheckpointError(
                f"the state takes {show_bytes(round(self._budget.costs.state))}, and of the {show_bytes(max(0, left))} that are "
                "left of the budget the last checkpoint needs its part: wait for that one, or stop the run now with %guava_stop"
            )

    def afford_start_over(self) -> None:
        """Refuse to give the state to all workers again where that has no room.

        Raises:
            BudgetSpent: it has none.
        """
        if self._budget is None:
            return
        self._budget.gave_up()
        if not self._budget.fits(self._budget.costs.start * max(1, self._job.replica_set.least, len(self._job.ready))):
            raise BudgetSpent

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is sent in the block is no step's."""
        if self._budget is None:
            yield
            return
        before = self._budget.used()
        yield
        self._budget.measure(before)

    @contextmanager
    def validation(self) -> Iterator[None]:
        """A pass of validation happens in the block.

        Raises:
            BudgetSpent: it has no room.
        """
        if self._budget is None:
            yield
            return
        self._budget.goes_by(self._job.replica_set.route.path)
        if not self._has_room(self._budget.validation_cost):
            raise BudgetSpent
        before = self._budget.used()
        self._asking = 0.0
        yield
        self._budget.measure(before, validated=True)

    def before_batch(self, batch: LoadedBatch) -> None:
        """A batch of a validation is about to be sent.

        Raises:
            BudgetSpent: it has no room: the pass takes more than was reckoned.
        """
        if self._budget is None:
            return
        # Few are under way at once, but which are sent in full nobody says: the last ones count twice.
        cost = self._budget.batches_cost([batch])
        self._asking = max(self._asking, cost)
        if not self._budget.fits(self._asking * 4 * max(1, len(self._job.ready))):
            raise BudgetSpent

    def on_broken(self, rank: int) -> None:
        """A connection broke: where what it would send again has no room, its worker is let go."""
        if self._budget is None or self._budget.can_send_again():
            return
        left = self._budget.limit.limit_bytes - self._budget.used()
        self._job.cluster.let_go(rank, f"its connection broke, and {show_bytes(max(0, left))} of the budget are left")

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self._job.cluster.notice(sentence)
