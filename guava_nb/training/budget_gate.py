"""What a run asks its budget before it sends: whether there is room, or will be when what is under way has arrived.

Without a budget nothing is asked and nothing is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from guava_nb.cluster.group_path import Route
from guava_nb.config.units import show_bytes
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.errors import CheckpointError
from guava_nb.training.byte_budget import Budget, BudgetSpent

__all__ = ["BudgetGate", "Spender"]


class Workers(Protocol):
    """As much of a cluster as a gate needs."""

    notice: Callable[[str], None]

    def name(self, rank: int) -> str:
        """Return a worker's name."""

    def let_go(self, rank: int, reason: str) -> None:
        """End a worker's session for good."""


class ReplicaSteps(Protocol):
    """As much of a replica set as a gate needs: see there."""

    at: dict[int, int]
    step: int
    master_step: int
    route: Route

    @property
    def least(self) -> int:
        """How many workers the run needs."""


class Spender(Protocol):
    """As much of a run's members as a gate needs: see `Membership`."""

    @property
    def cluster(self) -> Workers:
        """All workers."""

    @property
    def replica_set(self) -> ReplicaSteps:
        """What the members hold."""

    @property
    def ready(self) -> set[int]:
        """All workers that are connected."""

    def current(self) -> list[int]:
        """Return the members that take part in every step so far."""

    def leave_out(self, ranks: Sequence[int]) -> None:
        """Let workers take no part in this run."""


class BudgetGate:
    """The budget of one run.

    Args:
        members: of the run.
        drain: waits until nothing is under way.
        budget: None allows everything.
    """

    def __init__(self, members: Spender, drain: Callable[[], None], budget: Budget | None) -> None:
        """Nothing was sent yet."""
        self._members, self._replicas, self._drain, self._budget = members, members.replica_set, drain, budget
        self._batches = 0.0
        self._asking = 0.0  # batches of a validation that are not answered, taken as a whole pass
        self._told: set[str] = set()

    def begin(self) -> None:
        """An epoch begins: bytes used so far do not count for its steps."""
        if self._budget is not None:
            self._budget.begin(self._replicas.route.path)

    def afford_step(self, group: Sequence[LoadedBatch]) -> float:
        """Wait until a step of these batches has room; returns what it takes at most.

        Raises:
            BudgetSpent: it has none, and nothing is under way any more.
        """
        if self._budget is None:
            return 0.0
        self._budget.goes_by(self._replicas.route.path)  # another group may have come to stand
        self._batches = self._budget.batches_cost(group)
        cost = self._budget.step_cost(self._batches)
        if not self._has_room(cost):
            self._drain()
            cost = self._budget.step_cost(self._batches)
            if not self._has_room(cost):
                raise BudgetSpent
        return cost

    def issued(self, step: int, cost: float) -> None:
        """A step was sent that takes at most `cost` bytes."""
        if self._budget is not None:
            self._budget.issued(step, cost, self._batches)

    def _has_room(self, cost: float) -> bool:
        """Whether a cost has room; steps that every member has applied are no longer under way."""
        assert self._budget is not None
        if current := self._members.current():
            self._budget.applied(min(self._replicas.at.get(rank, -1) for rank in current))
        return self._budget.fits(cost)

    # ------------------------------------------------------------------------------------------------ what else is sent

    def affords(self, nbytes: float) -> bool:
        """Whether so many bytes may be sent that the run can do without."""
        return self._budget is None or self._has_room(nbytes)

    def affords_newcomers(self, ranks: Sequence[int]) -> bool:
        """Whether these workers may be given the run and its state; if not, they wait for a later run."""
        if self._budget is None or self._has_room(self._budget.costs.start * len(ranks) + self._budget.costs.state):
            return True
        self._members.leave_out(ranks)
        names = " and ".join(self._members.cluster.name(rank) for rank in ranks)
        self._tell(f"{names} can take no part in this run: its state does not fit into what is left of the budget")
        return False

    def affords_state(self, name: str) -> bool:
        """Whether the state may come here for a snapshot or a checkpoint; that of the end is in reserve anyway."""
        if self._budget is None or self._has_room(self._budget.costs.state):
            return True
        what = "snapshot" if name == "snapshot" else "checkpoint"
        self._tell(f"no further {what} is taken: what is left of the budget has room for the last one only")
        return False

    def affords_handover(self) -> bool:
        """Whether the run can go on after leaving members have handed over the state; if not, it ends with that."""
        return self._budget is None or self._is_state_here() or self._has_room(self._budget.costs.state)

    def _is_state_here(self) -> bool:
        return self._replicas.master_step == self._replicas.step

    def refuse_save(self) -> None:
        """Refuse a checkpoint that a user asks for in the middle of the run, where it would take the reserve of the last one.

        Raises:
            CheckpointError: how much is left, and that there will be one.
        """
        if self._budget is None or self._is_state_here():
            return
        if not self._has_room(self._budget.costs.state):
            left = self._budget.limit.limit_bytes - self._budget.used()
            raise CheckpointError(
                f"this checkpoint takes {show_bytes(round(self._budget.costs.state))}, and of the {show_bytes(max(0, left))} "
                "that are left of the budget the last one needs its part, so there is no room for both: wait for the last "
                "one, or stop the run now (%guava_stop)"
            )

    def afford_start_over(self) -> None:
        """Refuse to give the state to all workers again where that has no room.

        Raises:
            BudgetSpent: it has none.
        """
        if self._budget is None:
            return
        self._budget.gave_up()
        if not self._budget.fits(self._budget.costs.start * max(1, self._replicas.least, len(self._members.ready))):
            raise BudgetSpent

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Bytes that are sent in the block do not count for steps."""
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
        self._budget.goes_by(self._replicas.route.path)
        if not self._has_room(self._budget.validation_cost):
            raise BudgetSpent
        before = self._budget.used()
        self._asking = 0.0
        yield
        self._budget.measure(before, validated=True)

    def before_batch(self, batch: LoadedBatch) -> None:
        """A batch of a validation is about to be sent.

        Raises:
            BudgetSpent: it has no room: the pass takes more than was estimated.
        """
        if self._budget is None:
            return
        # Few batches are under way at once, and it is not known which are sent in full: the last ones count twice.
        cost = self._budget.batches_cost([batch])
        self._asking = max(self._asking, cost)
        if not self._budget.fits(self._asking * 4 * max(1, len(self._members.ready))):
            raise BudgetSpent

    def on_broken(self, rank: int) -> None:
        """A connection broke: end its session if the budget has no room to send again what is under way."""
        if self._budget is None or self._budget.can_send_again():
            return
        left = self._budget.limit.limit_bytes - self._budget.used()
        self._members.cluster.let_go(
            rank, f"its connection broke, and {show_bytes(max(0, left))} of the budget are left"
        )

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self._members.cluster.notice(sentence)
