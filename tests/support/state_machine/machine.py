"""The machine: the real cluster, hub, job, exchanges and replica sets, and workers that are honest, slow, buggy or hostile.

It stands on the explorer's ground (`tests/support/explorer`): no threads, sockets or clocks. So a run is the same each time and
takes some tens of milliseconds, and time passes only where nothing else can happen. Sessions are replaced just above the link,
which refuses by itself what does not decode or fit its payload (`tests/unit/protocol` proves that); so does `_deliver` here. In
data mode workers train a model with the real replicas, and weights are compared with plain PyTorch's. Groups, whose ranks would
block each other in collectives, use the explorer's counting replicas.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import msgspec
import torch

from guava_nb.errors import ConfigError, GuavaError, RemoteProtocolError
from guava_nb.link.session_events import MessageArrived
from guava_nb.protocol.messages import FROM_WORKERS, MESSAGE_KINDS, Channel, Message, channel_of
from guava_nb.protocol.tensor_bounds import check_tensors
from guava_nb.worker.preparation import Preparation
from tests.support.explorer import invariants, orchestrator
from tests.support.explorer.fingerprint import job_key
from tests.support.explorer.orchestrator import ExploredJob, plan_for, replica_set_for, spec_for, without_threads
from tests.support.explorer.search import Choice, Stop, Violation
from tests.support.explorer.worker import Line, Parcel, Worker
from tests.support.explorer.world import Configuration, World
from tests.support.state_machine import real
from tests.support.state_machine.asked import ANSWERS, TAINTING, is_answer
from tests.support.state_machine.values import Drawn, draw, mutated

__all__ = ["Outcome", "Play", "play"]

HONEST, SLOW, BUGGY, HOSTILE = "honest", "slow", "buggy", "hostile"
#: How often a choice is taken, against the others.
_WEIGHTS = {"event": 4.0, "take": 2.0, "mischief": 0.4}
_SLOWNESS, _FAULT_WEIGHT = 0.05, 0.04
_IDS = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
NAMED = "a run that fails names a worker that lied"
ENDS_SESSION = "a violation ends its sender's session by name"


@dataclass(frozen=True)
class Play:
    """What is played.

    Attributes:
        exchange: "star", "site" (the same with the optimizer at the orchestrator), "group" or "parts".
        workers: the kind of each.
        seed: of all that is drawn.
        records: that hostile workers send.
        most: messages that misbehaving workers send beside their own, at most.
        faults: as for `Configuration`.
        cached: workers keep rows.
        validates: after each epoch.
        ahead: steps issued ahead.
    """

    exchange: str
    workers: tuple[str, ...]
    seed: int
    records: tuple[type[Message], ...] = tuple(MESSAGE_KINDS.values())
    most: int = 40
    faults: dict[str, int] = field(default_factory=dict)
    cached: bool = False
    validates: bool = False
    ahead: int = 1

    @property
    def is_real(self) -> bool:
        """Whether a model is trained."""
        return self.exchange in ("star", "site")


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        state: "done", "failed", "waiting" (for a person to bring workers) or "refused" (too few to begin).
        error: of a run that failed.
        sent: records that misbehaving workers sent, by type.
        expelled: kinds of the workers whose session was ended.
        liars: workers that gave a false answer in the right form.
    """

    state: str
    error: BaseException | None
    sent: Counter[type[Message]]
    expelled: list[str]
    liars: set[str]


class _Line(Line):
    """Remembers both ways."""

    def __init__(self, session_id: bytes) -> None:
        super().__init__(session_id)
        self.sent: list[Message] = []
        self.said: deque[Drawn] = deque(maxlen=30)

    def send(self, message: Message, channel: Channel, buffers: Sequence[memoryview] = ()) -> None:
        super().send(message, channel, buffers)
        self.sent.append(message)

    def reply(self, message: Message, buffers: Sequence[memoryview]) -> None:
        super().reply(message, buffers)
        self.said.append(Drawn(message, b"".join(bytes(buffer) for buffer in buffers)))


class _Player(Worker):
    """A worker of a kind; `held` are messages that it sends late."""

    def __init__(self, kind: str, name: str, world: Machine) -> None:
        super().__init__(name, world.configuration.samples, world.configuration.buckets, world.groups)
        self.kind, self.line = kind, _Line(name.encode())
        self.held: list[tuple[Channel, Parcel]] = []
        if world.play.is_real:
            self.loop._preparation = Preparation(torch.device("cpu"), None, self.seat)  # type: ignore[arg-type]

    @property
    def misbehaves(self) -> bool:
        return self.kind in (BUGGY, HOSTILE)

    def release(self) -> None:
        for channel, parcel in self.held:
            self.line.back.setdefault(channel, deque()).append(parcel)
        self.held.clear()


class Machine(World):
    """One run."""

    def __init__(self, play: Play) -> None:
        exchange = "star" if play.is_real else play.exchange
        site = "orchestrator" if play.exchange == "site" else "workers"
        rows = [[b * real.ROWS + i for i in range(real.ROWS)] for b in range(real.BATCHES)] if play.is_real else _IDS
        super().__init__(
            Configuration(
                workers=len(play.workers), batches=tuple(map(tuple, rows)), epochs=real.EPOCHS, exchange=exchange, site=site,
                faults=dict(play.faults), together=sum(play.faults.values()), ahead=play.ahead, snapshot_every=2,
            )
        )  # fmt: skip
        self.play, self.luck = play, random.Random(play.seed)
        self.left_mischief, self.sent = play.most, Counter[type[Message]]()
        self.liars: set[str] = set()
        self.tainted = False
        self.error: BaseException | None = None

    # ----------------------------------------------------------------------------------------------------------- the run

    def to_the_end(self) -> Outcome:
        """Play; raises a `Violation` where an invariant does not hold."""
        self._choose = self._pick  # type: ignore[assignment]
        try:
            self._restart(None)
            state = self._finish()
        except Stop:
            state = "waiting"
        if state == "waiting" and not any(w.misbehaves for w in self._players) and not self.play.faults:
            raise Violation(invariants.GOES_ON, "the run waits for workers, and none was lost")
        self._look_at_the_end(state)
        expelled = [self._ranks[rank].kind for rank in self.cluster.expelled]  # type: ignore[attr-defined]
        return Outcome(state, self.error, self.sent, expelled, self.liars)

    def _begin(self, saved: Any) -> None:
        if not self.play.is_real:
            config = self.configuration
            spec = spec_for(config.exchange, config.site, config.workers)
            replicas: Any = replica_set_for(spec, config.samples, config.buckets, None, "run-1")
            plan = plan_for(
                [list(ids) for ids in config.batches], config.epochs, None, prefetch_steps=config.ahead, snapshot_every_steps=2
            )  # fmt: skip
        else:
            replicas = real.replicas_of(real.spec_of(self.configuration.site, self.play.cached))
            plan = real.plan_of(self.play.validates, prefetch_steps=self.play.ahead, snapshot_every_steps=2)
        self.runs, self.before, self.log, self.longest = 1, dict(self.left), [], 0
        self.active = self.job = ExploredJob(replicas, plan, self.cluster, self._next_event)
        self.job._boundary.save = lambda kind: None
        self._keep_log()

    def _finish(self) -> str:
        try:
            return self.job.go()
        except Exception as error:
            self.error = error
            few = isinstance(error, ConfigError) and "let more join" in str(error)
            return "refused" if few and not self.job.run.history else "failed"

    def _join(self) -> bool:
        kinds, number = self.play.workers, len(self.workers)
        worker = _Player(kinds[number] if number < len(kinds) else HONEST, f"w{number}", self)
        self.workers.append(worker)
        worker.hello()
        return False

    @property
    def _players(self) -> list[_Player]:
        return self.workers  # type: ignore[return-value]

    # ----------------------------------------------------------------------------------------------------------- choices

    def _key(self) -> Hashable:
        """Nothing is compared: states are not known again."""
        return None

    def _pick(self, choices: Any, fingerprint: Any) -> Choice | None:
        options = choices()
        if not options:
            return None
        kinds = {player.name: player.kind for player in self._players}
        weights = []
        for option in options:
            weight = _FAULT_WEIGHT if option.is_fault else _WEIGHTS.get(str(option.name[0]), 1.0)
            is_slow = len(option.name) > 1 and kinds.get(str(option.name[1])) == SLOW
            weights.append(weight * (_SLOWNESS if is_slow else 1.0))
        return self.luck.choices(options, weights)[0]

    def _choices(self) -> list[Choice]:
        out = super()._choices()
        if self.left_mischief:
            out += [
                Choice(("mischief", player.name), frozenset())
                for player in self._players
                if player.misbehaves and player.alive and not player.line.closed and not player.line.away
            ]
        return out

    def _do(self, choice: Choice) -> bool:
        if choice.name[0] != "mischief":
            return super()._do(choice)
        self.left_mischief -= 1
        player = next(p for p in self._players if p.name == choice.name[1])
        if player.kind == HOSTILE:
            record = self.luck.choice(self.play.records)
            return self._deliver(player, draw(record, self.luck, self._fitting(player)))
        return self._blunder(player)

    def _blunder(self, player: _Player) -> bool:
        """A message of its own again, with a wrong field, before its turn, or late."""
        how = self.luck.choice(("again", "wrong", "wrong", "wrong", "swap", "hold", "release", "early"))
        queues = [(channel, queue) for channel, queue in player.line.back.items() if queue]
        if how in ("swap", "hold") and queues and player.rank is not None:
            channel, queue = self.luck.choice(queues)
            if how == "hold":
                player.held.append((channel, queue.popleft()))
            else:
                queue.rotate(1)
        elif how == "early":
            record = self.luck.choice(sorted(ANSWERS, key=lambda record: record.NUMBER))
            return self._deliver(player, draw(record, self.luck, self._fitting(player)))
        elif how in ("again", "wrong") and player.line.said:
            said = self.luck.choice(player.line.said)
            return self._deliver(
                player,
                said if how == "again" else mutated(said, self.luck, self._fitting(player)),
                again=how == "again",
            )
        else:
            player.release()
        return False

    def _fitting(self, player: _Player) -> dict[str, Sequence[Any]]:
        """Values that fit the run at this moment."""
        job, layout = self.job, self.job.replica_set.master.layout
        generations = {f.machine.generation for f in job.window.exchange.in_flight.values()}
        now = job.cluster.roster.generation
        step = job.replica_set.step
        requests = [m.request_id for m in player.line.sent[-20:] if getattr(m, "request_id", 0)]
        buckets = [layout.bucket(number) for number in layout.numbers]
        return {
            "run_id": [job.replica_set.run_id] * 4 + ["run-0"],
            "generation": [*generations, *generations, now, now, now - 1, now + 1, getattr(job.replica_set, "generation", now)],
            "step": [step, step + 1, step + 1, step + 1, step + 2, step - 1],
            "shard": [0, 0, 1, 1, 2], "bucket": [*layout.numbers, 99], "request_id": [*requests, *requests, 1],
            "numel": [getattr(bucket, "numel", self.configuration.samples) for bucket in buckets],
            "present": [bytes([255] * bucket.present_bytes) for bucket in buckets],
            "rank": [0, 1], "size": [2], "op": ["set", "get", "add", "append", "forget", "queue_pop", "compare_set", "wait"],
            "group": [getattr(job.replica_set, "group_name", "g"), "g"], "rows": [1, 2, 4], "finite": [True, True, False],
            "mark": [1], "probe_id": [1], "measuring_id": [1], "loss_sum": [1.0, 1.0, float("nan")], "count": [2.0],
        }  # fmt: skip

    # ------------------------------------------------------------------------------------------------- what they may say

    def _deliver(self, player: _Player, drawn: Drawn, again: bool = False) -> bool:
        """Have a record arrive, and see what it did; returns whether the job got an event."""
        message = _over_the_wire(drawn)
        if message is None:
            return False
        self.sent[type(message)] += 1
        rank, asked = player.rank, is_answer(player.line.sent, message)
        kinds = {m.rank for m in self.cluster.roster}
        before = job_key(self.job)
        payload = memoryview(bytearray(drawn.payload))
        self.cluster.on_event(
            MessageArrived(player.line, channel_of(message), message, payload, lambda: None)  # type: ignore[arg-type]
        )
        came, self.active.came = self.active.came, None
        if came is not None:
            if asked and not again and ANSWERS[type(message)] is not ANSWERS[_ABOUT_ITSELF]:
                self.liars.add(player.name)
                self.tainted |= isinstance(message, TAINTING)
            self.active.handle(came)
            if rank in self.cluster.expelled:
                pass
            elif not asked and job_key(self.job) != before:
                raise Violation(invariants.ASKED, f"{message} of {player.name} was not asked and changed the run")
        self.cluster.dispatch()
        if type(message) not in FROM_WORKERS:
            self._is_ended(player, message)
        if {m.rank for m in self.cluster.roster} != kinds and player.rank is None:
            self._seated(player)
        return came is not None

    def _is_ended(self, player: _Player, message: Message) -> None:
        name = type(message).__name__
        if not player.line.closed:
            raise Violation(ENDS_SESSION, f"{player.name} sent a {name}, and its session goes on")
        if player.rank is not None and name not in self.cluster.roster.members[player.rank].detail:
            raise Violation(ENDS_SESSION, f"what is told of {player.name} does not name {name}")

    def _seated(self, player: _Player) -> None:
        """A hello that it made up came before its own."""
        player.rank = self.cluster.seats.rank_of(player.line.session_id)
        self._ranks[player.rank] = player

    def _idle(self) -> None:
        held = [player for player in self._players if player.held and not player.line.closed]
        if held:
            for player in held:
                player.release()
            return
        # A liar that is connected may have said what it does not do: nobody can tell that from a long step.
        alive = [
            p for p in self._players if p.alive and not p.line.closed and (p.name in self.liars or p.kind == BUGGY)
        ]
        if self.ticks and alive and self.job.run.state != "waiting":
            self._lose(alive[0])
            return
        super()._idle()

    # ----------------------------------------------------------------------------------------------------------- the end

    def _look_at_the_end(self, state: str) -> None:
        job = self.job
        honest = [self._ranks[rank].name for rank in self.cluster.expelled if not self._ranks[rank].misbehaves]  # type: ignore[attr-defined]
        if honest:
            raise Violation(ENDS_SESSION, f"{honest} did nothing wrong and were sent away")
        if state == "failed":
            self._look_at_error()
        planned = [list(ids) for _ in range(self.configuration.epochs) for ids in self.configuration.batches]
        log = [sorted(ids) for ids in self.log]
        if log != [sorted(ids) for ids in planned[: len(log)]] or (state == "done" and len(log) != len(planned)):
            raise Violation(invariants.ONCE, f"{state}: committed were {log}")
        if len(job.run.history) != len(log):
            raise Violation(invariants.HISTORY, f"the history has {len(job.run.history)} steps, the log {len(log)}")
        if state == "done" and (job.run.lost_samples, job.run.duplicated_samples) != (0, 0):
            raise Violation(invariants.ONCE, f"{job.run.lost_samples} lost, {job.run.duplicated_samples} doubled")
        if not self.tainted:
            self._look_at_weights(state)

    def _look_at_error(self) -> None:
        text = f"{type(self.error).__name__}: {self.error}"
        if not isinstance(self.error, GuavaError):
            raise Violation(invariants.GOES_ON, f"no error of ours: {text}") from self.error
        if not any(name in text for name in self.liars):
            raise Violation(
                NAMED if self.liars else invariants.GOES_ON, f"{sorted(self.liars)} lied: {text}"
            ) from self.error

    def _look_at_weights(self, state: str) -> None:
        if not self.play.is_real:
            if state == "done":
                invariants.at_the_end(self, state)
            return
        steps: dict[str, Any] = {}
        if state == "done":
            steps["the master"] = (self.job.replica_set.master.state()["model"], len(self.log))
        for player in self._players:
            run: Any = player.loop._run
            if player.alive and player.kind in (HONEST, SLOW) and run is not None and player.steps.committed >= 0:
                steps[player.name] = (run.replica.state()["model"], player.steps.committed + 1)
        for name, (held, count) in steps.items():
            if count < len(real.plain_after()) and not real.difference(held, count) < 1e-9:
                raise Violation(invariants.PARAMETERS, f"{name} after {count} steps is not plain PyTorch's")


#: A record that is about its sender alone.
_ABOUT_ITSELF = next(record for record in ANSWERS if record.__name__ == "Log")


def _over_the_wire(drawn: Drawn) -> Message | None:
    """What the link hands on; None where it would end the session by itself."""
    try:
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(drawn.message), type=type(drawn.message))
        check_tensors(message, len(drawn.payload))
    except (msgspec.MsgspecError, OverflowError, UnicodeEncodeError, RemoteProtocolError):
        return None
    return message


class _PassFeeder(orchestrator._Feeder):
    """Loads the batches of a pass."""

    def __init__(self, batches: Any, group: int, depth: int, wake: Any, budget_bytes: int = 0, *pauses: Any) -> None:
        super().__init__(batches, group, depth, wake, budget_bytes, *pauses)


@contextlib.contextmanager
def ground() -> Iterator[None]:
    """Have what is built in the block use no thread, no randomness of loaders and the explorer's clock."""
    with without_threads(), mock.patch("guava_nb.evaluation.passes.BatchFeeder", _PassFeeder):
        yield


def play(played: Play) -> Outcome:
    """Play a run to its end; call it within `ground`.

    Raises:
        Violation: an invariant does not hold.
    """
    return Machine(played).to_the_end()
