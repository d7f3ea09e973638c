"""What a peer says has nothing in it that a terminal obeys, whichever field of whichever record it says it in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.protocol.messages import FROM_WORKERS, MESSAGE_KINDS, Factory, Message, StoreAsk
from guava_nb.protocol.shown_text import EXACT, cleaned, shown_text
from tests.support.hostile_text import HOSTILE, hostile, obeyed


@given(st.text(st.characters(codec="utf-8")))
def test_a_terminal_obeys_nothing_in_a_peer_s_text_but_colours(text: str) -> None:
    shown = shown_text(text)
    assert len(shown) == len(text) and shown_text(shown) == shown
    assert all(char in "\t\n\x1b" or not (ord(char) < 32 or 127 <= ord(char) < 160) for char in shown)
    assert shown_text(f"\x1b[1;31mred\x1b[0m\t{text}").startswith("\x1b[1;31mred\x1b[0m\t")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[8mhidden", "\ufffd[8mhidden"),
        ("\x1b[1;08mhidden", "\ufffd[1;08mhidden"),
        ("\x1b[38;5;8mgrey\x1b[48;2;8;8;8m", "\x1b[38;5;8mgrey\x1b[48;2;8;8;8m"),
        ("\x1b[38;5;8;8mhidden", "\ufffd[38;5;8;8mhidden"),
        ("a\u202eb\u2066c\u2028d", "a\ufffdb\ufffdc\ufffdd"),
        ("\u05e9\u05dc\u05d5\u05dd \u200f1", "\u05e9\u05dc\u05d5\u05dd \u200f1"),
    ],
)
def test_what_hides_text_or_turns_it_round_goes(text: str, shown: str) -> None:
    assert shown_text(text) == shown
    assert "\x1b" not in shown_text(text, colours=False)


@pytest.mark.parametrize("record", MESSAGE_KINDS.values(), ids=lambda record: record.__name__)
def test_all_texts_of_a_record_are_cleaned_and_all_else_stays(record: type[Message]) -> None:
    given = hostile(record)
    assert obeyed(cleaned(given)) == []
    harmless = hostile(record, "harmless")
    assert cleaned(harmless) is harmless


def test_what_is_a_program_s_own_stays_as_it_came() -> None:
    ask = StoreAsk(1, "set", (HOSTILE,))
    assert cleaned(ask) is ask
    made = Factory("name\a", {"delimiter": "\x01"})
    assert cleaned(made) == Factory("name\N{REPLACEMENT CHARACTER}", {"delimiter": "\x01"})
    assert {record for record, _ in EXACT} <= FROM_WORKERS | {Factory}
