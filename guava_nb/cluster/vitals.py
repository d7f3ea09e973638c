"""What workers that do not answer are at, by the processes that watch them: stopped, standing still, computing. Pure."""

from __future__ import annotations

from guava_nb.cluster.report_checks import is_valid
from guava_nb.protocol.messages import Vitals

__all__ = ["VitalsBook"]

#: A silence is told after so many seconds; shorter ones are common while a machine is busy.
TELL_S = 10.0
#: A report says something about the present for so long.
_FRESH_S = 30.0
#: A process that takes less of one core stands still.
_IDLE_CORES = 0.1


class VitalsBook:
    """The newest report on each worker. Thread-safe enough: each entry is replaced as a whole."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._newest: dict[int, tuple[float, Vitals]] = {}
        self._told: dict[int, tuple[float, str]] = {}

    def take(self, rank: int, vitals: Vitals, now: float) -> str:
        """Take a report, on a monotonic clock; returns what a person should hear of it, "" for nothing new."""
        if not all(map(is_valid, (vitals.quiet_s, vitals.stuck_s, vitals.busy_cores, vitals.keeps_s))):
            return ""
        self._newest[rank] = now, vitals
        since, told = self._told.get(rank, (now - vitals.quiet_s, ""))
        if not vitals.quiet_s:
            self._told.pop(rank, None)
            return f"runs again, after {now - since:.0f} s" if told else ""
        sentence = _sentence(vitals)
        if vitals.quiet_s < TELL_S or sentence == told:
            return ""
        self._told[rank] = since, sentence
        return f"has said nothing for {vitals.quiet_s:.0f} s: {sentence}. It keeps its seat for {vitals.keeps_s:.0f} s more"

    def text(self, rank: int, now: float) -> str:
        """Return what a worker's process does, seen from outside; "" when nothing is known of the present."""
        at, vitals = self._newest.get(rank, (float("-inf"), None))
        return "" if vitals is None or now - at > _FRESH_S else _sentence(vitals)

    def forget(self, rank: int) -> None:
        """Its session is over."""
        self._newest.pop(rank, None)
        self._told.pop(rank, None)


def _sentence(vitals: Vitals) -> str:
    busy = vitals.busy_cores
    if vitals.is_stopped:
        return (
            f"its process is stopped (a signal, a debugger, a frozen container); `kill -CONT {vitals.pid}` on its machine "
            "lets it go on"
        )
    holds = " in one call that holds Python's lock" if vitals.quiet_s else ""
    if busy is None:
        return f"its process is there, and its Python code {'does not run' if holds else 'runs'}"
    if busy >= _IDLE_CORES:
        return f"its process computes{holds or f' on {busy:.1f} cores'}" + (
            " (loading, compiling, a long regular expression)" if holds else ""
        )
    return (
        f"its process stands still{holds} (a deadlock, a driver, or it waits for another); if that does not pass, end it "
        f"there: `kill -9 {vitals.pid}`"
    )
