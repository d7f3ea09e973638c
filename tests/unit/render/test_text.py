"""Tables as plain text."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.render import (
    Table,
    View,
    to_text,
)
from guava_nb.render.text import WIDTH, table_text


@given(
    st.lists(st.lists(st.text("ab 数", max_size=40), min_size=12, max_size=12), min_size=1, max_size=4),
    st.integers(2, 12),
)
@settings(max_examples=60, deadline=None)
def test_a_wide_table_is_set_in_pieces_and_loses_nothing(cells: list[list[str]], columns: int) -> None:
    rows = tuple(tuple(f"r{k}c{n}{cell}" for n, cell in enumerate(row[:columns])) for k, row in enumerate(cells))
    text = table_text(Table(tuple(f"column{n}" for n in range(columns)), rows))
    for row in rows:
        assert all(" ".join(cell.split()) in text for cell in row)
    assert text.count("column0") == text.count("r0c0") >= 1
    for line in text.splitlines():
        width = sum(2 if letter == "数" else 1 for letter in line)
        assert width <= WIDTH or len(re.findall(r"r\dc\d+|column\d+", line)) in (0, 2), (
            "two columns fit or nothing does"
        )


def test_wide_characters_keep_columns_straight() -> None:
    table = Table(("name", "n"), (("数据", "1"), ("ab", "2"), ("two\nlines", "3")))
    lines = to_text(View("x", tables=(table,))).splitlines()[1:]
    assert lines[2] == "  数据       1"
    assert lines[4] == "  two lines  3"
