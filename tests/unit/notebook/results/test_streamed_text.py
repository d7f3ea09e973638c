"""What follows prompts stands in the cell as it grows, each prompt in a line of its own."""

from __future__ import annotations

import pytest

from guava_nb.notebook.results.streamed_text import StreamedText


def test_lines_grow_in_the_order_of_the_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    stream = StreamedText(["ab", "c", "d"])
    seen = []

    def told() -> str:
        seen.append(capsys.readouterr().out)
        return seen[-1]

    stream.add(0, " a")
    assert told() == "0: ab a"
    stream.add(1, " zebra")
    stream.add(0, " and\N{REPLACEMENT CHARACTER}")
    assert told() == "nd", "the other prompt waits for its turn, half a letter for its other half"
    stream.break_line()
    stream.add(0, " and \N{SNOWMAN}")
    assert told() == "\n0: ab and \N{SNOWMAN}", "after something else the line begins anew"
    stream.end(0, " and \N{SNOWMAN}!")
    assert told() == "!\n1: c zebra"
    stream.end(1, " zebras")
    stream.end(2, "")
    assert told() == "s\n2: d\n"
    stream.add(1, "late")
    stream.break_line()
    assert told() == ""


def test_tokens_are_a_list_that_is_closed_at_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    stream = StreamedText([[1]])
    stream.add(0, [3])
    stream.add(0, [3, 14])
    stream.end(0, [3, 14, 5])
    assert capsys.readouterr().out == "0: [3, 14, 5]\n"


def test_a_text_whose_end_changes_what_stood_before_is_written_again(capsys: pytest.CaptureFixture[str]) -> None:
    stream = StreamedText(["a"])
    stream.add(0, " do n't")
    stream.end(0, " don't")
    assert capsys.readouterr().out == "0: a do n't\n0: a don't\n"
