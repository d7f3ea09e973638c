"""Depth-first search over all choices of a system, by running it again for every path.

A system runs as straight code and asks at each point where more than one thing may happen next. States are known by their
fingerprint, and one that was seen is not walked again. Sleep sets (Godefroid, 1996) leave out the second order of two
choices that do not touch each other: every state is still reached, but not over every path.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Choice", "Found", "Report", "Stop", "System", "Violation", "explore", "wander"]


#: How often a fault is drawn where one can happen.
FAULT_SHARE = 0.06


@dataclass(frozen=True)
class Choice:
    """Something that may happen next.

    Attributes:
        name: the same in every run that comes to this state.
        actors: whose state it reads or changes.
        is_fault: drawn seldom where choices are drawn.
    """

    name: tuple[Hashable, ...]
    actors: frozenset[str]
    is_fault: bool = False

    def is_independent(self, other: Choice) -> bool:
        """Whether the two lead to the same state in either order."""
        return self.actors.isdisjoint(other.actors)

    def __str__(self) -> str:
        return " ".join(str(getattr(part, "name", part)) for part in self.name)


class Violation(BaseException):  # noqa: N818 - no handler of the code under test may catch it
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


class Stop(BaseException):  # noqa: N818 - likewise
    """The rest of this path is known or not wanted."""


Choose = Callable[[Callable[[], Sequence[Choice]], Callable[[], Hashable]], Choice | None]


class System(Protocol):
    """What can be explored."""

    def run(self, choose: Choose) -> None:
        """Run to the end; `choose(choices, fingerprint)` says what happens next, None where nothing can.

        Both arguments are called only where the path is new. What they raise ends the search.
        """


@dataclass
class Found:
    """A violation and the path to it."""

    violation: Violation
    path: list[str]

    def __str__(self) -> str:
        return f"{self.violation}\n  after: " + "\n         ".join(self.path)


@dataclass
class Report:
    """What a search has seen.

    Attributes:
        states: different states in which more than one thing could happen.
        transitions: choices that were taken.
        interleavings: paths through the states, from the first to an end.
        ends: paths that were run to their end.
        seconds: of this process.
        complete: nothing was left out for lack of time.
    """

    states: int = 0
    transitions: int = 0
    interleavings: int = 0
    ends: int = 0
    deepest: int = 0
    seconds: float = 0.0
    complete: bool = False
    found: Found | None = None


@dataclass
class _Frame:
    key: Hashable
    options: list[Choice]
    sleep: frozenset[Choice]
    at: int = 0
    paths: int = 0


@dataclass
class _Seen:
    sleep: frozenset[Choice]
    paths: int = 0
    closed: bool = False


@dataclass
class _Search:
    make: Callable[[], System]
    deadline: float
    report: Report = field(default_factory=Report)
    seen: dict[Hashable, _Seen] = field(default_factory=dict)
    stack: list[_Frame] = field(default_factory=list)

    def walk(self) -> Report:
        started = time.process_time()
        while not self.report.complete and self.report.found is None and time.process_time() < self.deadline:
            self._one_path()
        self.report.states = len(self.seen)
        self.report.seconds = time.process_time() - started
        return self.report

    def _one_path(self) -> None:
        self._depth, self._path = 0, list[str]()
        ended = 1
        try:
            self.make().run(self._choose)
            self.report.ends += 1
        except Stop as stop:
            ended = stop.args[0] if stop.args else 1
        except Violation as violation:
            self.report.found = Found(violation, self._path)
            return
        self._back(ended)

    def _choose(self, choices: Callable[[], Sequence[Choice]], fingerprint: Callable[[], Hashable]) -> Choice | None:
        if self._depth < len(self.stack):
            frame = self.stack[self._depth]
        else:
            key, options = fingerprint(), choices()
            if not options:
                return None
            frame = self._new_frame(options, key)
            self.stack.append(frame)
        self._depth += 1
        self.report.deepest = max(self.report.deepest, self._depth)
        self._path.append(str(frame.options[frame.at]))
        return frame.options[frame.at]

    def _new_frame(self, options: Sequence[Choice], key: Hashable) -> _Frame:
        asleep = self._asleep()
        seen = self.seen.get(key)
        if seen is None:
            self.seen[key] = _Seen(asleep)
            wanted = [option for option in options if option not in asleep]
        else:
            # Walked before with what slept then: of that, what does not sleep now is still to be walked.
            wanted = [option for option in options if option in seen.sleep and option not in asleep]
            seen.sleep &= asleep
        if not wanted:
            raise Stop(seen.paths if seen else 0)
        self.report.transitions += 1
        return _Frame(key, wanted, asleep)

    def _asleep(self) -> frozenset[Choice]:
        if not self.stack:
            return frozenset()
        frame = self.stack[-1]
        taken = frame.options[frame.at]
        return frozenset(c for c in (*frame.sleep, *frame.options[: frame.at]) if c.is_independent(taken))

    def _back(self, paths: int) -> None:
        """Go to the next choice that was not taken."""
        while self.stack:
            frame = self.stack[-1]
            frame.paths += paths
            frame.at += 1
            if frame.at < len(frame.options):
                self.report.transitions += 1
                return
            self.stack.pop()
            paths = frame.paths
            self.seen[frame.key].paths += paths
        self.report.interleavings, self.report.complete = paths, True


def explore(make: Callable[[], System], limit_s: float = float("inf")) -> Report:
    """Walk all paths of a system, or those that fit into a time; stops at the first violation."""
    return _Search(make, time.process_time() + limit_s).walk()


def wander(make: Callable[[], System], runs: int, seed: int, limit_s: float = float("inf")) -> Report:
    """Run a system `runs` times with choices drawn at random: reaches deep where a search would not come to an end."""
    draw, report, deadline = random.Random(seed), Report(), time.process_time() + limit_s
    started = time.process_time()
    while report.ends < runs and report.found is None and time.process_time() < deadline:
        path: list[str] = []

        def choose(choices: Callable[[], Sequence[Choice]], fingerprint: Callable[[], Hashable]) -> Choice | None:
            fingerprint()  # looks at the invariants
            options = choices()
            faults = [option for option in options if option.is_fault]
            usual = [option for option in options if not option.is_fault]
            options = faults if faults and (not usual or draw.random() < FAULT_SHARE) else usual
            taken = draw.choice(options) if options else None
            path.append(str(taken))  # noqa: B023 - of this run
            return taken

        try:
            make().run(choose)
        except Stop:
            pass
        except Violation as violation:
            report.found = Found(violation, path)
        report.ends += 1
        report.transitions += len(path)
        report.deepest = max(report.deepest, len(path))
    report.interleavings, report.seconds = report.ends, time.process_time() - started
    return report
