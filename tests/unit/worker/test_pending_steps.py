from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.protocol.messages import Commit, FetchState, SchedulerStep
from guava_nb.worker.pending_steps import PendingSteps, ScheduleTicks

COMMIT = Commit(1.0, False)


def test_what_belongs_to_the_past_is_dropped() -> None:
    steps: PendingSteps[int] = PendingSteps()
    steps.reset(4)
    assert steps.find(4, 0) is None and steps.announce(2, 0, False) is None
    assert steps.announce(5, 0, True) is steps.current()


def test_a_newer_generation_replaces_an_attempt_and_tells_that_work_was_dropped() -> None:
    steps: PendingSteps[int] = PendingSteps()
    old = steps.announce(0, 1, False)
    assert old is not None
    old.done.add(0)
    new = steps.announce(0, 2, False)
    assert new is steps.current() and new is not old and new is not None and not new.done
    assert steps.find(0, 1) is None, "the older attempt's messages come too late"
    assert steps.take_abandoned() and not steps.take_abandoned()


def test_the_same_generation_adds_a_shard_to_the_attempt() -> None:
    steps: PendingSteps[int] = PendingSteps()
    assert steps.announce(0, 1, False) is steps.announce(0, 1, False)
    assert not steps.take_abandoned()


def test_an_abort_spares_committed_steps_and_attempts_of_its_own_generation() -> None:
    steps: PendingSteps[int] = PendingSteps()
    for number, generation in [(0, 1), (1, 1), (2, 3)]:
        steps.announce(number, generation, False)
    steps.abort(0, 3)
    assert steps.find(0, 1) is not None, "step 0 was committed by the orchestrator: its sums are on their way"
    assert steps.current() is not None
    steps.advance()
    assert steps.current() is None, "step 1 was given up"
    steps.announce(1, 3, False)
    steps.advance()
    assert steps.current() is not None and steps.current().generation == 3  # type: ignore[union-attr]


@settings(max_examples=100, deadline=None)
@given(st.permutations(["announce", "mean0", "mean1", "commit"]))
def test_messages_of_a_step_may_come_in_any_order(order: list[str]) -> None:
    steps: PendingSteps[str] = PendingSteps()
    for what in order:
        if what == "announce":
            steps.announce(0, 7, True)
        else:
            step = steps.find(0, 7)
            assert step is not None
            if what == "commit":
                step.commit = COMMIT
            else:
                step.buckets[int(what[-1])] = what
    step = steps.current()
    assert step is not None and step.announced and step.want_hash
    assert step.buckets == {0: "mean0", 1: "mean1"} and step.commit == COMMIT
    assert steps.advance() is step and steps.committed == 0


@settings(max_examples=100, deadline=None)
@given(st.permutations(["abort", "state", "old shard", "old sum", "spared sum", "new shard", "new sum"]))
def test_what_is_stale_changes_nothing_wherever_it_comes(order: list[str]) -> None:
    """An abort, a state and the shards and sums of two attempts come on channels of their own."""
    steps: PendingSteps[str] = PendingSteps()
    for what in order:
        if what == "abort":
            steps.abort(0, 5)
        elif what == "state":
            steps.reset(0, 6)
        elif "shard" in what:
            steps.announce(1, 8 if "new" in what else 4, False)
        else:
            step = steps.find(0 if "spared" in what else 1, 8 if "new" in what else 4)
            if step is not None:
                step.buckets[0] = what
    step = steps.current()
    assert step is not None and step.announced and step.generation == 8 and step.buckets == {0: "new sum"}
    assert steps.find(1, 7) is None and steps.find(2, 5) is None


def tick(number: int) -> SchedulerStep:
    return SchedulerStep("run", None, number)


def question(ticks: int) -> FetchState:
    return FetchState(ticks, "run", ticks=ticks)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=20), st.integers(0, 6))
def test_each_tick_counts_once_and_each_question_is_answered_when_its_ticks_are_there(
    asked: list[tuple[bool, int]], begun: int
) -> None:
    ticks, done, answered = ScheduleTicks(begun), begun, 0
    for is_tick, number in asked:
        if is_tick:
            number = min(number, ticks.done + 1)  # they come in order
            is_new = ticks.begins(tick(number))
            assert is_new is (number > done)
            done += is_new
            due = ticks.due()
            assert all(one.ticks <= done for one in due)
            answered += len(due)
        else:
            assert ticks.waits(question(number)) is (number > done)
            answered += number <= done
    for number in range(1, 7):
        ticks.begins(tick(number))
    assert answered + len(ticks.due()) == sum(not is_tick for is_tick, _ in asked) and not ticks.due()


def test_a_tick_that_a_state_has_already_is_not_done_again() -> None:
    assert [ScheduleTicks(2).begins(tick(number)) for number in (1, 2, 3)] == [False, False, True]
