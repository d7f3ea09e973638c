"""Runs one torch.distributed program on workers, one rank each, and ends all ranks when one of them cannot go on.

Knows the records of `code_records`, the roster and the ways between workers; does not know what the program does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from guava_nb.cluster.group_path import Route
from guava_nb.cluster.path_probe import MemberGone, choose
from guava_nb.cluster.program_ranks import PATIENCE_S
from guava_nb.cluster.user_code.code_job import CodeJob
from guava_nb.errors import CollectiveTimeout, GroupBroken, WorkerLost
from guava_nb.protocol.messages import CodeRan, EndProgram, FormGroup, Message, RunProgram

__all__ = ["Program", "ProgramJob"]

#: For all ranks to meet; where they have just reached each other it takes no time.
_MEET_S, _MEET_DIRECT_S = 120.0, 20.0
#: Seconds after which ranks that still work are named, where others have ended.
_TOLD_AFTER_S = 10.0
#: What ranks raise because another one has ended.
_CONSEQUENCES = (GroupBroken.__name__, CollectiveTimeout.__name__, KeyboardInterrupt.__name__)


@dataclass(frozen=True)
class Program:
    """What runs.

    Attributes:
        name: in tracebacks, and as sys.argv[0].
        text: Python source.
        arguments: the rest of sys.argv.
        path: "auto", "relay" or "direct", as for runs.
    """

    name: str
    text: str
    arguments: Sequence[str] = ()
    path: str = "auto"


@dataclass
class ProgramJob(CodeJob):
    """A program on some workers; `orders` is filled when the job has begun.

    Attributes:
        program: what runs.
        ranks: seats of the workers, in order of their rank in the program.
        request_id: of this program at all of them.
        route: the way between them, and why.
    """

    program: Program = field(default_factory=lambda: Program("", ""))
    ranks: Sequence[int] = ()
    request_id: int = 0
    route: Route = field(default_factory=lambda: Route("relay", "guava", ""))
    _away: dict[int, float] = field(default_factory=dict, init=False)
    _is_stopped: bool = field(default=False, init=False)
    _told_at: float = field(default=float("inf"), init=False)

    def run(self) -> None:
        """As for code; then all workers leave the group.

        Raises:
            ClusterError: a run is in progress, or the direct path was asked for and is not open.
            WorkerLost: one was lost before it began.
        """
        self.orders = dict.fromkeys(
            self.ranks, (EndProgram(self.request_id), ())
        )  # until the way between them is known
        try:
            super().run()
        finally:
            self.cluster.send_all(self.ranks, EndProgram(self.request_id))
            self.cluster.relay.forget(self._group)
            if self.failed() or self.missing():  # the way itself may be gone: it is probed again before the next one
                self.cluster.findings.forget(self.ranks)

    @property
    def _group(self) -> str:
        """Prefix of all that belongs to its group at the hub."""
        return f"program-{self.request_id}/"

    def failed(self) -> dict[int, CodeRan]:
        """Return the reports of ranks that did not come to their end, the first one first."""
        ran = ((rank, self.answers[rank].ran) for rank in self.came)
        return {rank: report for rank, report in ran if report is not None and report.type_name}

    def causes(self) -> dict[int, CodeRan]:
        """Return those of them that did not only follow another rank's end."""
        return {rank: report for rank, report in self.failed().items() if report.type_name not in _CONSEQUENCES}

    def _begin(self) -> None:
        try:
            self.route = choose(self._job, self.ranks, self.program.path, may_refuse=True)
        except MemberGone as gone:
            raise WorkerLost(f"{gone}; run it again with the workers that are left") from None
        self.cluster.roster.generation += 1
        self.orders = {rank: (self._order(number, rank), ()) for number, rank in enumerate(self.ranks)}

    def _order(self, number: int, rank: int) -> Message:
        members, seats = self.cluster.roster.members, self.route.seats
        hosts = [members[one].hello.host_id or str(one) for one in self.ranks]
        direct = self.route.path == "direct"
        group = FormGroup(
            run_id=self._group.rstrip("/"), generation=self.cluster.roster.generation, name=self._group, rank=number,
            members=tuple(members[one].name for one in self.ranks), backend=self.route.backend,
            timeout_s=_MEET_DIRECT_S if direct else _MEET_S,
            interface=seats[rank].interface if direct else "",
            addresses=tuple(seats[one].address for one in self.ranks) if direct else (),
        )  # fmt: skip
        return RunProgram(
            request_id=self.request_id, name=self.program.name, text=self.program.text,
            arguments=tuple(self.program.arguments), seat=rank, local_rank=hosts[:number].count(hosts[number]),
            local_size=hosts.count(hosts[number]), group=group,
        )  # fmt: skip

    def _request(self, rank: int) -> int:
        return self.request_id

    def _stop(self) -> list[int]:
        self._is_stopped = True
        return super()._stop()

    def _look(self) -> None:
        if not self._is_stopped and (why := self._hindrance()) and (waiting := self._stop()):
            names = ", ".join(map(self.cluster.name, waiting))
            self.on_output("", [f"{why}, so the program ends on {names} too."])
        waiting = self.missing()
        if len(waiting) == len(self.answers) or self._is_stopped:
            self._told_at = time.monotonic() + _TOLD_AFTER_S
        elif time.monotonic() > self._told_at:
            self._told_at = float("inf")
            names = ", ".join(map(self.cluster.name, waiting))
            self.on_output(
                "", [f"{len(self.answers) - len(waiting)} of {len(self.answers)} ranks have ended; {names} not yet"]
            )

    def _hindrance(self) -> str:
        """Why the others cannot come to their end, "" where they can: a rank failed, was lost, or is away for too long."""
        if failed := self.failed():
            return f"{self.cluster.name(next(iter(failed)))} failed"
        now, here, away = time.monotonic(), self._job.ready, self._job.suspects
        outage = all(rank in away for rank in self.ranks)  # none waits for another: a tunnel that broke is waited for
        for rank in self.missing():
            if rank in here or (rank in away and (outage or self.cluster.seats.is_in_outage(rank))):
                self._away.pop(rank, None)
            elif rank not in away:
                return f"{self.cluster.name(rank)} was lost"
            elif now - self._away.setdefault(rank, now) > PATIENCE_S:
                return f"{self.cluster.name(rank)} is away for more than {PATIENCE_S:g} s"
        return ""
