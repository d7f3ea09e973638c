"""In which order all replicas run the units that they share, though each model decides by its own data what it runs.

Pure: numbers in, numbers out. A unit is a module whose run needs every replica. Where one replica wants a unit that
another does not, the other one stands in for it; so all run the same units in the same order. Passes ask the group at
every turn. Where all passes of some steps were alike, every replica wanted the same, and no unit was left out, later ones
follow that plan and ask nothing. A replica that skips a unit of the plan stands in for it, and from the next step on
every turn is asked again, since this model chooses by its data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["EXIT", "STEADY_STEPS", "CallOrder", "Habit", "Unplanned"]

#: Wanted by a replica that has nothing more to run inside the present unit, or in this pass.
EXIT = 1 << 40
#: Steps that must be like the one before them to make a plan.
STEADY_STEPS = 2


class Unplanned(Exception):  # noqa: N818 - the caller knows the unit's name and makes an error of it
    """A unit is wanted where the plan has none left; nothing was sent for it."""


@dataclass(slots=True)
class Habit:
    """What is known of a model's calls, for longer than a group lives.

    Attributes:
        may_plan: nothing has shown yet that the model chooses by its data, or runs more in some steps.
    """

    may_plan: bool = True


class CallOrder:
    """The order of one kind of pass.

    Args:
        habit: alike on all replicas when a pass begins.
        smallest: returns the smallest of the numbers that all replicas give at the same turn.

    Attributes:
        strayed: this replica stood in for something since the last `settle`.
    """

    def __init__(self, habit: Habit, smallest: Callable[[int], int]) -> None:
        """Ask at every turn, until a step shows that all want the same."""
        self._habit, self._smallest = habit, smallest
        self._plan: tuple[int, ...] = ()
        self._taken: list[int] = []
        self._passes: set[tuple[int, ...]] = set()  # of this step
        self._former: set[tuple[int, ...]] = set()  # of the step before
        self._alike = 0  # steps whose passes were all as those before
        self.strayed = False

    def begin(self) -> None:
        """Begin a pass; one that an error cut short is forgotten."""
        self._taken = []

    def until(self, wanted: int) -> Iterator[int]:
        """Yield the units to stand in for until it is the turn of the one that is wanted here.

        Raises:
            Unplanned: the plan has no such turn.
        """
        while (turn := self._next(wanted)) != wanted:
            self.strayed = True
            yield turn

    def _next(self, wanted: int) -> int:
        if not self._plan:
            turn = self._smallest(wanted)
        elif (turn := self._plan[len(self._taken)]) == EXIT != wanted:
            self._habit.may_plan = False
            raise Unplanned
        self._taken.append(turn)
        return turn

    def end(self) -> None:
        """End a pass; its last turn was `EXIT`."""
        self._passes.add(tuple(self._taken))

    def settle(self, any_strayed: bool, units: int) -> None:
        """End a step, all replicas alike.

        Args:
            any_strayed: whether a replica strayed.
            units: how many there are; turn n is that of unit n // 2.
        """
        self._habit.may_plan = self._habit.may_plan and not any_strayed
        if not self._habit.may_plan:
            self._plan = ()
        elif not self._plan and len({turn // 2 for turn in self._taken if turn != EXIT}) == units:
            self._alike = self._alike + 1 if self._passes == self._former == {tuple(self._taken)} else 0
            self._plan = tuple(self._taken) if self._alike == STEADY_STEPS else ()
        self._former, self._passes, self.strayed = self._passes, set(), False
