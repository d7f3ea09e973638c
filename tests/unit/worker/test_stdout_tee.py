from __future__ import annotations

import io

from guava_nb.worker.stdout_tee import BURST, MAX_LINE_CHARS, LineTee


class Recorder:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.dropped = 0
        self.now = 0.0
        self.original = io.StringIO()
        self.tee = LineTee(self.original, "stdout", self.emit, lambda: self.now)

    def emit(self, stream: str, lines: tuple[str, ...], dropped: int) -> None:
        assert stream == "stdout"
        self.lines += lines
        self.dropped += dropped


def test_whole_lines_are_sent_and_everything_is_written_through() -> None:
    r = Recorder()
    r.tee.write("a")
    assert r.lines == []
    r.tee.write("b\nc\nd")
    assert r.lines == ["ab", "c"]
    r.tee.finish()
    assert r.lines == ["ab", "c", "d"] and r.original.getvalue() == "ab\nc\nd"


def test_a_progress_bar_counts_as_its_last_state() -> None:
    r = Recorder()
    for k in range(100):
        r.tee.write(f"\r{k} %")
    r.tee.write("\ndone\r\n")
    assert r.lines == ["99 %", "done"]


def test_floods_are_cut_and_counted_and_the_rate_recovers() -> None:
    r = Recorder()
    for k in range(10_000):
        r.tee.write(f"{k}\n")
    assert len(r.lines) == int(BURST) and r.dropped == 0
    r.now = 1.0
    r.tee.write("later\n")
    assert r.lines[-1] == "later" and r.dropped == 10_000 - int(BURST)
    assert r.original.getvalue().count("\n") == 10_001


def test_long_lines_are_cut() -> None:
    r = Recorder()
    r.tee.write("x" * (10 * MAX_LINE_CHARS) + "\n")
    assert r.lines == ["x" * MAX_LINE_CHARS]


def test_sending_that_prints_does_not_feed_on_itself() -> None:
    r = Recorder()

    def emit(stream: str, lines: tuple[str, ...], dropped: int) -> None:
        r.lines += lines
        r.tee.write("warning from the sender\n")

    r.tee = LineTee(r.original, "stdout", emit)
    r.tee.write("one\n")
    assert r.lines == ["one"]
    assert not r.tee.isatty() and r.tee.writable()


def test_text_that_utf8_does_not_have_is_sent_as_escapes() -> None:
    r = Recorder()
    r.tee.write("name \udcff\n")
    assert r.lines == ["name \\udcff"]


def test_bytes_are_lines_too_and_may_end_within_a_character() -> None:
    r = Recorder()
    r.tee.buffer.write("nä".encode()[:2])
    assert r.tee.buffer.write("nä\n".encode()[2:]) == 2
    r.tee.buffer.write(memoryview(b"\xff\n"))
    assert r.lines == ["nä", "\N{REPLACEMENT CHARACTER}"] and r.tee.buffer.writable()


def test_a_flood_without_an_end_of_line_is_held_in_a_few_kilobytes() -> None:
    r = Recorder()
    for _ in range(100):
        r.tee.write("x" * 100_000)
        r.tee.write("y\r" * 10_000)
    assert len(r.tee._pending) <= 4 * MAX_LINE_CHARS and r.lines == []
    r.tee.write("z" * 5_000_000 + "\nlast\n")
    assert [len(line) for line in r.lines] == [MAX_LINE_CHARS]
    r.now = 1.0
    r.tee.write("on\n")
    assert r.lines[-1] == "on" and r.dropped == 1


def test_one_call_with_a_million_lines_is_counted_and_not_looked_at() -> None:
    r = Recorder()
    r.tee.write("line\n" * 1_000_000)
    assert len(r.lines) == int(BURST)
    r.now = 1.0
    r.tee.write("later\n")
    assert r.lines[-1] == "later" and r.dropped == 1_000_000 - int(BURST)


def test_a_flood_keeps_nothing_back_that_is_printed_after_its_end() -> None:
    r = Recorder()
    r.tee.write("flood\n" * 900)
    r.tee.finish()
    assert r.dropped == 900 - BURST and len(r.lines) == BURST + 1  # an empty one tells what was left out
    r.tee.write("the next cell\n")
    assert r.lines[-1] == "the next cell"
