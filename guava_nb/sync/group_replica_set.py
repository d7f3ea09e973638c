"""The parts of one model that is spread over a process group: the group, and how the whole state is sent and fetched.

A group is good for one generation. A lost member ends it; a new one is formed of the workers that are there, and gets the
state anew: from the members that are left, where one of the mesh's replicas is whole. A mesh with several goes on with
fewer, and takes them back; with ZeRO it waits for a worker, because its replicas share out one state, and memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.group_path import Findings, Route
from guava_nb.cluster.job import Job
from guava_nb.cluster.path_probe import MemberGone, choose
from guava_nb.config.mesh import Mesh
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.errors import ClusterError, ConfigError, PreparationError, RemoteProtocolError, WorkerLost
from guava_nb.hub.relay import Relay
from guava_nb.protocol.messages import Cell, Failure, FailureKind, GroupFormed, RunSpec
from guava_nb.replica.replica import Replica
from guava_nb.sync.group_exchange import GroupExchange
from guava_nb.sync.rank_assignment import FORM_TIMEOUT_S, group_name, group_orders, machines_for, side_by_side
from guava_nb.sync.replica_set import Given, GroupLost, ReplicaSet

__all__ = ["GroupReplicaSet", "outcome_without"]

#: How long a member may be away before its group is given up: the others are blocked meanwhile.
AWAY_LIMIT_S = 8.0
#: Direct groups that broke while all members stayed, after which a run keeps to the relay.
MOST_DIRECT_BREAKS = 2
#: Groups in a row that broke without a step between them while all members stayed: then it is not the weather.
MOST_BREAKS = 3


def _piece(name: str) -> type:
    """The one class that may come in a state; a worker cannot choose another."""
    from guava_nb.parallel.state.full_state import StatePiece

    if name != f"{StatePiece.__module__}:{StatePiece.__qualname__}":
        raise RemoteProtocolError(
            f"a {str(name)[:80]} is inside its part of the state; only pieces of tensors belong there"
        )
    return StatePiece


class GroupReplicaSet(ReplicaSet):
    """All parts of one run.

    Attributes:
        team: worker of each rank of the group that stands; empty when none does.
        generation: of that group.
        route: the way of that group, and why.
    """

    _relay: Relay  # of the cluster, like the findings; known from `attach` on
    _findings: Findings
    exchange = GroupExchange
    _resolve = staticmethod(_piece)

    def __init__(self, run_id: str, spec: RunSpec, cells: Sequence[Cell], master: Replica) -> None:
        """Start with no group.

        Args:
            run_id, spec, cells, master: as for `WholeReplicaSet`.
        """
        assert spec.parallel is not None
        self._shape = shape = spec.parallel
        self._span = shape.pp * shape.tp  # workers of one replica
        elastic = shape.mode == "data" and not shape.zero_stage and self._span == 1
        least = 1 if elastic else shape.dp * self._span
        route = Route("relay", "guava", "no group was formed yet")
        super().__init__(run_id, spec, cells, master, route, elastic=elastic, least=least)
        self._example: Any = None
        self._replicas = shape.dp  # that took part last
        self._retired = False
        self._formed_in = run_id  # the run in which the group that stands was formed
        self.team: tuple[int, ...] = ()
        self.generation = -1
        self._relay_only = ""  # why this run keeps to the relay from now on
        self._formed: dict[int, GroupFormed] = {}
        self._away: dict[int, float] = {}
        self._broken: str = ""
        self._broken_at = 0.0
        self._breaks = self._direct_breaks = 0
        self._broke_after = -1

    @property
    def group_name(self) -> str:
        """Name of the group of this generation at the relay."""
        return group_name(self._formed_in, self.generation)

    def look_at(self, feed: LoaderFeed) -> None:
        """Take what the group must know of the data before it is formed: samples to measure stages with, where asked for.

        Raises:
            ConfigError: stages shall be balanced by time and the loader has no samples that can be taken out of turn.
        """
        if self._shape.balance == "time" and self._example is None:
            batch = feed.example(self._shape.dp * self._shape.micro_batches)
            self._example = batch[0] if self.spec.preprocess is None else batch  # a function wants to see all of it

    # -------------------------------------------------------------------------------------------------------- who takes part

    @property
    def mesh(self) -> Mesh:
        """Sizes of the group that stands."""
        return self._mesh_of(len(self.team))

    def _mesh_of(self, ranks: int) -> Mesh:
        return Mesh(ranks // self._span, self._shape.pp, self._shape.tp)

    def pick(self, ranks: Iterable[int]) -> set[int]:
        """Choose the members of a group among those that are there.

        Raises:
            ConfigError: too few are.
        """
        here = sorted(ranks)
        if len(here) < self.least:
            mesh = Mesh(self._shape.dp, self._shape.pp, self._shape.tp)
            raise ConfigError(
                f"{self._shape.mode} mode: {mesh} needs {self.least} workers, {len(here)} {'is' if len(here) == 1 else 'are'} "
                "here: let more join, or ask for a smaller mesh with %guava_mode"
            )
        replicas = min(len(here) // self._span, self._shape.dp)
        return set(here if self.elastic else here[: replicas * self._span])

    def complete(self, job: Job) -> bool:
        """Whether every member of the group is connected and stands at the last committed step."""
        return bool(self.team) and all(r in job.ready and self.at.get(r) == self.step for r in self.team)

    def connected(self, available: Sequence[int]) -> bool:
        """Whether a step can be issued: every member is connected."""
        return bool(self.team) and sorted(available) == sorted(self.team)

    def newcomers(self, holders: set[int], fit: set[int]) -> list[int]:
        """Return who would make the group larger: a mesh takes in whole replicas, up to its size."""
        others = sorted(fit - set(self.team)) if self.team else []
        if self.elastic:
            return others
        replicas = min(len(others), self._shape.dp * self._span - len(self.team)) // self._span
        return others[: replicas * self._span]

    def check(self, job: Job) -> None:
        """Unwind when the group cannot go on; where a member is gone, that is why others report a break, before and after this.

        Raises:
            GroupLost: a member is lost, or away for too long, or reported that the group broke.
        """
        now = time.monotonic()
        # All are away, so none waits for another; or a tunnel broke: members that are away come back with their parts.
        outage = all(rank in job.suspects for rank in self.team)
        self._spare_silent(job)
        for rank in self.team:
            if rank in job.ready or (rank in job.suspects and (outage or job.cluster.seats.is_in_outage(rank))):
                self._away.pop(rank, None)
            elif rank not in job.suspects:
                self.retire()
                raise GroupLost(f"{job.cluster.name(rank)} was lost: {job.cluster.roster.members[rank].detail}")
            elif now - self._away.setdefault(rank, now) > AWAY_LIMIT_S:
                self.retire()
                raise GroupLost(f"{job.cluster.name(rank)} is away for more than {AWAY_LIMIT_S:g} s")
        if self._broken and now > self._broken_at + AWAY_LIMIT_S:
            raise GroupLost(self._broken)

    def _spare_silent(self, job: Job) -> None:
        """Give up a member that stands still, where others can take its place: its parent process speaks for it."""
        silence_s = job.cluster.silence_s
        silent = [rank for rank in self.team if rank in job.ready and job.cluster.seats.silent_s(rank) >= silence_s]
        if silent and len(job.ready) - len(silent) >= self.least:
            self.retire()
            for rank in silent:
                job.spare(rank, f"silent: nothing came from it for {silence_s:.0f} s", silence_s)
            raise GroupLost(f"{job.cluster.name(silent[0])} has said nothing for {silence_s:.0f} s")

    def note_break(self, job: Job, rank: int, message: Failure) -> None:
        """Note that a member reports a broken group; which member was lost is known in a moment.

        A report on an earlier group, late because its sender was away, says nothing of the one that stands.
        """
        if rank not in self.team or message.generation != self.generation:
            return
        if message.kind is FailureKind.TORN:
            self.drop(rank)
        if not self._broken and not self._retired:  # that a group which was given up is broken is no news
            self._broken, self._broken_at = f"{job.cluster.name(rank)} reports: {message.text}", time.monotonic()

    def retire(self) -> None:
        """Note that the group was woken and is over; its members hold the state until another one is formed."""
        self._retired, self._broken = True, ""

    def disband(self) -> None:
        """Note that the group is given up.

        Raises:
            ClusterError: too many broke in a row without a step between them.
        """
        again = self._broken and self.step == self._broke_after
        self._breaks, self._broke_after = (self._breaks + 1 if again else int(bool(self._broken))), self.step
        reason, team, self.team, self._broken = self._broken, self.team, (), ""
        self._relay.forget(self.group_name)
        if self.route.path == "direct":
            self._note_direct_break(team, reason)
        self._away.clear()
        if self._breaks >= MOST_BREAKS:
            raise ClusterError(
                f"{self._breaks} process groups in a row broke while all workers stayed ({reason}); the path is "
                f"{self.route.path}. {'Try --path relay (path=relay), and look' if self.route.path == 'direct' else 'Look'} "
                "at %guava_log"
            )

    def _note_direct_break(self, team: Sequence[int], reason: str) -> None:
        """Probe again before the next group; a network that lets probes pass and breaks groups is not tried for ever."""
        self._findings.forget(team)
        self._direct_breaks += 1 if reason else 0
        if self._direct_breaks >= MOST_DIRECT_BREAKS:
            self._relay_only = f"{self._direct_breaks} direct groups broke while all workers stayed ({reason})"

    # ------------------------------------------------------------------------------------------------------------ messages

    def attach(self, job: Job) -> None:
        """Handle the messages of this run's parts in that job."""
        super().attach(job)
        self._relay, self._findings = job.cluster.relay, job.cluster.findings
        job.on(GroupFormed, self._on_formed)
        job.on_group_failure = lambda rank, message: self.note_break(job, rank, message)
        job.without = lambda rank: outcome_without(self, job, rank)

    def _on_formed(self, rank: int, message: GroupFormed, payload: memoryview) -> None:
        if message.run_id == self.run_id and message.generation == self.generation and rank in self.team:
            self._formed[rank] = message
            self.layout_text = self.layout_text or message.layout

    # ------------------------------------------------------------------------------------------------------------ the group

    def give(self, job: Job, ranks: Collection[int], state: Callable[[], Mapping[str, Any]], step: int) -> None:
        """Bring workers that have just prepared the run to a state: where their group stands and holds it, nothing is sent.

        Args:
            job, ranks, state, step: as for `WholeReplicaSet.give`.

        Raises:
            GroupLost: as for `load`; or a part of what they held is gone.
        """
        held = {rank for rank in ranks if self.holds(rank)}
        if held and not held == set(ranks) == set(self.team):
            raise GroupLost("a worker was lost before the run could go on from what it held")
        if not held:
            self.team = ()  # of the run before
            self.load(job, ranks, state, step)

    def is_kept(self, cluster: Cluster) -> bool:
        """Whether a further run can go on from what the group holds: it stands, and no worker joined that would enlarge it."""
        ready, holders = cluster.roster.ready(), self.holders(cluster)
        stands = bool(self.team) and not self._retired and not self._broken
        return stands and set(self.team) <= set(holders) & set(ready) and self.pick(ready) == set(self.team)

    def _new(self, run_id: str, master: Replica) -> ReplicaSet:
        made = super()._new(run_id, master)
        assert isinstance(made, GroupReplicaSet)
        made.team, made.generation = self.team, self.generation
        made.route, made.layout_text = self.route, self.layout_text
        made._formed_in, made._relay_only, made._example = self._formed_in, self._relay_only, self._example
        return made

    def _proof(self, rank: int) -> str:
        return self._formed[rank].digest

    def load(self, job: Job, ranks: Iterable[int], state: Given, step: int) -> None:
        """Form a group of these workers, and of those in the present one, and bring it to a state.

        Args:
            job, ranks, state, step: as for `WholeReplicaSet.load`.

        Raises:
            GroupLost: a member was lost meanwhile.
            PreparationError: the model cannot be spread like this.
            TrainingError: ranks that must hold the same parameters do not.
        """
        here = set(ranks) | (set(self.team) & job.ready)
        if len(here) < self.least:
            raise GroupLost("a worker was lost while it prepared the run")
        members = side_by_side(job.cluster.roster.members, self.pick(here))
        try:
            self._form(job, members)
        except BaseException:
            # The others may be blocked in it, and a later abort is for those that hold the run, which none of them does yet.
            self.abort(job, [rank for rank in members if rank in job.ready], "the group was not formed")
            raise
        with self._sending_state(job, members, self.generation, state, step):
            self._pump(job, lambda: all(rank in self._loaded for rank in members))
        self._compare_loaded(job, members)
        self._tell_replicas(job)

    def _tell_replicas(self, job: Job) -> None:
        """A mesh that stood may go on with fewer replicas, unless they share out one state; say how many there are."""
        if self.elastic or self._shape.zero_stage:
            return
        self.least, here, of = self._span, self.mesh.data, self._shape.dp
        if here < of:
            missing = of * self._span - len(self.team)
            job.cluster.notice(
                f"the run goes on with {here} of {of} replicas ({self.mesh}), with the same results, only slower. The "
                f"others take part again as soon as {missing} more workers than its {len(self.team)} are here"
            )
        elif self._replicas < of:
            job.cluster.notice(f"all {of} replicas take part again ({self.mesh})")
        self._replicas = here

    def _form(self, job: Job, members: Sequence[int]) -> None:
        """Form a group on the best way there is; where a direct one fails, on the relay."""
        first = self.generation < 0
        if self._relay_only:
            self.route = Route("relay", "guava", self._relay_only)
        else:
            try:
                self.route = choose(job, members, self._shape.path, may_refuse=first)
            except MemberGone as gone:
                raise GroupLost(str(gone)) from None
        failed = self._try_to_form(job, members)
        if failed and self.route.path == "direct" and any(answer.broken for answer in failed.values()):
            self._fall_back(job, members, failed)
            failed = self._try_to_form(job, members)
        if failed:
            self._refuse(job, failed)
        self._retired = False
        if first and self.layout_text:
            job.cluster.notice(self.layout_text)

    def _try_to_form(self, job: Job, members: Sequence[int]) -> dict[int, GroupFormed]:
        """Send every member its order and wait for the answers; returns those that refuse."""
        roster, route = job.cluster.roster, self.route
        roster.generation += 1
        self.layout_text = ""
        self.generation, self.team, self._formed, self._broken = roster.generation, tuple(members), {}, ""
        self._formed_in = self.run_id
        self.at.clear()  # who held a part of the group before holds nothing of this one
        direct = route.path == "direct"
        machines, phrase = machines_for(roster.members, members, self._mesh_of(len(members)), route)
        if phrase and phrase not in route.reason:
            self.route = route = replace(route, reason=route.reason + phrase)
        orders = group_orders(self.run_id, self.generation, members, route, machines, roster.members, self._example)
        for rank, order, buffers in orders:
            job.cluster.send(rank, msgspec.structs.replace(order, want_digest=self._proves), buffers)
        answered = self._pump(
            job,
            lambda: any(not f.ok for f in self._formed.values()) or len(self._formed) == len(members),
            FORM_TIMEOUT_S if direct else None,
        )
        failed = {rank: answer for rank, answer in self._formed.items() if not answer.ok}
        if not answered:
            late = next(rank for rank in members if rank not in self._formed)
            text = f"it did not take its place within {FORM_TIMEOUT_S:g} s"
            failed[late] = GroupFormed(
                run_id=self.run_id, generation=self.generation, ok=False, problem=text, broken=True
            )
        return failed

    def _fall_back(self, job: Job, members: Sequence[int], failed: Mapping[int, GroupFormed]) -> None:
        """Keep to the relay, and wake the members that still wait for the direct group."""
        rank, answer = next((rank, answer) for rank, answer in failed.items() if answer.broken)
        job.cluster.findings.forget(members)
        self._relay_only = f"the direct group could not be formed ({job.cluster.name(rank)}: {answer.problem})"
        job.cluster.notice(f"{self._relay_only}; this run goes through the orchestrator")
        self.abort(job, members, "the direct group is given up")
        job.cluster.relay.forget(self.group_name)
        self.route = Route("relay", "guava", self._relay_only)

    def _refuse(self, job: Job, failed: Mapping[int, GroupFormed]) -> None:
        rank, answer = next(iter(failed.items()))
        if answer.broken:
            raise GroupLost(f"{job.cluster.name(rank)} reports: {answer.problem}")
        raise PreparationError(f"{job.cluster.name(rank)} cannot take its part of the model: {answer.problem}")

    def _pump(self, job: Job, until: Callable[[], bool], timeout_s: float | None = None) -> bool:
        def condition() -> bool:
            self.check(job)
            return until()

        return job.pump(condition, timeout_s)

    def bring_up(self, job: Job) -> None:
        """Have a group that stands at the last committed step, by what is there or by forming a new one.

        Raises:
            ConfigError: too few workers are here.
        """
        if self.complete(job) and not self._retired:
            return
        state = self.fetch(job)
        members = self.pick(job.ready)
        self.require(job, members)
        self.team = ()
        self.load(job, members, state, self.step)

    # ------------------------------------------------------------------------------------------------------------ the state

    def in_step(self, job: Job) -> list[int]:
        """Return the members when all of them are connected and in step, else none: only together they are the model."""
        return sorted(self.team) if self.complete(job) else []

    def givers(self, job: Job) -> list[int]:
        """Return them, or where each has all of the model those that stand at the last committed step."""
        return super().in_step(job) if self.elastic else self.in_step(job)

    @property
    def votes(self) -> bool:
        """Whether ranks decide on steps by themselves: they reach each other, and the furthest can give the others its state."""
        return self.elastic and self.route.path == "direct" and not self.spec.lockstep and self.spec.precision != "fp16"

    def _may_have(self, job: Job) -> bool:
        known = self.team or tuple(self.at)
        return bool(known) and all(rank in job.ready | job.suspects and rank in self.at for rank in known)

    def _holders_with(self, rank: int) -> Sequence[int]:
        if self._shape.zero_stage or rank not in self.team:
            return [rank] if self.elastic else self.team
        first = self.team.index(rank) // self._span * self._span
        return self.team[first : first + self._span]

    def _on_no_state(self, parts: Sequence[Mapping[str, Any] | None]) -> None:
        if any(part is None for part in parts):
            self.at.clear()

    def _take_in(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        self.master.load_state(self.join(parts))
        return self.master.state()

    def join(self, parts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Make one state of the parts that workers hold."""
        return _together(parts)

    def rescue(self, job: Job) -> bool:
        """Before a new group: take the state of the last committed step from the members that are left, if all of it is there."""
        if self.master_step == self.step:
            return True
        for first in self.team[:: self._span]:
            holders = self._holders_with(first)
            if all(rank in job.ready and self.at.get(rank) == self.step for rank in holders):
                try:
                    return self._fetch_from(job, first, AWAY_LIMIT_S) is not None
                except WorkerLost:
                    return False
        return False


def outcome_without(replicas: GroupReplicaSet, job: Job, rank: int) -> str:
    """Say with whom a new group is formed where a member's process is ended; "" where it is no member."""
    others, here = job.ready - {rank}, replicas.mesh.data
    if rank not in replicas.team:
        return ""
    if len(others) < replicas.least:
        return "the run then waits for a worker to join, and goes on by itself"
    left = replicas._mesh_of(len(replicas.pick(others))).data
    return "the others then go on " + (
        f"with {left} of {here} replicas" if left < here else "with another worker in its place"
    )


def _together(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    from guava_nb.parallel.state.full_state import assemble, assemble_optimizer

    model = {**assemble([part["model"] for part in parts]), **parts[0].get("extra", {})}
    hidden = {name: value for part in reversed(parts) for name, value in part.get("buffers", {}).items()}
    state: dict[str, Any] = {"model": model, "buffers": hidden}
    if "optimizer" in parts[0]:
        state["optimizer"] = assemble_optimizer([part["optimizer"] for part in parts])
        state["scheduler"] = next((part["scheduler"] for part in parts if part["scheduler"] is not None), None)
        state["scaler"] = parts[0]["scaler"]
    return state
