"""Keys that go with the session that wrote them: how the ranks of a program take their places."""

from __future__ import annotations

from guava_nb.hub.store import StoreTable
from guava_nb.protocol.messages import StoreAsk

ONE, TWO = b"one", b"two"


def claim(table: StoreTable, client: bytes, value: bytes) -> bytes:
    (_, reply), *_ = table.ask(client, StoreAsk(1, "claim", ("place",), (value,)))
    return reply.values[0]


def test_a_claim_holds_until_its_session_ends() -> None:
    table = StoreTable()
    assert claim(table, ONE, b"a") == b"a"
    assert claim(table, TWO, b"b") == b"a"
    table.lost(TWO)
    assert claim(table, TWO, b"b") == b"a", "who failed to claim it does not take it away"
    table.lost(ONE)
    assert claim(table, TWO, b"b") == b"b"


def test_a_claim_answers_those_who_wait() -> None:
    table = StoreTable()
    assert table.ask(TWO, StoreAsk(5, "get", ("place",))) == []
    answers = table.ask(ONE, StoreAsk(1, "claim", ("place",), (b"a",)))
    assert [(client, reply.request_id, reply.values) for client, reply in answers] == [
        (ONE, 1, (b"a",)),
        (TWO, 5, (b"a",)),
    ]


def test_what_is_set_is_lent_no_more() -> None:
    table = StoreTable()
    claim(table, ONE, b"a")
    table.ask(ONE, StoreAsk(2, "set", ("place",), (b"c",)))
    table.lost(ONE)
    assert claim(table, TWO, b"b") == b"c"
