"""What is walked: in every run of the tests, and by the command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.explorer.replica import FAILURES
from tests.support.explorer.world import Configuration

__all__ = ["BREAKS", "COVERING", "OWING", "WHOLE", "Case"]

STEPS = ((0, 1, 2), (3, 4, 5), (6, 7, 8))
_SMALL = ((0, 1),)
_ANY = {"cut": 2, "die": 2, "leave": 2, "join": 2, "late": 1}
_STOPS = {"cut": 2, "join": 2, "hub": 2, "leave": 1, "interrupt": 2}
_FAILS = dict.fromkeys(FAILURES, 1)
_MIDWAY = {"undone": 1, "schedule": 1}
_CUT_OFF = {"cut": 2, "interrupt": 2}
#: Exchange and site of the optimizer.
_WAYS = (
    ("star", "workers"),
    ("star", "orchestrator"),
    ("group", "workers"),
    ("voting", "workers"),
    ("parts", "workers"),
)
#: Rounds of local steps that go on while their sum travels.
_EARLY: dict[str, Any] = {"early": True, "workers": 3, "batches": STEPS, "buckets": 2, "snapshot_every": 2}
#: Rounds whose messages leave most out, which their senders owe: a batch has samples for more than one message.
OWING: dict[str, Any] = {
    "owes": True,
    "undoes": False,
    "batches": ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)),
    "snapshot_every": 2,
}
_OWING_3: dict[str, Any] = {
    **OWING,
    "workers": 3,
    "buckets": 2,
    "batches": tuple(tuple(range(n, n + 6)) for n in (0, 6, 12)),
}
BREAKS = {"cut": 3, "late": 1}


@dataclass(frozen=True)
class Case:
    """One configuration and how it is walked.

    Attributes:
        runs: so many paths drawn at random; 0 walks all of them.
        limit_s: processor time.
    """

    name: str
    configuration: Configuration
    runs: int = 0
    limit_s: float = 240.0


def _all(name: str, limit_s: float = 240.0, **changes: object) -> Case:
    return Case(name, Configuration(**changes), 0, limit_s)  # type: ignore[arg-type]


def _drawn(name: str, runs: int, **changes: object) -> Case:
    return Case(name, Configuration(**changes), runs)  # type: ignore[arg-type]


def _covering() -> list[Case]:
    out = [
        _all("lone worker", workers=1, faults={"cut": 1}),
        _all("lone worker that waits for each commit", workers=1, lockstep=True, faults={"cut": 1}),
        _drawn(
            "lone worker, cut off when the run stops",
            60,
            workers=1,
            batches=STEPS,
            faults={"cut": 2, "interrupt": 2},
            together=3,
        ),
        _all("group: one step, one worker breaks off in it", batches=_SMALL, exchange="group", faults={"torn": 1}),
        _all("star, rounds begun early: 2 steps", early=True),
        _drawn("star, rounds begun early: 3 workers, 3 steps", 30, faults=_ANY, together=5, **_EARLY),
        _drawn(
            "star, rounds begun early: 3 workers, 3 steps, stops", 20, faults=_STOPS, together=4, save_every=1, **_EARLY
        ),
        _drawn("star, messages that leave something out: 2 workers, 3 steps", 40, faults=BREAKS, together=4, **OWING),
        _drawn("star, messages that leave something out: 3 workers, 3 steps", 20, faults=_ANY, together=5, **_OWING_3),
    ]
    for exchange, site in _WAYS:
        way = {"exchange": exchange, "site": site}
        name = f"{exchange}, optimizer at {site}"
        out.append(_all(f"{name}: one step, nothing lost, unasked messages", batches=_SMALL, unasked=True, **way))
        out.append(_all(f"{name}: one step, one lost", batches=_SMALL, faults={"die": 1}, **way))
        out.append(_all(f"{name}: one step, the user's code fails", batches=_SMALL, faults=_MIDWAY, **way))
        deep = {"workers": 3, "batches": STEPS, "buckets": 2, "snapshot_every": 2, **way}
        out.append(_drawn(f"{name}: 3 workers, 3 steps", 20, faults=_ANY, together=5, **deep))
        out.append(_drawn(f"{name}: 3 workers, 3 steps, stops", 20, faults=_STOPS, together=4, save_every=1, **deep))
        out.append(_drawn(f"{name}: 3 workers, 3 steps, failures", 20, faults=_FAILS | _STOPS, together=4, **deep))
    return out


def _whole() -> list[Case]:
    out = [
        _all(f"star, rounds begun early: 2 workers, 2 steps, {fault}", early=True, faults={fault: 1})
        for fault in ("cut", "die", "leave", "join", "forward", "nan")
    ]
    out.append(
        _drawn("star, rounds begun early: 3 workers, failures", 2000, faults=_FAILS | _ANY, together=5, **_EARLY)
    )
    for name, owing in (("2 workers", OWING), ("3 workers", _OWING_3)):
        out.append(
            _drawn(f"star, messages that leave something out: {name}, breaks", 2000, faults=BREAKS, together=4, **owing)
        )
        out.append(_drawn(f"star, messages that leave something out: {name}", 2000, faults=_ANY, together=5, **owing))
    for exchange, site in _WAYS:
        way = {"exchange": exchange, "site": site}
        name = f"{exchange}, optimizer at {site}"
        out.append(_all(f"{name}: 2 workers, 2 steps, 2 buckets", buckets=2, **way))
        out.append(_all(f"{name}: 3 workers, 3 steps", workers=3, batches=STEPS, **way))
        for fault in ("cut", "die", "leave", "join", "hub"):
            more = {"faults": {fault: 1}, "save_every": 1 if fault == "hub" else 0}
            out.append(_all(f"{name}: 2 workers, 2 steps, {fault}", ahead=0, **more, **way))
        for undoes in (True, False):
            how = "the user's code fails" + ("" if undoes else ", and no step can be undone")
            out.append(_all(f"{name}: 2 workers, 2 steps, {how}", faults=_FAILS, undoes=undoes, **way))
        out.append(
            _all(f"{name}: lone worker, 3 steps, any two", workers=1, batches=STEPS, faults=_ANY, together=2, **way)
        )
        deep = {"workers": 3, "batches": STEPS, "buckets": 2, "epochs": 2, "snapshot_every": 2, **way}
        out.append(_drawn(f"{name}: 3 workers, 2 epochs", 3000, faults=_ANY, together=6, **deep))
        out.append(_drawn(f"{name}: 3 workers, stops", 3000, faults=_STOPS, together=5, save_every=1, **deep))
        for workers in (1, 3):
            fails = {**deep, "workers": workers, "faults": _FAILS | _ANY | {"interrupt": 2}}
            out.append(_drawn(f"{name}: {workers} workers, failures", 2000, together=5, **fails))
    return out


COVERING, WHOLE = _covering(), _whole()
