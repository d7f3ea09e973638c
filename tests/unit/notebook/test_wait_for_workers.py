"""Waiting for workers before a run: who is here, the cell to paste, and that nothing of it is left."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

from guava_nb.errors import RendezvousTimeout
from tests.support.fake_session import SECRET_CODE

TRAIN = "%guava_train --model Net --loss CrossEntropyLoss --data loader"


class Page:
    """What a page shows: the last state of every output, and all states that there were."""

    def __init__(self) -> None:
        self.outputs: dict[str, str] = {}
        self.states: list[str] = []

    def publish(self, data: dict[str, Any], transient: dict[str, Any] | None = None, **more: Any) -> None:
        html = str(data.get("text/html", data))
        self.outputs[(transient or {}).get("display_id", f"output {len(self.states)}")] = html
        self.states.append(html)


@pytest.fixture
def page(notebook: Any, monkeypatch: pytest.MonkeyPatch) -> Page:
    monkeypatch.setenv("GUAVA_UI", "html")
    made = Page()
    monkeypatch.setattr(notebook.shell.display_pub, "publish", made.publish)
    return made


def waits(orchestrator: Any, end: Callable[[], Any]) -> None:
    """Let waiting for workers look around twice, then end."""

    def wait_for_workers(count: int | None = None, timeout: float | None = None, on_wait: Any = None) -> None:
        on_wait(0)
        end()
        on_wait(0)

    orchestrator.wait_for_workers = wait_for_workers


def arrive(orchestrator: Any, *names: str) -> None:
    """Let these workers join one after another while they are waited for."""

    def wait_for_workers(count: int | None = None, timeout: float | None = None, on_wait: Any = None) -> None:
        for name in names:
            orchestrator.here.append(name)
            on_wait(len(orchestrator.here))

    orchestrator.wait_for_workers = wait_for_workers


def refuse() -> None:
    raise RendezvousTimeout("0 of 2 workers joined within 300 s")


def test_the_cell_to_paste_is_there_while_workers_are_missing_and_who_is_here_stays(notebook: Any, page: Page) -> None:
    notebook.run("%guava_up --workers 2\nloader = []")
    given_out = len(page.states)
    arrive(notebook.orchestrator, "colab", "kaggle")
    assert notebook.run(TRAIN).ok
    waiting = page.states[given_out:]
    assert "<b>waiting</b> 0 of 2 workers are here, up to 5 min 00 s more" in waiting[0]
    assert "the cell to paste stands below" in waiting[0] and SECRET_CODE not in waiting[0]
    assert f"%guava_worker {SECRET_CODE}" in waiting[1] and "user-select:all" in waiting[1]
    left = list(page.outputs.values())
    assert any("<b>done</b>" in html for html in left) and not any("waiting" in html for html in left), "in its place"
    assert [SECRET_CODE in html for html in page.outputs.values()].count(True) == 1, "where %guava_up wrote it"


def test_a_run_that_goes_on_by_itself_leaves_who_was_there(notebook: Any, page: Page) -> None:
    notebook.run("%guava_up --workers 2\nloader = []")
    arrive(notebook.orchestrator, "colab", "kaggle")
    assert notebook.run(f"{TRAIN} --detach").ok
    assert any("2 of 2 workers are here" in html and "kaggle" in html for html in page.outputs.values())


@pytest.mark.parametrize("end", [refuse, lambda: signal.raise_signal(signal.SIGINT)], ids=["too few", "interrupt"])
def test_however_the_waiting_ends_the_code_goes(notebook: Any, page: Page, end: Callable[[], Any]) -> None:
    notebook.run("%guava_up --workers 2\nloader = []")
    waits(notebook.orchestrator, end)
    shown = notebook.run(TRAIN)
    assert not shown.ok and "Traceback" not in shown.text
    assert shown.lines[-1].startswith(("RendezvousTimeout: 0 of 2", "Interrupted: %guava_train waits no longer"))
    assert sum(SECRET_CODE in html for html in page.states) == 2
    assert sum(SECRET_CODE in html for html in page.outputs.values()) == 1
    assert not notebook.orchestrator.run, "nothing was started"
    assert any("0 of 2 workers are here" in html for html in page.outputs.values()), "and that stays"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_workers_of_this_notebook_need_no_code_also_while_they_are_waited_for(notebook: Any, page: Page) -> None:
    notebook.run("%guava_up --local 2\nloader = []")
    notebook.orchestrator.here, notebook.orchestrator.coming = [], ["back-0", "back-1"]
    assert notebook.run(TRAIN).ok
    assert any("0 of 2 workers are here" in html for html in page.states)
    assert not any(SECRET_CODE in html for html in page.states)


def test_text_says_it_in_lines_and_never_shows_the_code(notebook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guava_nb.notebook.panel.surfaces.LineSurface.interval_s", 0.0)
    monkeypatch.setattr("guava_nb.notebook.panel.surfaces.FIRST_PAUSE_S", 0.0)
    notebook.run("%guava_up --workers 3\nloader = []")
    arrive(notebook.orchestrator, "a", "b", "c")
    shown = notebook.run(TRAIN)
    assert shown.ok and SECRET_CODE not in shown.text
    assert "Waiting up to 300 s for workers: 0 of 3 are here" in shown.text
    counted = re.findall(r"\d\d:\d\d:\d\d waiting: (\d) of 3 workers are here\n", shown.text)
    assert counted[:2] == ["1", "2"], shown.text


def test_a_page_that_cannot_show_it_is_no_reason_to_give_up(notebook: Any, page: Page) -> None:
    notebook.run("%guava_up --workers 1\nloader = []")
    arrive(notebook.orchestrator, "a")
    notebook.shell.display_pub.publish = lambda *args, **more: 1 / 0
    shown = notebook.run(TRAIN)
    assert shown.ok and shown.value.state == "done"
