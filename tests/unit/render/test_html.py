"""Views as HTML, and the same words as text."""

from __future__ import annotations

import html
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.render import (
    Progress,
    Table,
    View,
    run_view,
    session_view,
    summary_view,
    to_html,
    to_text,
)
from guava_nb.render.html import table_html
from tests.unit.render.status_cases import RUN, STATUS, WORKER


@given(st.text(), st.text(), st.text())
@settings(max_examples=60, deadline=None)
def test_html_escapes_everything_that_came_from_outside(title: str, cell: str, line: str) -> None:
    mark = "<script>&'\""
    made = View(title + mark, mark, Progress(1, 2, mark), (Table((mark,), ((cell + mark,),), mark),), (mark,))
    page = to_html(made, [line + mark])
    assert "<script" not in page
    assert page.count("&lt;script&gt;&amp;&#x27;&quot;") == 8


def test_html_and_text_say_the_same() -> None:
    for made in (session_view(STATUS), summary_view(RUN, [WORKER]), run_view(RUN, [WORKER])):
        words = set(re.findall(r"\w+", html.unescape(re.sub(r"<[^>]*>", " ", to_html(made)))))
        assert set(re.findall(r"\w+", to_text(made))) <= words


def test_html_is_neutral_and_needs_nothing() -> None:
    page = to_html(run_view(RUN, [WORKER]), ["x"])
    assert not re.search(r"<(script|style|link|img)|(?<![-\w])color:|background:(?!transparent|rgba)", page)


def test_a_column_of_sentences_stands_apart_before_it_takes_more_than_three_lines() -> None:
    words = "worker waits for data 16 %, data waits for worker 22 %"
    table = Table(("work", "samples", "out", "in", "who waits"), (("local-1", "3532", "4.9 MB", "4.5 MB", words),))
    assert table_html(table).count(">work</th>") == 2
    short = Table(("work", "samples", "out", "in", "who waits"), (("local-1", "3532", "4.9 MB", "4.5 MB", "no one"),))
    assert table_html(short).count(">work</th>") == 1


def test_a_long_path_may_break_anywhere_and_a_name_or_a_number_nowhere() -> None:
    facts = table_html(
        Table((), (("diary", "/home/someone/of/a/long/name/session-0123456789.txt"), ("rows", "3532 MB")))
    )
    assert facts.count("overflow-wrap:anywhere") == 1 and facts.count("white-space:nowrap") == 3
