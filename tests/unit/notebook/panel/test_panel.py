"""The panel's manners: rare, harmless, and gone at the end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from IPython.display import DisplayHandle

from guava_nb.notebook.lines import LineTail
from guava_nb.notebook.panel import surfaces
from guava_nb.notebook.panel.panel import Panel, make_panel
from guava_nb.notebook.panel.surfaces import DisplaySurface, LineSurface, TextSurface
from guava_nb.render import Curve, Progress, Table, View


def view(step: int, total: int | None = 10_000) -> View:
    return View("training", f"loss {1 / (step + 1):.3f}", Progress(step, total), (Table((), (("steps", str(step)),)),))


def AT_NOON() -> float:
    return time.mktime((2026, 1, 1, 12, 0, 0, 0, 0, -1))


class Clock:
    """Seconds that pass only when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """A surface that counts, and fails where it is told to."""

    interval_s = 0.25

    def __init__(self, fail: Sequence[str] = ()) -> None:
        self.fail, self.drawn, self.finished, self.closed = fail, [], [], 0  # type: ignore[var-annotated]

    def draw(self, shown: View, lines: Sequence[str]) -> None:
        if "draw" in self.fail:
            raise LookupError("no parent header")
        self.drawn.append(shown)

    def finish(self, shown: View, lines: Sequence[str]) -> None:
        if "finish" in self.fail:
            raise OSError("gone")
        self.finished.append(shown)

    def close(self) -> None:
        self.closed += 1
        if "close" in self.fail:
            raise OSError("gone too")


def test_ten_thousand_updates_in_ten_seconds_draw_forty_times() -> None:
    clock, surface = Clock(), Recorder()
    panel = Panel(surface, clock)
    made = []
    for step in range(10_000):
        panel.update(lambda step=step: (made.append(step), (view(step), ()))[1])  # type: ignore[misc]
        clock.now += 0.001
    panel.finish(lambda: (view(10_000), ()))
    assert len(surface.drawn) <= 41
    assert len(made) == len(surface.drawn), "a frame is made only when it is drawn"
    assert [shown.progress.done for shown in surface.finished if shown.progress] == [10_000]
    assert surface.closed == 1


@pytest.mark.parametrize("fail", [("draw",), ("finish",), ("close",), ("draw", "finish", "close")])
def test_a_fault_switches_the_panel_off_and_is_told_once(
    capsys: pytest.CaptureFixture[str], fail: Sequence[str]
) -> None:
    clock, surface = Clock(), Recorder(fail)
    panel = Panel(surface, clock)
    for step in range(5):
        panel.update(lambda step=step: (view(step), ()))  # type: ignore[misc]
        clock.now += 1
    panel.finish(lambda: (view(5), ()))
    panel.close()
    assert panel.fault is not None
    assert surface.closed == 1
    assert capsys.readouterr().out.count("switched off") == (0 if fail == ("close",) else 1)


def test_a_fault_in_making_the_frame_is_a_fault_too() -> None:
    panel = Panel(Recorder())
    panel.update(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    assert isinstance(panel.fault, ZeroDivisionError)


def test_not_even_a_broken_standard_output_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Broken())
    panel = make_panel("text")
    panel.update(lambda: (view(1), ()))
    panel.finish(lambda: (view(2), ()))
    assert panel.num_faults >= 2


def test_text_is_one_line_that_moves_and_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    threads = threading.active_count()
    surface = TextSurface()
    for step in range(0, 100, 10):
        surface.draw(view(step, 100), ["worker-0: half"] if step == 50 else [])
    surface.finish(view(100, 100), ["worker-0: last"])
    text = capsys.readouterr().out
    assert threading.active_count() == threads, "the bar may start no thread"
    assert text.count("worker-0: half\n") == 1
    assert text.index("worker-0: last") < text.rindex("100/100")
    last_bar = text[: text.rindex("\ntraining")].rsplit("\n", 1)[-1]
    assert last_bar.rsplit("\r", 1)[-1].startswith("training: 100%")
    assert text.count("\n") == 2 + 3, "two lines of output, one bar, two lines of summary"


def test_a_dead_bar_of_the_user_does_not_disturb_ours(capsys: pytest.CaptureFixture[str]) -> None:
    from tqdm import tqdm

    dead = tqdm(total=5, file=sys.stdout)
    for _ in range(2):
        surface = TextSurface()
        for step in range(5):
            surface.draw(view(step, 5), [])
        surface.close()
    text = capsys.readouterr().out
    assert "\x1b[A" not in text
    dead.close()


def test_a_view_without_progress_is_its_headline(capsys: pytest.CaptureFixture[str]) -> None:
    surface = TextSurface()
    surface.draw(View("worker w", "working on cpu"), [])
    surface.close()
    assert "worker w: working on cpu" in capsys.readouterr().out


def test_unknown_total_is_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    panel = make_panel("text")
    panel.update(lambda: (view(3, None), ()))
    panel.finish(lambda: (view(4, 8), ()))
    assert panel.fault is None
    assert "steps  4" in capsys.readouterr().out


def test_lines_are_sparse_and_tell_news_once(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    surface = LineSurface(clock, AT_NOON)
    for step in range(10_000):  # a view every half second, for 83 minutes
        told = (View("training", f"step {step}", Progress(step, 10_000), (), ("w-2 was lost",) if step > 500 else ()),)
        surface.draw(*told, ["half"] if step == 5000 else [])
        clock.now += 0.5
    surface.finish(view(10_000), [])
    written = capsys.readouterr().out
    assert "\r" not in written
    assert 50 < written.count("\n") < 100
    assert written.startswith("12:00:00 training: step 0\n12:00:00 training: step 4\n")
    assert written.count("w-2 was lost\n") == 1
    assert written.count("half\n") == 1


def test_a_state_that_does_not_change_is_written_once(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    surface = LineSurface(clock, AT_NOON)
    for _ in range(1000):
        surface.draw(View("worker w", "ready"), [])
        clock.now += 0.5
    assert capsys.readouterr().out == "12:00:00 worker w: ready\n"


def test_a_flood_of_lines_is_cut_in_the_middle(capsys: pytest.CaptureFixture[str]) -> None:
    TextSurface().finish(view(1), [f"line {n}" for n in range(1000)])
    text = capsys.readouterr().out
    assert "line 0\n" in text
    assert "line 999\n" in text
    assert "980 more lines" in text


class Page:
    """Takes what a DisplayHandle publishes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown: list[dict[str, Any]] = []
        self.updated: list[dict[str, Any]] = []
        monkeypatch.setattr(DisplayHandle, "display", lambda handle, bundle, raw: self.shown.append(bundle))
        monkeypatch.setattr(DisplayHandle, "update", lambda handle, bundle, raw: self.updated.append(bundle))


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    return Page(monkeypatch)


def test_widget_changes_its_value_and_leaves_static_html(page: Page) -> None:
    from ipywidgets.widgets import widget

    living = widget._instances if hasattr(widget, "_instances") else widget.Widget.widgets  # ipywidgets 8, 7
    before = set(living)
    surface = DisplaySurface(widget=True)
    for step in range(5):
        surface.draw(view(step), ["<b>line</b>"])
    assert set(page.shown[0]) == {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"}
    assert len(page.shown) == 1
    assert not page.updated
    surface.finish(view(5), ["end"])
    surface.close()
    assert len(page.updated) == 1
    assert set(page.updated[0]) == {"text/plain", "text/html"}
    assert "&lt;b&gt;line" in page.updated[0]["text/html"]
    assert set(living) == before


def test_without_ipywidgets_the_output_itself_changes(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    panel = Panel(DisplaySurface(widget=True), clock := Clock())
    for step in range(5):
        panel.update(lambda step=step: (view(step), ()))  # type: ignore[misc]
        clock.now += 1
    panel.finish(lambda: (view(5), ()))
    assert panel.fault is None
    assert set(page.shown[0]) == {"text/plain", "text/html"}
    assert len(page.updated) == 5


def test_a_state_that_stays_is_sent_again_only_to_move_its_time(page: Page) -> None:
    clock = Clock()
    clock.now = AT_NOON()
    surface = DisplaySurface(widget=False, hint="if this stands still: look elsewhere", clock=clock)
    for _ in range(5):
        surface.draw(view(1), [])
        clock.now += 1
    assert (len(page.shown), len(page.updated)) == (1, 0)
    surface.draw(view(1), [])
    surface.finish(view(1), [])
    shown, moved, last = page.shown[0], *page.updated
    assert "as of 12:00:00; if this stands still: look elsewhere" in shown["text/html"]
    assert "as of 12:00:05; if" in moved["text/html"] and "as of 12:00:05; if" in moved["text/plain"]
    assert "as of 12:00:05" in last["text/html"] and "stands still" not in last["text/html"]


def test_charts_are_in_the_live_frame_and_a_picture_at_the_end(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures: list[tuple[Any, Any]] = []
    monkeypatch.setattr(surfaces, "display", lambda bundle, raw, metadata: pictures.append((bundle, metadata)))
    surface = DisplaySurface(widget=False)
    for step in range(3, 6):
        curve = Curve(tuple((k, 1.0 / (k + 1)) for k in range(step)), last_step=10)
        surface.draw(View("training", f"step {step}", Progress(step, 10), curve=curve), [])
    surface.finish(View("done", "", Progress(10, 10), curve=curve), [])
    assert all("<svg" in frame["text/html"] for frame in (page.shown[0], *page.updated[:-1]))
    assert "<svg" not in page.updated[-1]["text/html"]
    ((bundle, metadata),) = pictures
    assert bundle["image/png"].startswith(b"\x89PNG") and metadata["image/png"]["width"] == 640


def test_a_display_that_raises_is_a_fault_of_the_panel_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising(*args: Any, **settings: Any) -> None:
        raise LookupError("parent_header")

    monkeypatch.setattr(DisplayHandle, "display", raising)
    panel = make_panel("widget")
    panel.update(lambda: (view(1), ()))
    panel.finish(lambda: (view(2), ()))
    assert "LookupError" in capsys.readouterr().out


@pytest.mark.parametrize("ui", ["widget", "html"])
def test_training_goes_on_when_display_raises(notebook: Any, monkeypatch: pytest.MonkeyPatch, ui: str) -> None:
    monkeypatch.setenv("GUAVA_UI", ui)
    monkeypatch.setattr(surfaces.DisplayHandle, "display", lambda *args, **settings: 1 / 0)
    notebook.run("%guava_up --local 1\nloader = []")
    shown = notebook.run("%guava_train --model Net --loss L --data loader")
    assert shown.ok
    assert shown.value.state == "done"
    assert "switched off" in shown.text


def test_none_draws_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    panel = make_panel("none")
    panel.update(lambda: (view(1), ()))
    panel.finish(lambda: (view(1), ()))
    assert capsys.readouterr().out == ""


@given(st.lists(st.lists(st.integers(0, 9_999).map(str), max_size=5), max_size=10))
@settings(max_examples=100, deadline=None)
def test_line_tail_gives_every_line_once(batches: list[list[str]]) -> None:
    log: list[str] = ["before"]
    tail = LineTail(lambda: log[-100:], log)
    seen = []
    for number, batch in enumerate(batches):
        log += [f"{number}:{line}" for line in batch]
        seen += tail.new()
    assert seen == log[1:]
