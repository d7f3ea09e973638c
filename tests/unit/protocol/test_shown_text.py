"""What a peer says has nothing in it that a terminal obeys, whichever field of whichever record it says it in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.protocol.messages import FROM_WORKERS, MESSAGE_KINDS, CrashReport, Factory, Log, Message, StoreAsk
from guava_nb.protocol.shown_text import COLOURED, EXACT, cleaned, shown_text
from tests.support.hostile_text import HOSTILE, hostile, obeyed


@given(st.text(st.characters(codec="utf-8")))
def test_a_terminal_obeys_nothing_in_a_peer_s_text_but_colours_of_what_workers_print(text: str) -> None:
    shown, printed = shown_text(text), shown_text(text, coloured=True)
    assert shown_text(shown) == shown and shown_text(printed, coloured=True) == printed
    for char in shown + printed.replace("\x1b", ""):
        assert char in "\t\n" or not (ord(char) < 32 or 127 <= ord(char) < 160)
    red = f"\x1b[1;31mred\x1b[0m\t{text}"
    assert shown_text(red, coloured=True).startswith("\x1b[1;31mred\x1b[0m\t") and shown_text(red).startswith("red\t")


@pytest.mark.parametrize(
    "order", ["8", "30;40", "40", "31;41", "38;5;0", "38;2;0;0;0", "48;5;1", "7", "5", "30", "1;8", ";;8", "008", "97"]
)
def test_no_order_hides_a_text(order: str) -> None:
    for coloured in (False, True):
        assert shown_text(f"a\x1b[{order}mb", coloured) == "ab"
        assert "\x1b" not in shown_text(f"a\x1b[\x1b[{order}m{order}mb", coloured)


def test_a_line_that_workers_print_ends_its_own_colours() -> None:
    assert shown_text("\x1b[31mred\nplain\n\x1b[1mb\x1b[m\n\x1b[1mc\x1b[39m", coloured=True) == (
        "\x1b[31mred\x1b[0m\nplain\n\x1b[1mb\x1b[m\n\x1b[1mc\x1b[39m\x1b[0m"
    )


@pytest.mark.parametrize("mark", [*map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))), "\u2028", "\u2029"])
def test_marks_that_turn_or_end_a_line_are_replaced(mark: str) -> None:
    instead = Log("stdout", ("a\N{REPLACEMENT CHARACTER}b",))
    assert cleaned(Log("stdout", (f"a{mark}b",))) == instead


def test_only_lines_that_workers_print_have_colours() -> None:
    red = "\x1b[31mred\x1b[0m"
    assert cleaned(Log(red, (red,))) == Log("red", (red,))
    assert cleaned(CrashReport(1, (red,))) == CrashReport(1, (red,))
    assert {(record, name) for record, name in COLOURED} == {(Log, "lines"), (CrashReport, "tail")}


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
