"""Probes whether workers reach each other, and chooses the way of a process group; the orchestrator's side.

A finding is kept for its set of members until a group on it fails.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from guava_nb.cluster.group_path import Finding, Route, decide, on_one_host, unlike_devices
from guava_nb.errors import ClusterError
from guava_nb.protocol.messages import (
    Message,
    ProbeDial,
    ProbeEnd,
    ProbeListen,
    ProbeListening,
    ProbeReport,
    ProbeTarget,
)

if TYPE_CHECKING:
    from guava_nb.cluster.cluster import Cluster
    from guava_nb.cluster.job import Job

__all__ = ["Routes", "cuda_reach"]

#: For a probe in all; its two halves share it.
PROBE_S = 3.0
#: For one dialling: the answer of a machine that is there takes one round trip.
DIAL_S = 1.2

OPEN_TO_ALL = (
    "the workers reach each other on public addresses, where gloo's and NCCL's open sockets are anybody's to dial; "
    "--path direct (path='direct') takes them all the same"
)


class Routes:
    """Findings of a session, by set of members."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._found: dict[frozenset[int], Finding] = {}
        self._told: set[tuple[str, frozenset[int]]] = set()  # of the newest run: what a run says is forgotten with it
        self._ids = itertools.count(1)

    def forget(self, ranks: Iterable[int]) -> None:
        """A group of these members failed: probe again before the next one."""
        self._found.pop(frozenset(ranks), None)

    def choose(self, job: Job, ranks: Sequence[int], wanted: str, may_refuse: bool) -> Route:
        """Choose the way of a group; pumps the job while members are probed.

        Args:
            wanted: "auto", "relay" or "direct".
            may_refuse: raise when "direct" cannot be had, instead of falling back.

        Raises:
            ClusterError: the direct path was asked for, and it is not open.
        """
        if wanted == "relay":
            return Route("relay", "guava", "path='relay' was asked for")
        if len(ranks) < 2:
            return Route("relay", "guava", "one worker alone has nobody to reach")
        members = job.cluster.roster.members
        hellos = [members[rank].hello for rank in ranks]
        obstacle = unlike_devices([members[rank].name for rank in ranks], hellos)
        probed = not obstacle
        finding = Finding({}, obstacle) if obstacle else self._finding(job, ranks)
        if finding.seats and (finding.private or wanted == "direct"):
            backend = "nccl" if hellos[0].device.startswith("cuda") else "gloo"
            return Route("direct", backend, f"all workers reach each other {finding.where}", finding.seats)
        obstacle = finding.obstacle or OPEN_TO_ALL
        if wanted == "direct" and may_refuse:
            raise ClusterError(
                f"{obstacle}. path='direct' needs workers that reach each other: open the ports of their firewalls to each "
                "other, or use --path auto (path='auto'), which goes through the orchestrator where it must"
            )
        told = (job.run_id, frozenset(ranks))
        if (probed or wanted == "direct") and told not in self._told:
            self._told = {earlier for earlier in self._told if earlier[0] == job.run_id} | {told}
            job.cluster.notice(f"{obstacle}; the group goes through the orchestrator")
        return Route("relay", "guava", obstacle)

    def _finding(self, job: Job, ranks: Sequence[int]) -> Finding:
        key = frozenset(ranks)
        if key not in self._found:
            self._found[key] = _Probe(job, ranks, next(self._ids)).run()
        return self._found[key]


class _Probe:
    """One probe of a set of members."""

    def __init__(self, job: Job, ranks: Sequence[int], probe_id: int) -> None:
        self._job, self._ranks, self._id = job, tuple(ranks), probe_id
        self._secrets = {rank: secrets.token_bytes(16) for rank in ranks}
        self._listening: dict[int, ProbeListening] = {}
        self._reports: dict[int, ProbeReport] = {}
        self._deadline = time.monotonic() + PROBE_S

    def run(self) -> Finding:
        """Ask everybody to listen, then everybody to dial everybody else; bounded by `PROBE_S`."""
        job, cluster = self._job, self._job.cluster
        one_host = on_one_host([cluster.roster.members[rank].hello for rank in self._ranks])
        job.on(ProbeListening, self._on_listening)
        job.on(ProbeReport, self._on_report)
        try:
            for rank in self._ranks:
                cluster.send(rank, ProbeListen(self._id, self._secrets[rank], one_host, 2 * PROBE_S))
            self._wait(self._listening)
            for rank in self._ranks:
                cluster.send(rank, ProbeDial(self._id, self._targets(rank), DIAL_S))
            self._wait(self._reports)
        finally:
            cluster.send_all(self._ranks, ProbeEnd(self._id))
        names = {rank: cluster.name(rank) for rank in self._ranks}
        return decide(names, self._listening, self._reports, one_host)

    def _wait(self, answers: Mapping[int, object]) -> None:
        self._job.pump(
            lambda: all(rank in answers or rank not in self._job.ready for rank in self._ranks),
            max(0.01, self._deadline - time.monotonic()),
        )

    def _targets(self, rank: int) -> tuple[ProbeTarget, ...]:
        return tuple(
            ProbeTarget(other, self._secrets[other], found.addresses)
            for other, found in self._listening.items()
            if other != rank
        )

    def _on_listening(self, rank: int, message: Message, payload: memoryview) -> None:
        assert isinstance(message, ProbeListening)
        if message.probe_id == self._id:
            self._listening[rank] = message

    def _on_report(self, rank: int, message: Message, payload: memoryview) -> None:
        assert isinstance(message, ProbeReport)
        if message.probe_id == self._id:
            self._reports[rank] = message


def cuda_reach(cluster: Cluster) -> Callable[[], bool]:
    """Return a question: do all workers have GPUs of their own and reach each other, so that NCCL can serve them?"""

    def ask() -> bool:
        from guava_nb.cluster.job import Job

        ranks = cluster.roster.ready()
        hellos = [cluster.roster.members[rank].hello for rank in ranks]
        if not all(hello.device.startswith("cuda") and hello.program == "spawned" for hello in hellos):
            return False
        job = Job(cluster)
        with job.attached():
            return cluster.routes.choose(job, ranks, "auto", may_refuse=False).path == "direct"

    return ask
