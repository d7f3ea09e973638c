"""The table of shared keys: like torch's own stores, and nobody waits for ever."""

from __future__ import annotations

from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.hub import store
from guava_nb.hub.store import MOST_BYTES, MOST_WAITS, StoreTable
from guava_nb.protocol.messages import StoreAsk, StoreReply

A, B = b"a", b"b"


def ask(table: StoreTable, op: str, *keys: str, values=(), number=0, client=A, request=1):
    return table.ask(client, StoreAsk(request, op, keys, tuple(values), number))


def only(answers) -> StoreReply:
    ((_, reply),) = answers
    return reply


def test_values_come_back_and_counters_count():
    table = StoreTable()
    ask(table, "set", "k", values=[b"\x00v"])
    assert only(ask(table, "get", "k")).values == (b"\x00v",)
    assert only(ask(table, "add", "n", number=3)).number == 3
    assert only(ask(table, "add", "n", number=-1)).number == 2
    assert only(ask(table, "get", "n")).values == (b"2",)
    ask(table, "append", "k", values=[b"w"])
    ask(table, "append", "new", values=[b"x"])
    assert only(ask(table, "multi_get", "k", "new")).values == (b"\x00vw", b"x")
    assert only(ask(table, "num_keys", "")).number == 3
    assert only(ask(table, "list_keys", "n")).values == (b"n", b"new")
    assert only(ask(table, "delete", "k")).number == 1
    assert only(ask(table, "delete", "k")).number == 0
    assert only(ask(table, "check", "n", "k")).number == 0


def test_compare_set_is_that_of_torch():
    table = StoreTable()
    assert only(ask(table, "compare_set", "k", values=[b"x", b"y"])).values == (b"x",)  # absent, and something expected
    assert only(ask(table, "compare_set", "k", values=[b"", b"y"])).values == (b"y",)
    assert only(ask(table, "compare_set", "k", values=[b"x", b"z"])).values == (b"y",)
    assert only(ask(table, "compare_set", "k", values=[b"y", b"z"])).values == (b"z",)


def test_a_wait_is_answered_once_all_keys_are_there():
    table = StoreTable()
    assert ask(table, "get", "a", "b", client=A, request=7) == []
    assert ask(table, "wait", "b", client=B, request=8) == []
    assert ask(table, "set", "a", values=[b"1"], client=B, request=9) == [(B, StoreReply(9))]
    answers = ask(table, "set", "b", values=[b"2"], client=B, request=10)
    assert answers == [(B, StoreReply(10)), (A, StoreReply(7, (b"1", b"2"))), (B, StoreReply(8))]
    assert ask(table, "set", "b", values=[b"3"], client=B, request=11) == [(B, StoreReply(11))]


def test_who_gave_up_or_went_is_answered_no_more():
    table = StoreTable()
    ask(table, "get", "k", client=A, request=1)
    ask(table, "get", "k", client=A, request=2)
    ask(table, "get", "k", client=B, request=1)
    assert table.ask(A, StoreAsk(3, "cancel", number=1)) == []
    table.lost(B)
    assert [reply.request_id for _, reply in ask(table, "set", "k", values=[b""], request=4)] == [4, 2]


def test_queues_give_values_in_order_and_one_each():
    table = StoreTable()
    assert ask(table, "queue_pop", "q", number=1, client=A, request=1) == []
    assert ask(table, "queue_pop", "q", number=1, client=B, request=2) == []
    assert ask(table, "queue_push", "q", values=[b"x"], request=3) == [(A, StoreReply(3)), (A, StoreReply(1, (b"x",)))]
    assert ask(table, "queue_push", "q", values=[b"y"], request=4)[1] == (B, StoreReply(2, (b"y",)))
    assert "empty" in only(ask(table, "queue_pop", "q")).problem
    ask(table, "queue_push", "q", values=[b"z"])
    assert only(ask(table, "queue_len", "q")).number == 1


def test_lent_keys_go_with_their_client_and_prefixes_can_be_forgotten():
    table = StoreTable()
    ask(table, "lend", "meet", values=[b"1"], client=A)
    ask(table, "lend", "meet", values=[b"2"], client=B)
    table.lost(A)  # an older run's rank 0 ends after the newer one's began
    assert only(ask(table, "get", "meet")).values == (b"2",)
    table.lost(B)
    assert only(ask(table, "check", "meet")).number == 0
    ask(table, "set", "g1/a", values=[b""])
    ask(table, "set", "g2/a", values=[b""])
    ask(table, "queue_push", "g1/q", values=[b""])
    table.forget("g1/")
    assert len(table) == 1


def test_nonsense_is_an_answer_not_an_exception():
    table = StoreTable()
    assert "no operation" in only(ask(table, "explode")).problem
    assert "cannot add" in only(ask(table, "add")).problem
    ask(table, "set", "text", values=[b"abc"])
    assert "cannot add" in only(ask(table, "add", "text", number=1)).problem
    assert "cannot compare_set" in only(ask(table, "compare_set", "k", values=[b"x"])).problem
    assert "cannot set" in only(ask(table, "set", "k")).problem


def test_what_a_member_keeps_at_the_hub_is_bounded_and_told():
    table, value = StoreTable(), [bytes(MOST_BYTES // 4)]
    for number in range(3):
        assert not only(ask(table, "set", f"k{number}", values=value)).problem
    for op in ("set", "append", "queue_push", "claim", "lend", "multi_set"):
        assert (
            "may take 64 MiB"
            in only(ask(table, op, "more", values=value * 2 if op == "append" else [value[0] * 2])).problem
        )
    assert not only(ask(table, "set", "k0", values=value)).problem  # instead of its own
    assert not only(ask(table, "set", "more", values=[value[0] * 2], client=B)).problem
    assert only(ask(table, "delete", "k0")).number == 1
    assert not only(ask(table, "queue_push", "q", values=value)).problem
    assert only(ask(table, "queue_pop", "q")).values == tuple(value)
    table.forget("")
    assert len(table) == 0 and not any(table._held.values()) and not table._sizes


def test_what_members_left_stays_up_to_a_bound_and_the_oldest_goes():
    table, value = StoreTable(), [bytes(MOST_BYTES // 4)]
    for client in range(6):
        ask(table, "set", f"k{client}", values=value, client=bytes([client]))
        ask(table, "queue_push", f"q{client}", values=[b"small"], client=bytes([client]))
        table.lost(bytes([client]))
    assert only(ask(table, "list_keys", "")).values == (b"k3", b"k4", b"k5")
    assert table._held[b""] <= MOST_BYTES


def test_a_member_cannot_wait_without_end():
    table = StoreTable()
    for request in range(MOST_WAITS):
        assert ask(table, "get", "never", request=request) == []
    assert "waits 4096 times" in only(ask(table, "get", "never")).problem
    assert ask(table, "get", "never", client=B) == []


KEYS = st.sampled_from(["a", "b", "\0queue\0a", "k" * 300, "n"])
ASKS = st.builds(
    StoreAsk,
    request_id=st.integers(1, 5),
    op=st.sampled_from([*StoreTable()._handlers, "cancel"]),
    keys=st.lists(KEYS | st.text(max_size=3), max_size=4).map(tuple),
    values=st.lists(st.sampled_from([b"", b"7", bytes(90), bytes(700)]), max_size=4).map(tuple),
    number=st.integers(-(2**63), 2**63 - 1),
)


def kept_bytes(table: StoreTable) -> int:
    """Bytes of all texts and values that a table holds, however it counts them."""
    waits = [waiter.ask for waiter in table._waiting]
    texts = sum(map(len, [*table._values, *table._queues, *table._lent, *(key for ask in waits for key in ask.keys)]))
    queues = sum(len(value) for queue in table._queues.values() for value in queue)
    return texts + queues + sum(map(len, table._values.values())) + sum(len(v) for ask in waits for v in ask.values)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from([A, B]), ASKS | st.none()), max_size=60))
def test_what_is_kept_never_passes_the_limit_whatever_is_asked(asks):
    table, most = StoreTable(), 2000
    with mock.patch.object(store, "MOST_BYTES", most):
        for client, what in asks:
            if what is None:
                table.lost(client)
            else:
                table.ask(client, what)
            assert all(0 <= held <= most for held in table._held.values())
            assert sum(table._held.values()) == sum(size for _, size in table._sizes.values()) + sum(
                waiter.size for waiter in table._waiting
            )
            assert kept_bytes(table) <= sum(table._held.values())
            assert set(table._lent) <= set(table._values)
    for client in (A, B):
        table.lost(client)
    table.forget("")
    assert not table._waiting and not table._sizes and not any(table._held.values())


def test_each_way_past_the_limit_is_shut():
    most = 2000
    with mock.patch.object(store, "MOST_BYTES", most):
        table = StoreTable()
        for number in range(100):  # counters bring no values
            ask(table, "add", f"n{number}", number=1)
        assert 0 < len(table) < 20
        table = StoreTable()
        assert ask(table, "get", "k" * 1000) == []
        assert "may take" in only(ask(table, "wait", "k" * 1000)).problem
        table.lost(A)
        ask(table, "lend", *(f"k{number}" for number in range(1000)))
        assert not table._lent
        table = StoreTable()
        ask(table, "set", "k", values=[bytes(1500)])
        assert "may take" in only(ask(table, "set", "k", "k", "l", values=[b"", bytes(400), bytes(1500)])).problem
        assert only(ask(table, "get", "k")).values == (bytes(1500),), "what is refused changes nothing"
        assert "ask for fewer" in only(ask(table, "multi_get", "k", "k")).problem
        ask(table, "append", "k", values=[bytes(100)], client=B)  # the whole is B's then
        assert "may take" in only(ask(table, "append", "k", values=[bytes(400)], client=B)).problem


def test_a_wait_needs_all_its_keys_at_once_and_those_that_are_not_for_it_leave_it_alone():
    table = StoreTable()
    assert ask(table, "get", "a", "b", "a", client=A, request=1) == []
    ask(table, "set", "a", values=[b"1"], client=B)
    ask(table, "delete", "a", client=B)
    assert len(ask(table, "set", "b", values=[b"2"], client=B)) == 1, "a is gone again"
    assert len(ask(table, "set", "b", values=[b"3"], client=B)) == 1, "a key that comes twice is one"
    table.forget("b")
    assert len(ask(table, "multi_set", "c", "a", values=[b"", b"4"], client=B)) == 1
    assert ask(table, "append", "b", values=[b"5"], client=B)[1] == (A, StoreReply(1, (b"4", b"5", b"4")))
    assert not table._waiting and not table._waiting_for and not table._waits


def test_an_ask_looks_only_at_those_who_wait_for_its_keys():
    table, looks = StoreTable(), list[str]()
    for request in range(MOST_WAITS):
        ask(table, "get", "here", "never", client=A, request=request)
        ask(table, "queue_pop", "queue", number=1, client=B, request=request)
    for op, handler in table._handlers.items():
        table._handlers[op] = lambda what, op=op, handler=handler: (looks.append(op), handler(what))[1]
    for op, key in (("set", "here"), ("delete", "here"), ("set", "other"), ("queue_push", "queue"), ("check", "never")):
        ask(table, op, key, values=[b""] if op != "delete" else (), client=b"c")
    assert looks == ["set", "delete", "set", "queue_push", "queue_pop", "check"]


def test_what_an_ask_its_waits_and_its_keys_name_is_bounded_in_number_and_told():
    with mock.patch.object(store, "MOST_KEYS", 6):
        table = StoreTable()
        ask(table, "set", "k", values=[b""])
        assert "may name 6 keys, and this one names 7" in only(ask(table, "get", *"kkkkkkk")).problem
        assert len(only(ask(table, "get", *"kkkkkk")).values) == 6
        assert ask(table, "get", *"abcd") == []
        assert "waits of this member may name 6 keys" in only(ask(table, "wait", *"abc")).problem
        assert ask(table, "wait", *"abc", client=B) == []
        assert "may have 6 keys" in only(ask(table, "set", *"lmnopq", values=[b""] * 6)).problem
        ask(table, "set", *"lmnop", values=[b""] * 5)
        for op in ("append", "add", "claim", "lend", "queue_push", "compare_set"):
            assert "may have 6 keys" in only(ask(table, op, "x", values=[b""] * (1 + (op == "compare_set")))).problem
        assert not only(ask(table, "set", "k", values=[b"again"])).problem
        ask(table, "set", "mine", values=[b""], client=B)
        table.lost(A)
        table.lost(B)
        assert only(ask(table, "list_keys", "")).values == (b"k", b"m", b"mine", b"n", b"o", b"p"), "l is the oldest"


def test_what_is_appended_is_not_copied_each_time_and_never_changes_an_answer():
    table = StoreTable()
    ask(table, "append", "k", values=[b"a"])
    held = table._values["k"]
    before = only(ask(table, "get", "k")).values
    ask(table, "append", "k", values=[b"b"])
    assert table._values["k"] is held and before == (b"a",)
    assert only(ask(table, "claim", "k", values=[b""])).values == (b"ab",)
    assert only(ask(table, "compare_set", "k", values=[b"x", b"y"])).values == (b"ab",)
    assert all(type(value) is bytes for value in only(ask(table, "get", "k")).values)
