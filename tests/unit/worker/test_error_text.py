from __future__ import annotations

from guava_nb.worker.error_text import MAX_TEXT_CHARS, MAX_TRACE_CHARS, error_text, sendable, trace_text


def test_lone_surrogates_become_escapes() -> None:
    assert sendable("caf\u00e9 \udcff") == "caf\u00e9 \\udcff"


def test_an_error_that_cannot_show_itself_is_told_all_the_same() -> None:
    class Shy(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert "RuntimeError" in error_text(Shy())
    assert "Shy" in trace_text(Shy())


def test_long_texts_are_cut_where_they_tell_least() -> None:
    error = ValueError("begin" + "x" * 1_000_000 + "end")
    assert error_text(error).startswith("begin") and len(error_text(error)) < MAX_TEXT_CHARS + 20
    assert trace_text(error).rstrip().endswith("end") and len(trace_text(error)) < MAX_TRACE_CHARS + 20
