"""How fast the lines to the workers are, asked of the workers themselves: what passed so far may never have filled them.

All are asked at once: what they share, such as this machine's uplink or one tunnel, is shared while they measure, so that the
sum of their rates is what a run can have.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.job import Job, NobodyLeft
from guava_nb.cluster.report_checks import first_invalid_rate
from guava_nb.config.units import show_bytes
from guava_nb.protocol.messages import LineMeasured, MeasureLine

__all__ = ["begin_measuring", "measure_lines"]

#: Enough to tell 10 Mbit/s from 100; a worker's visit costs 2.7 MB at most, also where a tunnel counts bytes.
_BURST_BYTES = 1 << 20
_ANSWERS_S, _ATTEMPTS = 12.0, 2
_ids = itertools.count(1)


def measure_lines(cluster: Cluster) -> list[str]:
    """Let the workers measure whose lines were not measured yet, and remember what they find; at most 12 s an attempt.

    A visit that a break of its line ended is made once more.

    Returns:
        Sentences on what it cost, and on whose line is not known now, and why.

    Raises:
        ClusterError: a run is in progress.
    """
    job, answers = Job(cluster), dict[int, LineMeasured]()
    asked = [rank for rank in cluster.roster.ready() if cluster.roster.members[rank].line == (None, None)]
    with job.attached(), contextlib.suppress(NobodyLeft):
        for _ in range(_ATTEMPTS):
            lacking = {rank for rank in asked if rank not in answers or answers[rank].error}
            if lacking & (job.ready | job.suspects):
                _ask(job, sorted(lacking & (job.ready | job.suspects)), answers)
    spent = sum(max(0, found.used_bytes) for found in answers.values())
    measured = f"The lines were measured just now with {show_bytes(spent)}, which no other figure counts."
    problems = {rank: _note(cluster, rank, answers.get(rank)) for rank in asked}
    unknown = [
        f"The line to {cluster.name(rank)} is not in these rates: {why}." for rank, why in problems.items() if why
    ]
    return [*([measured] if spent else []), *unknown]


def _ask(job: Job, ranks: list[int], answers: dict[int, LineMeasured]) -> None:
    """Have these workers measure their lines all at once, and take the answers of those that give one."""
    number = next(_ids)
    came = job.collect(LineMeasured, lambda found: found.measuring_id == number)
    for rank in ranks:
        job.cluster.send(rank, MeasureLine(number, _BURST_BYTES))
    try:  # a worker whose connections broke comes back, and its answer with it
        job.pump(lambda: all(rank in came or rank not in job.ready | job.suspects for rank in ranks), _ANSWERS_S)
    finally:
        answers.update(came)


def begin_measuring(job: Job, rank: int) -> Callable[[], float | None]:
    """Let a worker measure its line while a job works, unless it has; returns what gives its bytes/s up, None until known."""
    cluster, number = job.cluster, next(_ids)
    member = cluster.roster.members[rank]
    if member.line != (None, None):
        return lambda: member.line[1]
    answers = job.collect(LineMeasured, lambda found: found.measuring_id == number)
    cluster.send(rank, MeasureLine(number, _BURST_BYTES))

    def rate() -> float | None:
        if (found := answers.pop(rank, None)) is not None:
            _note(cluster, rank, found)
        return member.line[1]

    return rate


def _note(cluster: Cluster, rank: int, found: LineMeasured | None) -> str:
    """Remember what a worker measured; returns why that cannot be used, or ""."""
    if found is None:
        return f"no answer within {_ANSWERS_S:g} s"
    if found.error:
        return found.error
    if invalid := first_invalid_rate(found):
        cluster.tell_invalid(rank, "line rate", invalid)
    else:
        cluster.roster.members[rank].line = (found.down_bytes_s, found.up_bytes_s)
    return invalid
