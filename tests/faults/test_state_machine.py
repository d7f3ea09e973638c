"""A whole orchestrator keeps its promises whatever its workers say and whenever they say it.

Hypothesis draws who takes part, which faults may happen and which records hostile workers send, and shrinks these; one seed
draws the rest. The ground, and why it is this one: `tests/support/state_machine/machine.py`.
"""

from __future__ import annotations

import gc
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import guava_nb.protocol
from guava_nb.cluster.cluster import Cluster
from guava_nb.evaluation.validation import Validation
from guava_nb.protocol.messages import FROM_WORKERS, MESSAGE_KINDS, Log, Message, OpenGroup, StoreAsk
from guava_nb.replica.buckets import Bucket
from guava_nb.sync.exchange import StepExchange
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.sync.step_machine import StepMachine
from guava_nb.training.step_accounting import StepAccounting
from tests.support.explorer import invariants
from tests.support.explorer.search import Violation
from tests.support.explorer.worker import Line
from tests.support.state_machine.asked import ANSWERS
from tests.support.state_machine.machine import ENDS_SESSION, NAMED, Machine, Play, ground, play
from tests.support.state_machine.values import draw

KINDS = ("honest", "slow", "buggy", "hostile")
FAULTS = ("cut", "die", "join", "late", "leave", "interrupt")
RECORDS = tuple(MESSAGE_KINDS.values())


@pytest.fixture(autouse=True)
def no_threads() -> Iterator[None]:
    with ground():
        yield


@given(
    st.sampled_from(("star", "star", "site", "group", "parts")),
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    st.lists(st.sampled_from(FAULTS), max_size=3, unique=True),
    st.sets(st.sampled_from(RECORDS), min_size=1),
    st.integers(1, 60),
    st.tuples(st.booleans(), st.booleans(), st.sampled_from((0, 1, 2))),
    st.integers(0, 1 << 32),
)
@settings(max_examples=100)
def test_whatever_workers_say_the_run_is_exact_and_ends_or_goes_on(
    exchange: str,
    workers: list[str],
    faults: list[str],
    records: set[type[Message]],
    most: int,
    options: tuple[bool, bool, int],
    seed: int,
) -> None:
    if exchange in ("group", "parts") and len(workers) < 2:
        workers = [*workers, "honest"]
    cached, validates, ahead = options
    play(
        Play(
            exchange, tuple(workers), seed, tuple(sorted(records, key=lambda r: r.NUMBER)), most, dict.fromkeys(faults, 1),
            cached, validates, ahead,
        )
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- each message is played


def test_the_records_that_a_worker_may_send_are_those_that_the_machine_knows() -> None:
    """A new record needs its rule in `ANSWERS`, and its place in `FROM_WORKERS` where the wire's README says so."""
    assert set(ANSWERS) == FROM_WORKERS
    text = (Path(guava_nb.protocol.__file__).parent / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\w+) \| ([^:|]+?)[:,]", text, re.MULTILINE)
    speakers = {MESSAGE_KINDS[int(number)]: who for number, name, who in rows if int(number) in MESSAGE_KINDS}
    assert set(speakers) >= set(RECORDS) - {MESSAGE_KINDS[n] for n in range(1, 8)} - {
        record for record in RECORDS if record.__name__ in ("CrashReport", "Filler", "Measure", "Measured")
    }
    from_workers = {record for record, who in speakers.items() if who.startswith(("Worker", "Member"))}
    assert from_workers == FROM_WORKERS


def test_every_record_there_is_is_sent_by_hostile_workers() -> None:
    sent: Counter[type[Message]] = Counter()
    for record in RECORDS:
        sent += play(Play("group", ("honest", "hostile"), record.NUMBER, (record,), 10)).sent
    assert {record for record in RECORDS if not sent[record]} == set()


@pytest.mark.parametrize(
    "record", sorted(set(RECORDS) - FROM_WORKERS, key=lambda r: r.NUMBER), ids=lambda r: r.__name__
)
def test_what_no_worker_sends_ends_its_session_by_name(record: type[Message]) -> None:
    outcome = play(Play("group", ("honest", "hostile"), 3, (record,), 12))
    assert outcome.state == "done" and outcome.expelled == ["hostile"]


# ---------------------------------------------------------------------------------------------------------- planted faults


@dataclass(frozen=True)
class Planted:
    """A check that is taken away, and what must be found then."""

    name: str
    owner: Any
    method: str
    instead: Any
    caught_by: tuple[str, ...]
    exchange: str = "star"
    records: tuple[str, ...] = ()
    workers: tuple[str, ...] = ("honest", "hostile", "hostile")
    cached: bool = False
    validates: bool = False


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _any_step(exchange: Any, rank: int, message: Any) -> Any:
    in_flight = exchange.in_flight.get(message.step)
    if in_flight is None or not in_flight.machine.was_asked(rank, message.shard, message.generation):
        return None
    return in_flight


def _any_shard(machine: Any, rank: int, shard: int, generation: int) -> bool:
    return 0 <= shard < len(machine.tasks)


def _any_state(replicas: Any, rank: int, message: Any, payload: Any) -> None:
    replicas._loaded[rank] = message
    replicas.at[rank] = message.step


def _twice(accounting: Any, step: Any, *rest: Any) -> None:
    _on_commit(accounting, step, *rest)
    accounting._ledger.commit(step.epoch, step.sample_ids())


_on_commit = StepAccounting.on_commit
_CRASH = (invariants.GOES_ON, NAMED)
PLANTED = (
    Planted("a step may be reported before the one before it", StepExchange, "_asked", _any_step,
            (invariants.HISTORY, invariants.GOES_ON), "group", ("ShardReport",), ("hostile",)),
    Planted("a bucket's form is not checked", Bucket, "check_form", _nothing, _CRASH, records=("GradientBucket",)),
    Planted("a report counts of any shard", StepMachine, "was_asked", _any_shard, (invariants.ASKED, *_CRASH), "star",
            ("GradientBucket", "ShardReport")),
    Planted("a state counts as loaded that was not sent", ReplicaSet, "_on_loaded", _any_state, (invariants.ASKED,), "group",
            ("StateLoaded",)),
    Planted("a violation ends no session", Cluster, "expel", _nothing, (ENDS_SESSION,), records=("BatchShard",)),
    Planted("an answer on a batch is not checked", Validation, "check", _nothing, _CRASH, records=("Predicted", "Evaluated"),
            validates=True),
    Planted("samples are counted twice", StepAccounting, "on_commit", _twice, (invariants.ONCE,)),
)  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_fault_is_found(planted: Planted) -> None:
    names = {record.__name__: record for record in RECORDS}
    records = tuple(names[name] for name in planted.records) or RECORDS
    with mock.patch.object(planted.owner, planted.method, planted.instead), pytest.raises(Violation) as found:
        for seed in range(150):
            play(
                Play(
                    planted.exchange, planted.workers, seed, records, 60, {"cut": 1, "late": 1}, planted.cached,
                    planted.validates,
                )
            )  # fmt: skip
    assert found.value.invariant in planted.caught_by, str(found.value)


# ------------------------------------------------------------------------------------------------------------------ memory


def _bytes_of(*roots: object) -> int:
    """All memory that is reached from these objects, classes, code and the sessions of the test left out."""
    seen: set[int] = set()
    waiting, total = list(roots), 0
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType | FrameType | Line | Machine):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        waiting += gc.get_referents(one)
    return total


class _Flooded(Machine):
    """After some steps a hostile worker says everything a thousand times, with other values each time."""

    #: Kept lines are bounded by `test_worker_output.py`. A store and its groups hold what programs put there, unasked.
    left_out, programs = (Log,), (OpenGroup, StoreAsk)
    grown = 0

    def _pick(self, choices: Callable[[], Any], fingerprint: Any) -> Any:
        if len(self.log) == 2 and not self.grown:
            hostile = self._players[1]
            self._flood(hostile, 3)
            before = _bytes_of(self.cluster, self.job)
            self._flood(hostile, 60)
            self.grown = max(1, _bytes_of(self.cluster, self.job) - before)
        return super()._pick(choices, fingerprint)

    def _flood(self, hostile: Any, times: int) -> None:
        for record in sorted(FROM_WORKERS - set(self.left_out), key=lambda r: r.NUMBER):
            for _ in range(times):
                drawn = draw(record, self.luck, {"run_id": ["run-1", "run-9"]})
                is_asked = record not in self.programs and ANSWERS[record](hostile.line.sent, drawn.message)
                if record.__name__ != "Leave" and not is_asked:
                    self._deliver(hostile, drawn)


@pytest.mark.parametrize("exchange", ["star", "parts"])
def test_unasked_messages_take_no_memory(exchange: str) -> None:
    machine = _Flooded(Play(exchange, ("honest", "hostile", "honest"), 1, most=0))
    machine.to_the_end()
    assert 0 < machine.grown < 50_000
