"""One small run as a system: what may happen next, and what happens then."""

from __future__ import annotations

import gc
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import msgspec

from guava_nb.errors import ConfigError, LinkBroken, RemoteError, SamplesKill, TrainingError, WorkerLost
from guava_nb.link.session_events import MessageArrived, SessionClosed, SessionResumed, SessionSuspect
from guava_nb.protocol.messages import Channel, Hello
from guava_nb.sync import handover
from tests.support.explorer import invariants
from tests.support.explorer.fingerprint import world_key
from tests.support.explorer.orchestrator import (
    CLOCK,
    Checkpoint,
    Explored,
    ExploredFetch,
    ExploredJob,
    QuietCluster,
    plan_for,
    replica_set_for,
    spec_for,
    without_threads,
)
from tests.support.explorer.replica import FAILURES, OWING, CountingReplica, EarlyReplica, OwingReplica, after_steps
from tests.support.explorer.search import Choice, Choose, Report, Stop, Violation, explore, wander
from tests.support.explorer.unasked import try_unasked
from tests.support.explorer.worker import Groups, Worker

__all__ = ["Configuration", "World", "walk"]


@dataclass(frozen=True)
class Configuration:
    """What is walked.

    Attributes:
        workers: at the start.
        batches: sample ids of each batch of an epoch, one batch a step.
        exchange: "star", "group", "voting" or "parts".
        site: of the optimizer.
        faults: how often each may happen on one path: "cut" (connections break; then it comes back or is lost), "die", "leave",
            "join", "hub" (the orchestrator dies and resumes from its checkpoint), "late" (10 s pass), "interrupt", and what the
            user's code does (`FAILURES`). A run that failed or was stopped is followed by one that goes on.
        together: faults of all kinds on one path.
        ahead: steps issued ahead.
        buckets: of the gradient.
        first, last: faults happen only while so many steps are committed.
        undoes: a worker can take back its last step.
        unasked: in every state, workers also say what they were not asked.
        eager: a worker hears at once what only waits in it (`QUIET`), so that the moment of hearing is no choice.
        lockstep: a lone worker waits for the commit of each step, as with a callback that looks at each.
        early: a worker may begin a step before the sum of the one before is here (rounds of local steps with a delay).
        owes: messages leave out a part of what they should have, which their sender owes (rounds with sparse messages).
    """

    workers: int = 2
    batches: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3))
    epochs: int = 1
    exchange: str = "star"
    site: str = "workers"
    faults: dict[str, int] = field(default_factory=dict)
    together: int = 1
    ahead: int = 1
    buckets: int = 1
    snapshot_every: int = 0
    save_every: int = 0
    first: int = -1
    last: int = 99
    unasked: bool = False
    undoes: bool = True
    eager: bool = True
    early: bool = False
    owes: bool = False
    lockstep: bool = False

    @property
    def kind(self) -> type[CountingReplica]:
        """Of the replicas."""
        return OwingReplica if self.owes else EarlyReplica if self.early else CountingReplica

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        return sum(map(len, self.batches))

    def __hash__(self) -> int:
        return id(self)


class HubDied(BaseException):  # noqa: N818 - no handler of the code under test may catch it
    """The orchestrator's process is gone."""


class World:
    """Orchestrator, workers and the lines between them.

    Attributes:
        log: the samples of each committed step, along the lineage.
        expected: the parameters after each step of a plain run, before the first one first.
        left: faults that may still happen.
        runs: how often a run was started.
        active: the job that has the mailbox: of the run, or one that fetches the state after it.
        before: faults that could still happen when the run began.
        longest: so many steps the log of this run has had.
    """

    active: Explored

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = config = configuration
        self.clock, self.groups = CLOCK, Groups()
        self.clock.now = 0.0
        self.workers: list[Worker] = []
        self.log: list[tuple[int, ...]] = []
        self.expected = after_steps([list(ids) for ids in config.batches] * config.epochs, config.samples)
        self.left = {**config.faults, "": config.together}
        self.ticks = self.runs = 0
        self._ranks: dict[int, Worker] = {}
        self._over: BaseException | None = None

    # ----------------------------------------------------------------------------------------------------------- the run

    def run(self, choose: Choose) -> None:
        """Run until a run is done, or waits for a worker that does not come."""
        self._choose = choose
        self._restart(None)
        while True:
            try:
                state = self._finish()
                invariants.at_the_end(self, state)
                if state == "done":
                    return
                self._begin(self._held(state))
            except HubDied:
                self._restart(self.job.saved)

    def _restart(self, saved: Checkpoint | None) -> None:
        """Have the orchestrator and all workers begin anew."""
        config, self._over = self.configuration, None
        for worker in self.workers:
            worker.end()
        self.groups.brought.clear()
        self.groups.met.clear()
        self.groups.refused.clear()
        self.cluster = QuietCluster()
        self.workers = []
        for _ in range(config.workers):
            self._join()
            self._take(self.workers[-1], Channel.CONTROL)
        self._begin(saved)

    def _begin(self, saved: Checkpoint | None) -> None:
        """Begin a run that goes on from there."""
        config = self.configuration
        self.runs, self.before = self.runs + 1, dict(self.left)
        self.log = [] if saved is None else list(saved.log)
        spec = msgspec.structs.replace(spec_for(config.exchange, config.site, config.workers), lockstep=config.lockstep)
        spec = msgspec.structs.replace(spec, rounds=OWING) if config.owes else spec
        replicas = replica_set_for(
            spec, config.samples, config.buckets, saved, f"run-{self.runs}", config.exchange == "voting", config.kind
        )
        plan = plan_for(
            [list(ids) for ids in config.batches], config.epochs, saved, prefetch_steps=config.ahead,
            snapshot_every_steps=config.snapshot_every, save_every_steps=config.save_every,
        )  # fmt: skip
        self.active = self.job = ExploredJob(replicas, plan, self.cluster, self._next_event)
        self.job.saved, self.job.log = saved, lambda: list(self.log)
        self.longest = len(self.log)
        self._keep_log()

    def _held(self, ended: str) -> Checkpoint:
        """What is left of a run that has ended like this: it must be the state of the last step that counts."""
        replicas = self.job.replica_set

        def fetching(cluster: Any) -> ExploredFetch:
            self.active = job = ExploredFetch(cluster)
            job.expect(self._next_event)
            return job

        try:
            with mock.patch.object(handover, "_Fetching", fetching):
                state = handover.fetch_between_runs(replicas, self.cluster, 5.0)
        except (RemoteError, WorkerLost) as error:
            # A person who stops twice does not wait for the last step, and is told here if it failed.
            if self._lost_any() or (ended == "stopped" and self._has_failed()):
                raise Stop(1) from error
            raise Violation(invariants.GOES_ON, f"the run {ended} and no worker was lost: {error}") from error
        invariants.is_whole(self, state)
        return Checkpoint(state=state, step=replicas.step, position=self.job.where(), log=list(self.log))

    def _lost_any(self) -> bool:
        """Whether a worker is lost, away or has left, so that what only it held is lost with it."""
        return any(not worker.alive or worker.line.away or worker.line.closed for worker in self.workers)

    def _keep_log(self) -> None:
        exchange, replicas = self.job.window.exchange, self.job.replica_set
        account, take_back = exchange._on_commit, replicas.take_back

        def on_commit(step: Any, *rest: Any) -> None:
            invariants.one_history(self, step.machine.step)
            self.log.append(tuple(step.sample_ids()))
            self.longest = max(self.longest, len(self.log))
            account(step, *rest)

        def back(step: int) -> None:
            del self.log[step + 1 :]
            take_back(step)

        exchange._on_commit, replicas.take_back = on_commit, back  # type: ignore[method-assign]

    def _finish(self) -> str:
        try:
            return self.job.go()
        except ConfigError as error:
            if self.job.run.history or self.job.run.state != "preparing" or "let more join" not in str(error):
                raise Violation(invariants.GOES_ON, f"{type(error).__name__}: {error}") from error
            raise Stop(1) from error  # too few workers were here: it did not begin
        except SamplesKill as error:  # three workers were lost over the same samples: right, if not lucky
            raise Stop(1) from error
        except Exception as error:
            if isinstance(error, RemoteError | TrainingError) and self._has_failed():
                return "failed"
            raise Violation(invariants.GOES_ON, f"{type(error).__name__}: {error}") from error

    def _has_failed(self) -> bool:
        """Whether the user's code has raised in this run."""
        return bool(self.happened() & set(FAILURES))

    def happened(self) -> set[str]:
        """What faults have happened in this run."""
        return {kind for kind, times in self.before.items() if kind and self.left[kind] < times}

    def _next_event(self) -> None:
        """Called by the job while it waits: let something happen, until there is an event for it."""
        if self._over is not None:  # the job only cleans up
            raise self._over
        try:
            self._until_event()
        except (Stop, Violation, HubDied) as over:
            self._over = over
            raise

    def _until_event(self) -> None:
        while True:
            if self.configuration.eager:
                self._hear_quiet()
            choice = self._choose(self._choices, self._key)
            if choice is None:
                self._idle()
                return
            self.ticks = 0
            if self._do(choice):
                return

    def _hear_quiet(self) -> None:
        """Have workers take what changes nothing but what they have: a later moment gives them no other choice.

        `PendingSteps` comes to the same in any order of these and of aborts and states
        (`test_what_is_stale_changes_nothing_wherever_it_comes`), and they are answered by nothing.
        """
        for worker in self.workers:
            for channel in worker.heads():
                queue = worker.line.out[channel]
                while queue and not worker.blocked and queue[0].kind in QUIET:
                    worker.hear(channel)

    def _key(self) -> Hashable:
        invariants.at_each_state(self)
        if self.configuration.unasked:
            try_unasked(self)
        return world_key(self)

    def _idle(self) -> None:
        """Nothing can happen: only a person's help or a deadline can end the wait."""
        if self.job.run.state == "waiting":
            invariants.at_the_end(self, "waiting")
            raise Stop(1)
        self.ticks += 1
        if self.ticks > 1:
            raise Violation(invariants.WAIT, self._where())
        self.clock.now += 10.0

    def _where(self) -> str:
        job = self.job
        return (
            f"the job waits in state {job.run.state!r} at step {job.replica_set.step} with {len(self.log)} committed, in flight "
            f"{list(job.window.exchange.in_flight)}, at {job.replica_set.at}, workers at "
            f"{[(w.name, w.steps.committed, w.blocked) for w in self.workers if w.alive]}"
        )

    # ----------------------------------------------------------------------------------------------------- what may happen

    def _choices(self) -> list[Choice]:
        out: list[Choice] = []
        if self.active.events:
            out.append(Choice(("event", type(self.active.events[0]).__name__), _JOB))
        for worker in self.workers:
            out += self._of_line(worker)
        for worker in self.workers:
            out += self._of_worker(worker)
        return out + self._faults()

    def _of_line(self, worker: Worker) -> list[Choice]:
        line = worker.line
        if line.away:
            return []
        return [
            Choice(("take", worker.name, channel, queue[0].kind), _JOB)
            for channel, queue in sorted(line.back.items())
            if queue
        ]

    def _of_worker(self, worker: Worker) -> list[Choice]:
        name, own = worker.name, frozenset([worker.name])
        out = [Choice(("hear", name, channel, worker.line.out[channel][0].kind), own) for channel in worker.heads()]
        if worker.can_work():
            out.append(Choice(("work", name), own))
        if worker.can_go_on():
            out.append(Choice(("go on", name), own))
        if worker.can_wake({w.name for w in self.workers if not w.alive}):
            out.append(Choice(("wake", name), own))
        if worker.alive and worker.line.closed:
            out.append(Choice(("ended", name), own))
        return out

    def _faults(self) -> list[Choice]:
        out = []
        for worker in self.workers:
            if worker.line.away and not worker.line.closed:  # of each of these one must come true
                out += [_fault("back", worker), _fault("lose", worker)]
        if not self.left[""] or not self.configuration.first <= len(self.log) <= self.configuration.last:
            return out
        for fault, times in self.left.items():
            if fault and times:
                out += self._places(fault)
        return out

    def _places(self, fault: str) -> list[Choice]:
        if fault == "interrupt" and self.active is not self.job:
            return []
        if fault in ("join", "hub", "interrupt"):
            return [_everything(fault, self.workers)]
        if fault in FAILURES:
            return self._failures(fault)
        if fault == "late":
            return [_everything(fault, self.workers)] if any(w.line.away for w in self.workers) else []
        here = [w for w in self.workers if w.rank is not None and w.alive and not w.line.away and not w.line.closed]
        if fault == "leave":
            here = [w for w in here if not w.loop._leaving]
        return [_fault(fault, worker) for worker in here]

    def _failures(self, failure: str) -> list[Choice]:
        if self.configuration.site == "orchestrator" and failure not in ("forward", "nan"):
            master = self.job.replica_set.master
            return [] if master.fails else [Choice(("master", failure), _JOB, True)]  # type: ignore[attr-defined]
        return [
            Choice(("fail", worker.name, failure), frozenset([worker.name]), True)
            for worker in self.workers
            if worker.may_fail(failure)
        ]

    # ------------------------------------------------------------------------------------------------------- what happens

    def _do(self, choice: Choice) -> bool:
        """Do it; returns whether the job got an event."""
        kind, *rest = choice.name
        if kind == "event":
            self._event()
            return True
        if kind in ("join", "hub", "late", "interrupt"):
            self._spend(str(kind))
            return bool(getattr(self, f"_{kind}")())
        if kind == "master":
            self._spend(str(rest[0]))
            self.job.replica_set.master.fails = rest[0]  # type: ignore[attr-defined]
            return False
        worker = next(w for w in self.workers if w.name == rest[0])
        if kind == "take":
            return self._take(worker, rest[1])
        if kind == "hear":
            worker.hear(rest[1])
        elif kind == "work":
            worker.work()
        elif kind == "fail":
            self._spend(str(rest[1]))
            worker.fail(str(rest[1]))
        elif kind in ("go on", "wake"):
            worker.go_on(kind == "wake")
        elif kind == "ended":
            worker.end()
        else:
            if kind not in ("back", "lose"):
                self._spend(str(kind))
            getattr(self, f"_{kind}")(worker)
        return False

    def _spend(self, fault: str) -> None:
        self.left[fault] -= 1
        self.left[""] -= 1

    def _event(self) -> None:
        event = self.active.events.popleft()
        if type(event).__name__ == "Lost":
            self._ranks[event.rank].line.back.clear()  # type: ignore[union-attr]
        self.active.handle(event)
        self.cluster.dispatch()

    def _take(self, worker: Worker, channel: Channel) -> bool:
        parcel = worker.line.back[channel].popleft()
        message, payload = parcel.opened()
        self.cluster.on_event(MessageArrived(worker.line, channel, message, payload, lambda: None))  # type: ignore[arg-type]
        self.cluster.dispatch()
        if isinstance(message, Hello):
            worker.rank = self.cluster.seats.rank_of(worker.line.session_id)
            self._ranks[worker.rank] = worker
            return False
        came, self.active.came = self.active.came, None
        if came is None:
            return False
        self.active.handle(came)
        self.cluster.dispatch()
        return True

    def _join(self) -> bool:
        worker = Worker(
            f"w{len(self.workers)}", self.configuration.samples, self.configuration.buckets, self.groups,
            self.configuration.undoes, self.configuration.kind,
        )  # fmt: skip
        self.workers.append(worker)
        worker.hello()
        return False

    def _hub(self) -> bool:
        raise HubDied

    def _late(self) -> bool:
        self.clock.now += 10.0
        return True

    def _interrupt(self) -> bool:
        self.job.interrupt()
        return False

    def _cut(self, worker: Worker) -> None:
        worker.line.away = True
        self._tell(SessionSuspect(worker.line, LinkBroken("cut")))  # type: ignore[arg-type]

    def _back(self, worker: Worker) -> None:
        worker.line.away = False
        self._tell(SessionResumed(worker.line))  # type: ignore[arg-type]

    def _lose(self, worker: Worker) -> None:
        worker.end()
        worker.line.away = False
        self._tell(SessionClosed(worker.line, LinkBroken("lost"), False))  # type: ignore[arg-type]

    def _die(self, worker: Worker) -> None:
        self._lose(worker)

    def _leave(self, worker: Worker) -> None:
        worker.loop.leave("asked to leave")

    def _tell(self, event: Any) -> None:
        self.cluster.on_event(event)
        self.cluster.dispatch()


#: Messages that only wait in a worker until there is work to do.
QUIET = ("Accept", "BatchShard", "StepWithoutShard", "SumBucket", "ParameterBucket", "CommitStep")

_JOB = frozenset(["job"])


def _fault(kind: str, worker: Worker) -> Choice:
    """What happens to a worker's line: the job's view changes, other workers do not notice."""
    return Choice((kind, worker.name), _JOB | {worker.name}, True)


def _everything(kind: str, workers: list[Worker]) -> Choice:
    return Choice((kind,), _JOB | {worker.name for worker in workers}, True)


def walk(configuration: Configuration, limit_s: float = math.inf, runs: int = 0, seed: int = 0) -> Report:
    """Walk all paths of a configuration, or as many as a time allows; or `runs` that are drawn at random."""
    was_frozen = gc.get_freeze_count() > 0  # as in a test run: what was loaded stays out of its later collections, too
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(200_000)
    try:
        with without_threads():
            if runs:
                return wander(lambda: World(configuration), runs, seed, limit_s)
            return explore(lambda: World(configuration), limit_s)
    finally:
        gc.set_threshold(*before)
        if not was_frozen:
            gc.unfreeze()
