"""How a commit looks after the next two changes: MODELS of the machines, since there is no code of them yet.

All else that is explored drives the real machines; here the rules of `guava_nb/sync/commit.md` are tried before any code.

`GatedStep`: the finite flag gates the optimizer on the device, so a worker steps on its own as soon as all of a step's sums
are here, and hears of the commit during the forward of the next step. `Round`: the unit is a round of local steps whose sum
travels in fragments. Both have the invariants of `invariants.py`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial

from tests.support.explorer.invariants import AHEAD, HISTORY, ONCE, PARAMETERS, WAIT
from tests.support.explorer.search import Choice, Choose, Violation

__all__ = ["MODELS", "GatedStep", "Round"]

_JOB = frozenset(["job"])


@dataclass
class _Rank:
    """One worker: the last unit applied, the last one told to be in the ledger, the last one sent, whether it is here.

    It keeps the sample ids of the units after `told`.
    """

    applied: int = -1
    told: int = -1
    sent: int = -1
    here: bool = True
    have: frozenset[int] = frozenset()  # fragments or sums of the unit after `applied`

    def key(self) -> Hashable:
        return self.applied, self.told, self.sent, self.here, self.have


@dataclass
class _Model:
    """What both have in common: workers, a log and its file, workers that are lost or join, a hub that dies and resumes.

    Attributes:
        units: steps, or rounds, to be done.
        parts: sums of a unit; the last one decides it.
        aborts: PLANTED: the hub gives a unit up after its last part has gone out.
        tells_early: PLANTED: workers are told of a commit, and forget its samples, before the file has it.
        trusts_own: PLANTED: a hub that resumes takes the step of its own file, not the highest that a worker has applied.
    """

    units: int = 2
    workers: int = 2
    parts: int = 2
    deaths: int = 1
    hub_deaths: int = 1
    joins: int = 0
    aborts: bool = False
    tells_early: bool = False
    trusts_own: bool = False
    log: int = -1
    saved: int = -1
    out: int = 0  # parts of the unit after `log` that have gone out
    ranks: list[_Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = [_Rank() for _ in range(self.workers)]

    def run(self, choose: Choose) -> None:
        """Run until all units are in the log and applied everywhere."""
        while not self._done():
            choice = choose(self._choices, self._key)
            if choice is None:
                raise Violation(WAIT, str(self._key()))
            name, *rest = choice.name
            getattr(self, f"_{name}")(*rest)

    def _done(self) -> bool:
        return self.log == self.saved == self.units - 1 and all(r.applied == self.log for r in self.ranks if r.here)

    def _key(self) -> Hashable:
        held = [r.applied for r in self.ranks if r.here]
        if held and max(held) > self._decided():
            raise Violation(AHEAD, f"applied {max(held)}, decided {self._decided()}")
        if any(r.told > r.applied for r in self.ranks if r.here):
            raise Violation(PARAMETERS, "a commit was told to who could not apply it")
        if len({r.applied for r in self.ranks if r.here and r.applied <= self._floor()}) > 1:
            raise Violation(HISTORY, f"workers stand at {held}, more than a unit apart")
        return (
            self.log, self.saved, self.out, self.deaths, self.hub_deaths, self.joins, tuple(rank.key() for rank in self.ranks)
        )  # fmt: skip

    def _floor(self) -> int:
        return max((r.applied for r in self.ranks if r.here), default=-1) - 2

    def _decided(self) -> int:
        """The highest unit whose last part has gone out: nothing takes it back."""
        return self.log + (self.out == self.parts)

    # ------------------------------------------------------------------------------------------------------ what happens

    def _choices(self) -> list[Choice]:
        everyone = _JOB | {str(n) for n in range(len(self.ranks))}
        here = [n for n, r in enumerate(self.ranks) if r.here]
        out = [Choice(c, frozenset([str(n)])) for n in here for c in self._of_rank(n)]
        out += [Choice(c, everyone) for c in self._of_hub(here)]
        if self.deaths and len(here) > 1:
            out += [Choice(("die", n), everyone, True) for n in here]
        if self.joins and not self.out and self.log < self.units - 1:  # members change between units
            out.append(Choice(("join",), everyone, True))
        if self.hub_deaths and self.log < self.units - 1:
            out.append(Choice(("hub",), everyone, True))
        return out

    def _of_rank(self, n: int) -> list[tuple[Hashable, ...]]:
        rank, out = self.ranks[n], list[tuple[Hashable, ...]]()
        if rank.sent == rank.applied and rank.applied < self.units - 1 and rank.applied <= self.log:
            out.append(("send", n))  # forward and backward of the next unit, before its predecessor's commit is told
        if rank.applied < self._decided() and len(rank.have) == self.parts:
            out.append(("apply", n))
        out += [("hear", n, part) for part in range(self.out) if rank.applied == self.log and part not in rank.have]
        return out

    def _of_hub(self, here: list[int]) -> list[tuple[Hashable, ...]]:
        out: list[tuple[Hashable, ...]] = []
        if self.log < self.units - 1 and self.out < self.parts and all(self.ranks[n].sent > self.log for n in here):
            out.append(("sum",))
        if self.out == self.parts and self.saved == self.log and all(self.ranks[n].applied > self.log for n in here):
            out.append(("commit",))
        if self.saved < self.log:
            out.append(("write",))
        if self.aborts and self.out == self.parts:
            out.append(("abort",))
        return out

    def _send(self, n: int) -> None:
        self.ranks[n].sent += 1

    def _hear(self, n: int, part: int) -> None:
        self.ranks[n].have |= {part}

    def _apply(self, n: int) -> None:
        rank = self.ranks[n]
        rank.applied, rank.have = rank.applied + 1, frozenset()

    def _sum(self) -> None:
        self.out += 1

    def _commit(self) -> None:
        self.log, self.out = self.log + 1, 0
        if self.tells_early:
            self._tell()

    def _write(self) -> None:
        """The file of the ledger has the unit: only now workers may forget its samples."""
        self.saved = self.log
        self._tell()

    def _tell(self) -> None:
        for rank in self.ranks:
            rank.told = self.log if rank.here else rank.told

    def _join(self) -> None:
        """A newcomer gets the state of the last unit in the log."""
        self.joins -= 1
        self.ranks.append(_Rank(self.log, self.log, self.log))

    def _abort(self) -> None:
        self.out = 0
        for rank in self.ranks:
            rank.have, rank.sent = frozenset(), rank.applied

    def _die(self, n: int) -> None:
        self.ranks[n].here = False
        self.deaths -= 1

    def _hub(self) -> None:
        """The hub is gone and comes back: what the workers applied decides, and a unit that none has applied is done again."""
        self.hub_deaths -= 1
        here = [r for r in self.ranks if r.here]
        self.log = self.saved if self.trusts_own else max([self.saved, *(r.applied for r in here)])
        self.out = 0
        kept = {unit for r in here for unit in range(r.told + 1, r.applied + 1)}
        if lost := set(range(self.saved + 1, self.log + 1)) - kept:
            raise Violation(ONCE, f"no one knows the samples of units {sorted(lost)}, which are in the parameters")
        self.saved = self.log
        for rank in here:
            if not self.trusts_own:  # one that is behind is given the state of one that is not
                rank.applied = rank.told = self.log
            rank.sent, rank.have = rank.applied, frozenset()


class GatedStep(_Model):
    """The unit is a step: its last sum carries the finite flag, and the device steps by it."""


class Round(_Model):
    """The unit is a round: members change between rounds only, a worker that is lost takes its part of the round along.

    Fragments go out as they are summed; a round that is given up before its last fragment costs the fragments only.
    """

    def _die(self, n: int) -> None:
        super()._die(n)
        if self.out < self.parts:  # its pseudo-gradient is not whole: the rest do the round's samples again
            self._abort()


MODELS = {
    "model: commit during the next forward, 3 workers": partial(GatedStep, workers=3),
    "model: commit during the next forward": partial(GatedStep, units=3, joins=1),
    "model: rounds in fragments": partial(Round, parts=3, joins=1),
}
