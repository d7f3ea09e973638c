"""Probes whether workers reach each other, and chooses the path of a process group; the orchestrator's side."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.group_path import Finding, Route, decide, on_one_host, unlike_devices
from guava_nb.cluster.job import Job
from guava_nb.errors import ClusterError, RemoteProtocolError
from guava_nb.protocol.messages import ProbeDial, ProbeEnd, ProbeListen, ProbeListening, ProbeReport, ProbeTarget

__all__ = ["MemberGone", "choose", "cuda_reach"]

#: For a probe in all; its two halves share it.
PROBE_S = 3.0
#: For one dialling: the answer of a machine that is there takes one round trip.
DIAL_S = 1.2

OPEN_TO_ALL = (
    "the workers reach each other on public addresses, where any machine can dial the open sockets of gloo and NCCL; "
    "--path direct (path='direct') uses them nevertheless"
)

_ids = itertools.count(1)


class MemberGone(Exception):  # noqa: N818 - not an error yet: the others can be asked anew
    """A worker was lost, or left, while it was probed: what the others found says nothing of the network."""


def choose(job: Job, ranks: Sequence[int], wanted: str, may_refuse: bool) -> Route:
    """Choose the path of a group; pumps the job while members are probed that were not probed before.

    Args:
        wanted: "auto", "relay" or "direct".
        may_refuse: raise when "direct" cannot be had, instead of falling back.

    Raises:
        ClusterError: the direct path was asked for, and it is not open.
        MemberGone: one of them is not here any more.
    """
    if wanted == "relay":
        return Route("relay", "guava", "path='relay' was asked for")
    if len(ranks) < 2:
        return Route("relay", "guava", "there is only one worker")
    members, findings = job.cluster.roster.members, job.cluster.findings
    hellos = [members[rank].hello for rank in ranks]
    obstacle = unlike_devices([members[rank].name for rank in ranks], hellos)
    probed = not obstacle
    if probed and frozenset(ranks) not in findings.found:
        found = _probe(job, ranks)
        if gone := [members[rank].name for rank in ranks if rank not in job.ready]:
            raise MemberGone(f"{' and '.join(gone)} went away before the group was formed")
        findings.found[frozenset(ranks)] = found
    finding = findings.found[frozenset(ranks)] if probed else Finding({}, obstacle)
    if finding.seats and (finding.private or wanted == "direct"):
        backend = "nccl" if hellos[0].device.startswith("cuda") else "gloo"
        return Route("direct", backend, f"all workers reach each other {finding.where}", finding.seats)
    obstacle = finding.obstacle or OPEN_TO_ALL
    if wanted == "direct" and may_refuse:
        raise ClusterError(
            f"{obstacle}. path='direct' needs workers that reach each other: open the ports of their firewalls to each "
            "other, or use --path auto (path='auto'), which goes through the orchestrator if they do not"
        )
    if (probed or wanted == "direct") and findings.is_first(job.run_id, ranks):
        job.cluster.notice(f"{obstacle}; the group goes through the orchestrator")
    return Route("relay", "guava", obstacle)


def _probe(job: Job, ranks: Sequence[int]) -> Finding:
    """Ask all members to listen, then each to dial all others; bounded by `PROBE_S`."""
    cluster, number, deadline = job.cluster, next(_ids), time.monotonic() + PROBE_S
    secret_of = {rank: secrets.token_bytes(16) for rank in ranks}
    one_host = on_one_host([cluster.roster.members[rank].hello for rank in ranks])
    listening = job.collect(ProbeListening, lambda message: message.probe_id == number and _has_addresses(message))
    reports = job.collect(ProbeReport, lambda message: message.probe_id == number)

    def wait_for(answers: Mapping[int, object]) -> None:
        job.pump(
            lambda: all(rank in answers or rank not in job.ready for rank in ranks),
            max(0.01, deadline - time.monotonic()),
        )

    try:
        for rank in ranks:
            cluster.send(rank, ProbeListen(number, secret_of[rank], one_host, 2 * PROBE_S))
        wait_for(listening)
        targets = {rank: ProbeTarget(rank, secret_of[rank], found.addresses) for rank, found in listening.items()}
        for rank in ranks:
            others = tuple(target for other, target in targets.items() if other != rank)
            cluster.send(rank, ProbeDial(number, others, DIAL_S))
        wait_for(reports)
    finally:
        cluster.send_all(ranks, ProbeEnd(number))
    return decide({rank: cluster.name(rank) for rank in ranks}, listening, reports, one_host)


def _has_addresses(message: ProbeListening) -> bool:
    """Check where a worker says it listens.

    Raises:
        RemoteProtocolError: at no address.
    """
    for where in message.addresses:
        try:
            ipaddress.ip_address(where.address)
        except ValueError as error:
            raise RemoteProtocolError(f"it listens at {where.address[:80]!r}") from error
    return True


def cuda_reach(cluster: Cluster) -> Callable[[], bool]:
    """Return a question: do all workers have GPUs of their own and reach each other, so that NCCL can serve them?"""

    def ask() -> bool:
        ranks = cluster.roster.ready()
        hellos = [cluster.roster.members[rank].hello for rank in ranks]
        if not all(hello.device.startswith("cuda") and hello.program == "spawned" for hello in hellos):
            return False
        job = Job(cluster)
        with job.attached(), contextlib.suppress(MemberGone):
            return choose(job, ranks, "auto", may_refuse=False).path == "direct"
        return False

    return ask
