"""Groups at the hub: what goes to whom, agreement, and endings; no sockets, no threads."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.errors import LinkBroken
from guava_nb.hub.relay import Relay
from guava_nb.hub.relay_group import MOST_FAILED, RelayGroup
from guava_nb.link.session_events import MessageArrived, SessionClosed
from guava_nb.protocol.messages import (
    CallSpec,
    Channel,
    Expire,
    FlatTensor,
    GroupEnded,
    LeaveGroup,
    OpenGroup,
    OperationFailed,
    Parcel,
    Piece,
    StoreAsk,
    StoreReply,
    Taken,
)

SUM = CallSpec("all_reduce", "sum", "float32", (4,))


class FakeSession:
    def __init__(self, number: int) -> None:
        self.session_id = bytes([number]) * 16
        self.peer_address = f"10.0.0.{number}:1"
        self.got: list[tuple[object, bytes]] = []
        self.ended = ""

    def end(self, cause, by_peer, farewell="") -> None:
        self.ended = farewell

    def send(self, message, channel, buffers=()) -> None:
        self.got.append((message, b"".join(bytes(buffer) for buffer in buffers)))

    def of(self, kind):
        return [message for message, _ in self.got if isinstance(message, kind)]


class World:
    def __init__(self, size: int, opened: bool = True, most_waiting_bytes: int | None = None) -> None:
        self.relay, self.size = Relay(most_waiting_bytes), size
        self.sessions = [FakeSession(rank + 1) for rank in range(size)]
        self.done = 0
        if opened:
            for rank in range(size):
                self.open(rank)

    def open(self, rank: int, group: str = "g", size: int | None = None) -> None:
        self.say(rank, OpenGroup(group, rank, size or self.size, f"w{rank}"))

    def say(self, rank: int, message, payload: bytes = b"") -> bool:
        def done() -> None:
            self.done += 1

        view = memoryview(bytearray(payload))
        return self.relay.on_event(MessageArrived(self.sessions[rank], Channel.COLLECTIVE, message, view, done))

    def add(self, rank: int, sequence: int, values, offset=0, total=None, call=SUM, target=-1, **more) -> None:
        data = np.asarray(values, np.float32)
        tensor = FlatTensor("float32", data.size)
        total = data.size if total is None else total
        piece = Piece(
            group="g",
            sequence=sequence,
            target=target,
            source=rank,
            offset=offset,
            total=total,
            tensor=tensor,
            reduce="sum",
            call=call,
            **more,
        )
        self.say(rank, piece, data.tobytes())

    def close(self, rank: int) -> None:
        self.relay.on_event(SessionClosed(self.sessions[rank], LinkBroken("it fell silent"), False))


def floats(payload: bytes) -> list[float]:
    return np.frombuffer(payload, np.float32).tolist()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.randoms(use_true_random=False))
def test_sums_do_not_depend_on_who_comes_when(size: int, operations: int, chunks: int, random) -> None:
    world = World(size)
    rng = np.random.default_rng(3)
    values = rng.normal(size=(operations, size, chunks, 2)).astype(np.float32)
    waiting = {rank: [(op, chunk) for op in range(operations) for chunk in range(chunks)] for rank in range(size)}
    while any(waiting.values()):
        rank = random.choice([rank for rank, left in waiting.items() if left])
        op, chunk = waiting[rank].pop(0)
        call = CallSpec("all_reduce", "sum", "float32", (2 * chunks,)) if chunk == 0 else None
        world.add(rank, op + 1, values[op, rank, chunk], 2 * chunk, 2 * chunks, call)
    for session in world.sessions:
        sums = {(m.sequence, m.offset): floats(payload) for m, payload in session.got if isinstance(m, Piece)}
        for op in range(operations):
            for chunk in range(chunks):
                expected = values[op, 0, chunk].copy()
                for rank in range(1, size):
                    expected += values[op, rank, chunk]
                assert sums[op + 1, 2 * chunk] == expected.tolist()
    assert world.done == size * (1 + operations * chunks)


def test_parts_for_one_target_go_there_only() -> None:
    world = World(3)
    call = CallSpec("reduce_scatter", "sum", "float32", (1,))
    for rank in range(3):
        for target in range(3):
            world.add(rank, 1, [10 * rank + target], target=target, call=call if target == 0 else None)
    for rank, session in enumerate(world.sessions):
        ((_, payload),) = [(m, p) for m, p in session.got if isinstance(m, Piece)]
        assert floats(payload) == [30 + 3 * rank]


def test_bytes_are_passed_on_undecoded_and_the_source_is_who_sent_them() -> None:
    world = World(3)
    piece = Piece(
        group="g",
        sequence=1,
        target=-1,
        source=2,
        offset=0,
        total=1,
        tensor=FlatTensor("float32", 1),
        confirm=True,
        call=CallSpec("broadcast"),
    )
    world.say(0, piece, b"abcd")  # says it is rank 2
    for session in world.sessions[1:]:
        ((message, payload),) = session.got
        assert (message.source, payload, message.call, message.confirm) == (0, b"abcd", None, False)
    assert world.sessions[0].got == [(Taken("g", 1), b"")]


def test_what_comes_for_a_rank_that_is_not_there_waits_for_it() -> None:
    world = World(2, opened=False)
    world.open(0)
    for number in (1, 2):
        world.say(
            0,
            Parcel(
                group="g", source=0, target=1, tag=7, number=number, offset=0, total=1, tensor=FlatTensor("uint8", 1)
            ),
            bytes([number]),
        )
    world.say(
        0,
        Parcel(group="g", source=0, target=9, tag=7, number=3, offset=0, total=1, tensor=FlatTensor("uint8", 1)),
        b"x",
    )  # no such rank
    assert world.sessions[1].got == []
    world.open(1)
    assert [payload for _, payload in world.sessions[1].got] == [b"\x01", b"\x02"]


def test_ranks_that_disagree_are_all_told_what_each_called() -> None:
    world = World(3)
    world.add(0, 1, [1, 2, 3, 4])
    world.add(1, 1, [1, 2], call=CallSpec("all_reduce", "sum", "float32", (2,)))
    world.add(2, 1, [1, 2, 3, 4])
    for session in world.sessions:
        (failure,) = session.of(OperationFailed)
        assert "rank 0 (w0) called all_reduce (sum) of 4 float32" in failure.reason
        assert "rank 1 (w1) called all_reduce (sum) of 2 float32" in failure.reason
    for rank in range(3):
        world.add(rank, 2, [1, 1, 1, 1])
    assert [floats(p) for m, p in world.sessions[2].got if isinstance(m, Piece)] == [[3.0] * 4]


def test_a_time_out_names_who_is_missing_also_to_those_who_come_late() -> None:
    world = World(3)
    world.add(0, 1, [1, 1, 1, 1])
    world.say(0, Expire("g", 1, 2.5))
    (failure,) = world.sessions[0].of(OperationFailed)
    assert failure.timed_out and failure.missing == (1, 2)
    assert "rank 0 (w0) reached its timeout of 2.5 s waiting for rank 1 (w1), rank 2 (w2)" in failure.reason
    world.add(1, 1, [1, 1, 1, 1])
    assert world.sessions[1].of(OperationFailed) == [failure]
    world.add(2, 1, [1, 1, 1, 1])
    world.add(2, 1, [1, 1, 1, 1], offset=4, call=None)
    assert not world.sessions[0].of(Piece)


def test_a_time_out_after_everybody_called_asks_for_time() -> None:
    world = World(2)
    for rank in range(2):
        world.add(rank, 1, [1, 1, 1, 1])
    world.say(1, Expire("g", 1, 1.0))
    assert "give more time" in world.sessions[1].of(OperationFailed)[0].reason


def test_a_lost_session_breaks_its_groups_on_all_others_at_once() -> None:
    world = World(3)
    world.open(0, "other", 2)
    world.add(0, 1, [1, 1, 1, 1])
    world.close(1)
    for session in (world.sessions[0], world.sessions[2]):
        (ended,) = session.of(GroupEnded)
        assert "rank 1 (w1) was lost: it fell silent" in ended.reason
    world.add(2, 1, [1, 1, 1, 1])
    assert not world.sessions[0].of(Piece)
    world.close(0)
    world.close(2)
    assert set(world.relay.figures()) == {"other"}


def test_a_rank_that_opens_a_broken_group_learns_it() -> None:
    world = World(2, opened=False)
    world.open(0)
    world.relay.break_group("g", "given up")
    world.open(1)
    assert [session.of(GroupEnded)[0].reason for session in world.sessions] == ["given up"] * 2


def test_subgroups_that_not_all_ranks_have_opened_break_with_their_program() -> None:
    world = World(3, opened=False)
    for rank in range(3):
        world.open(rank, "w/0")
    for rank in range(2):
        world.open(rank, "w/mesh/pair", 2)
    world.open(0, "w/1", 2)
    world.close(2)
    first, second, _ = world.sessions
    assert [one.group for one in first.of(GroupEnded)] == ["w/0", "w/1"]
    assert "not all ranks have opened it, and rank 2 (w2) was lost: it fell silent" in first.of(GroupEnded)[1].reason
    for group in ("w/1", "w/2"):  # they come after it
        world.say(1, OpenGroup(group, 1, 2, "w1"))
        assert "rank 2 (w2) was lost: it fell silent" in second.of(GroupEnded)[-1].reason
    assert "w/mesh/pair" not in {one.group for one in first.of(GroupEnded) + second.of(GroupEnded)}
    world.close(1)
    assert first.of(GroupEnded)[-1].group == "w/mesh/pair"


def test_a_subgroup_whose_missing_rank_has_destroyed_the_default_group_breaks() -> None:
    for opened_before in (True, False):
        world = World(2, opened=False)
        for rank in range(2):
            world.open(rank, "w/0")
        acts = [lambda: world.open(0, "w/1"), lambda: world.say(1, LeaveGroup("w/0"))]  # noqa: B023 - called at once
        for act in acts if opened_before else reversed(acts):
            act()
        (ended,) = world.sessions[0].of(GroupEnded)
        assert ended.group == "w/1" and "rank 1 (w1) destroyed the default group before" in ended.reason
    world = World(3, opened=False)
    for rank in range(3):
        world.open(rank, "w/0")
    world.open(0, "w/1", 2)
    world.say(2, LeaveGroup("w/0"))
    world.say(1, OpenGroup("w/1", 1, 2, "w1"))  # the others may still make theirs
    assert not any(session.of(GroupEnded) for session in world.sessions)


def test_the_numbers_of_failed_collectives_that_are_kept_are_bounded() -> None:
    group = RelayGroup("g", 1)
    for sequence in range(3 * MOST_FAILED):
        group.fail(sequence, "it cannot be made")
    assert len(group._failed) == MOST_FAILED and 3 * MOST_FAILED - 1 in group._failed


def test_who_left_keeps_nobody_waiting() -> None:
    world = World(2)
    world.add(0, 1, [1, 1, 1, 1])
    world.say(1, LeaveGroup("g"))
    assert "rank 1 (w1) has left" in world.sessions[0].of(OperationFailed)[0].reason
    assert world.sessions[0].of(LeaveGroup) == [LeaveGroup("g", 1)]
    world.add(0, 2, [1, 1, 1, 1])
    assert "rank 1 (w1) left the group before" in world.sessions[0].of(OperationFailed)[1].reason
    world.say(0, LeaveGroup("g"))
    assert world.relay.figures() == {}


def test_groups_of_two_sizes_and_pieces_that_fit_nothing_break_the_group() -> None:
    world = World(2)
    world.open(0, "w/0")
    world.open(1, "w/0")
    world.open(0, "w/1")
    world.open(1, "w/1", size=5)  # the same program
    assert all("rank 1 of 5" in session.of(GroupEnded)[0].reason for session in world.sessions)
    world = World(2)
    world.add(0, 1, [1, 1, 1, 1])
    world.add(1, 1, [1, 1], call=None)  # says no call, sends another size
    assert "fits no other rank's" in world.sessions[0].of(GroupEnded)[0].reason


def test_a_reduction_that_there_is_not_fails_on_all() -> None:
    world = World(2)
    call = CallSpec("all_reduce", "median", "float32", (1,))
    for rank in range(2):
        tensor = FlatTensor("float32", 1)
        world.say(
            rank,
            Piece(
                group="g",
                sequence=1,
                target=-1,
                source=rank,
                offset=0,
                total=1,
                tensor=tensor,
                reduce="median",
                call=call,
            ),
            b"abcd",
        )
    assert all("median" in session.of(OperationFailed)[0].reason for session in world.sessions)


def test_forget_drops_groups_and_keys_and_counts_are_kept_until_then() -> None:
    world = World(2)
    for rank in range(2):
        world.add(rank, 1, [1, 1, 1, 1])
    figures = world.relay.figures("g")["g"]
    assert (figures.in_bytes, figures.out_bytes) == (32, 32)
    world.say(0, StoreAsk(1, "set", ("g/k",), (b"v",)))
    world.relay.forget("g")
    assert world.relay.figures() == {}
    world.say(0, StoreAsk(2, "check", ("g/k",)))
    assert world.sessions[0].of(StoreReply)[-1].number == 0
    world.add(0, 2, [1, 1, 1, 1])  # of a generation that is over
    assert not world.relay.on_event(SessionClosed(world.sessions[0], LinkBroken("x"), True))


def test_the_store_answers_who_waits_over_its_own_session() -> None:
    world = World(2)
    world.say(0, StoreAsk(5, "get", ("k",)))
    world.say(1, StoreAsk(6, "set", ("k",), (b"v",)))
    assert world.sessions[0].of(StoreReply) == [StoreReply(5, (b"v",))]
    assert world.sessions[1].of(StoreReply) == [StoreReply(6)]


def stranger(world: World) -> FakeSession:
    world.sessions.append(FakeSession(100 + len(world.sessions)))
    return world.sessions[-1]


def assert_sums(world: World, sequence: int = 1) -> None:
    for rank in range(world.size):
        world.add(rank, sequence, [1, 1, 1, 1])
    for session in world.sessions[: world.size]:
        assert [floats(p) for m, p in session.got if isinstance(m, Piece)][-1] == [float(world.size)] * 4
        assert not session.of(GroupEnded)


def test_a_rank_that_a_session_holds_is_not_given_to_another_and_the_group_goes_on() -> None:
    world = World(2)
    other = stranger(world)
    for rank in (0, 1):
        world.say(2, OpenGroup("g", rank, 2, "x"))
    assert [ended.reason.split(": ")[1] for ended in other.of(GroupEnded)] == [
        "another session holds it (w0)",
        "another session holds it (w1)",
    ]
    world.say(2, LeaveGroup("g"))
    world.close(2)
    assert_sums(world)
    world.open(0)  # again, by the same session
    assert_sums(world, 2)


def test_a_wrong_size_or_place_is_told_to_its_opener_alone() -> None:
    world = World(2)
    other = stranger(world)
    for group, rank, size in (("g", 2, 3), ("g", -1, 2), ("g", 2, 2), ("new", 5, 2), ("new", 0, 0), ("new", 0, 4097)):
        world.say(2, OpenGroup(group, rank, size, "x"))
    assert len(other.of(GroupEnded)) == 6
    assert set(world.relay.figures()) == {"g"}
    assert_sums(world)


def test_a_rank_is_free_again_when_its_session_is_over() -> None:
    world = World(2, opened=False)
    world.open(0)
    world.say(0, LeaveGroup("g"))
    world.sessions[0] = FakeSession(9)
    world.open(0)
    world.open(1)
    assert not world.sessions[0].of(GroupEnded)


def assigned(size: int) -> World:
    world = World(size, opened=False)
    for rank in range(size):
        world.relay.assign("run/3/", world.sessions[rank].session_id, rank, size)
    return world


def test_a_formed_group_takes_each_session_as_the_rank_it_was_assigned() -> None:
    world = assigned(2)
    other = stranger(world)
    world.open(1, "run/3//0", 3)
    world.open(0, "run/3//1", 3)
    world.say(1, OpenGroup("run/3//0", 0, 2, "w1"))
    assert [len(session.of(GroupEnded)) for session in world.sessions] == [1, 2, 0]
    for name in ("run/3//0", "run/3//1", "run/3//0/split-1", "run/3/x"):
        world.say(2, OpenGroup(name, 0, 2, "x"))
    assert all("assigned to other sessions" in ended.reason for ended in other.of(GroupEnded))
    assert len(other.of(GroupEnded)) == 4
    assert world.relay.figures() == {}
    world.open(0, "run/3//0")
    world.open(1, "run/3//0")
    world.say(0, OpenGroup("run/3//1", 1, 2, "w0"))  # ranks of a subgroup are the program's own
    assert set(world.relay.figures()) == {"run/3//0", "run/3//1"}


def test_what_others_opened_under_the_name_of_a_formed_group_makes_room_for_it() -> None:
    world = World(2, opened=False)
    other = stranger(world)
    world.say(2, OpenGroup("run/3//0", 0, 2, "x"))
    world.say(2, StoreAsk(1, "set", ("run/3/0/k",), (b"forged",)))
    for rank in range(2):
        world.relay.assign("run/3/", world.sessions[rank].session_id, rank, 2)
        world.open(rank, "run/3//0")
    assert "belongs to a group of the orchestrator" in other.of(GroupEnded)[0].reason
    world.say(0, StoreAsk(2, "check", ("run/3/0/k",)))
    assert world.sessions[0].of(StoreReply)[-1].number == 0
    assert not world.sessions[0].of(GroupEnded) and not world.sessions[1].of(GroupEnded)
    world.relay.forget("run/3/")
    assert world.relay._assigned == {}


def test_a_wait_that_was_placed_before_a_group_was_formed_gets_nothing_of_its_keys() -> None:
    world = World(2, opened=False)
    other = stranger(world)
    for request, (op, key) in enumerate((("get", "run/3/0/k"), ("wait", "run/3/0/k"), ("queue_pop", "run/3/q")), 1):
        world.say(2, StoreAsk(request, op, ("own", key) if op == "get" else (key,), number=1))
    world.say(2, StoreAsk(4, "get", ("run/4/k",)))
    assert not other.of(StoreReply)
    for rank in range(2):
        world.relay.assign("run/3/", world.sessions[rank].session_id, rank, 2)
    refused = other.of(StoreReply)
    assert [reply.request_id for reply in refused] == [1, 2, 3]
    assert all("'run/3/' are for the ranks of that group" in reply.problem for reply in refused)
    world.say(1, StoreAsk(1, "get", ("run/3/0/k",)))
    world.say(0, StoreAsk(1, "set", ("run/3/0/k", "own"), (b"secret", b"")))
    world.say(0, StoreAsk(2, "queue_push", ("run/3/q",), (b"secret",)))
    assert other.of(StoreReply) == refused
    assert world.sessions[1].of(StoreReply)[0].values == (b"secret",)


def parcel(group: str, target: int, number: int, nbytes: int) -> Parcel:
    tensor = FlatTensor("uint8", nbytes)
    return Parcel(group=group, source=0, target=target, tag=0, number=number, offset=0, total=nbytes, tensor=tensor)


def test_a_session_that_fills_the_hub_with_what_waits_is_ended_by_name() -> None:
    mib = 1 << 20
    for what in ("parcels", "pieces", "one group each"):
        world = World(3, opened=False, most_waiting_bytes=8 * mib)
        world.open(0)
        world.open(1)
        sent = 0
        while not world.sessions[0].ended:
            sent += 1
            assert sent <= 8, "it is ended before the bound is far behind"
            if what == "pieces":
                world.add(0, sent, np.zeros(mib // 4), call=None)
            else:
                name = "g" if what == "parcels" else f"g{sent}"
                world.open(0, name)
                world.say(0, parcel(name, 2, sent, mib), bytes(mib))
        assert sent == 8 and "the hub keeps 8 MiB" in world.sessions[0].ended
        assert "rank 0 (w0) was lost: it sent 8 MiB that wait" in world.sessions[1].of(GroupEnded)[0].reason
        assert not world.sessions[1].ended
        assert not any(seat.group.held for seat in world.relay._seats.values())


def test_what_those_who_left_have_waiting_is_bounded_too() -> None:
    mib = 1 << 20
    world = World(3, opened=False, most_waiting_bytes=8 * mib)
    for number in range(30):  # sends and leaves, and is in no group any more
        world.open(0, f"g{number}")
        world.say(0, parcel(f"g{number}", 1, 1, mib), bytes(mib))
        world.say(0, LeaveGroup(f"g{number}"))
    assert list(world.relay.figures()) == [f"g{number}" for number in range(23, 30)]
    world.open(1, "g29")
    assert [len(payload) for message, payload in world.sessions[1].got if isinstance(message, Parcel)] == [mib]
    world = World(3, opened=False, most_waiting_bytes=8 * mib)
    world.open(1)
    for number in range(8):  # sends and leaves, and comes again
        world.open(0)
        world.say(0, parcel("g", 2, number, mib), bytes(mib))
        assert bool(world.sessions[0].ended) == (number == 7)
        world.say(0, LeaveGroup("g"))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["add", "late", "parcel", "open", "leave", "expire"]),
                          st.integers(1, 3)), max_size=40))  # fmt: skip
def test_what_waits_is_counted_as_what_is_there(acts) -> None:
    world = World(3, opened=False)
    world.open(0)
    group = world.relay._seats["g"].group
    for rank, act, number in acts:
        if act == "open":
            world.open(rank)
        elif act == "leave":
            world.say(rank, LeaveGroup("g"))
        elif act == "expire":
            world.say(rank, Expire("g", number, 1.0))
        elif act == "parcel":
            world.say(rank, parcel("g", (rank + 1) % 3, number, 10), bytes(10))
        else:
            world.add(rank, number, [1, 1, 1, 1], call=SUM if act == "add" else None)
        waiting = sum(len(several) for several in group._waiting.values())
        parts = sum(part is not None for place in group._places.values() for part in place.parts)
        specs = sum(len(call.specs) for call in group._calls.values())
        least = 500 * (waiting + parts + specs) + 10 * waiting + 16 * parts + 24 * len(group._places)
        assert all(held >= 0 for held in group.held.values())
        assert least <= sum(group.held.values()) <= least + 100 * specs


def test_keys_of_a_formed_group_are_for_its_ranks_alone() -> None:
    world = assigned(2)
    other = stranger(world)
    world.say(0, StoreAsk(1, "set", ("run/3/0/k",), (b"v",)))
    asks = [
        ("get", "run/3/0/k"), ("set", "run/3/0/k"), ("delete", "run/3/0/k"), ("wait", "run/3/x"), ("list_keys", ""),
        ("forget", ""), ("forget", "run/"), ("forget", "run/3/0"), ("num_keys", "r"), ("queue_push", "run/3/q"),
    ]  # fmt: skip
    for op, key in asks:
        world.say(2, StoreAsk(2, op, ("own", key) if op in ("get", "wait") else (key,), (b"v",)))
        assert "'run/3/' are for the ranks of that group" in other.of(StoreReply)[-1].problem
    assert len(other.of(StoreReply)) == len(asks)
    for op, key in (
        ("set", "program/1/k"),
        ("get", "program/1/k"),
        ("list_keys", "program/1/"),
        ("forget", "program/"),
    ):
        world.say(2, StoreAsk(3, op, (key,), (b"v",) if op == "set" else ()))
        assert not other.of(StoreReply)[-1].problem
    world.say(1, StoreAsk(4, "get", ("run/3/0/k",)))
    world.say(1, StoreAsk(5, "list_keys", ("run/3/",)))
    assert [reply.values for reply in world.sessions[1].of(StoreReply)] == [(b"v",), (b"run/3/0/k",)]
    world.relay.forget("run/3/")
    world.say(2, StoreAsk(6, "check", ("run/3/0/k",)))
    assert (other.of(StoreReply)[-1].number, other.of(StoreReply)[-1].problem) == (0, "")
