"""JupyterLab in a real browser: the panel as a person sees it, the interrupt button, a reload, and no error in the console.

Pictures of what was seen are kept in the folder that GUAVA_ARTEFACTS names.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.browser import Lab, browser_page, jupyter_lab, needs_a_browser, pictures, seen
from tests.support.processes import ROOT
from tests.support.warm import without_servers

pytestmark = [pytest.mark.timeout(240)]

MODEL = """%%guava_share --name model
import time
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, images):
        time.sleep(0.04 * self.training)  # no faster than a page is looked at: what it shows is drawn here, too
        return self.layers(images.float() / 16)"""
DATA = """from torch.utils.data import DataLoader, TensorDataset
from guava_nb.datasets.digits import split_digits
(x, y), (x_test, y_test) = split_digits(seed=0)
train = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
test = DataLoader(TensorDataset(x_test, y_test), batch_size=120)"""
TRAIN = "%guava_train --model Net --loss CrossEntropyLoss --data train --val test --epochs {} --lr 0.003"
#: Numbers of the cells of the orchestrator's notebook.
LOAD, UP, SHARE, LOADERS, LONG, STATUS, SHORT, ENERGY, RUNS, SHOW, DETACHED, FOLLOW, PLAIN, TEXT, TEXT_STATUS, DOWN = (
    range(16)
)
CELLS = [
    "%load_ext guava_nb", "%guava_up --local 2 --workers 3", MODEL, DATA, TRAIN.format(2000), "%guava_status",
    TRAIN.format(3), "%guava_energy", "%guava_runs run-1 run-2 --csv runs.csv --png runs.png",
    "%guava_predict --data test --show", TRAIN.format(3) + " --detach", "%guava_status --follow", "%env GUAVA_UI=text",
    TRAIN.format(3), "%guava_status",
    "%guava_down",
]  # fmt: skip
#: Where its kernel keeps sessions: `guava status` here finds no other test's.
STATE = ".state"
#: And of the worker's notebook.
WORKER_LOAD, WORKER = range(2)


def write(folder: Path, name: str, cells: list[str]) -> None:
    import nbformat  # see tests/notebooks

    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)"}},
    )
    nbformat.write(notebook, folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs_a_browser()
    made = tmp_path_factory.mktemp("lab")
    write(made, "main.ipynb", CELLS)
    write(made, "worker.ipynb", ["%load_ext guava_nb", "%guava_worker"])
    return made


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with jupyter_lab(folder, XDG_STATE_HOME=str(folder / STATE)) as address:
        yield address


@pytest.fixture(scope="module")
def page(folder: Path) -> Iterator[Any]:
    with browser_page() as made:
        yield made


@pytest.fixture(scope="module")
def lab(page: Any, url: str) -> Lab:
    made = Lab(page, url, "main.ipynb")
    for number in (LOAD, UP, SHARE, LOADERS):
        made.run_cell(number)
    made.wait_output(UP, "2 ready of 3", 90)
    return made


@pytest.fixture(scope="module")
def other(lab: Lab, page: Any, url: str) -> Lab:
    """The notebook of the third worker."""
    made = Lab(page.context.new_page(), url, "worker.ipynb")
    made.run_cell(WORKER_LOAD)
    return made


def step_of(lab: Lab, number: int) -> int:
    found = re.search(r"step (\d+)", lab.output(number))
    return int(found[1]) if found else -1


def code_of(lab: Lab) -> str:
    found = re.search(r"guava1:[\w-]+", lab.output(UP))
    assert found is not None
    return found[0]


def local_workers() -> list[psutil.Process]:
    """Worker processes of the orchestrator's kernel, which has two: other tests here may have workers of their own."""
    kernels = [p for p in running_below(psutil.Process(), "jupyterlab") for p in running_below(p, "ipykernel_launcher")]
    found = max((running_below(kernel, "guava_nb.worker.process") for kernel in kernels), key=len)
    return [process for process in found if not process.children()]  # without the nursery that forked them


def running_below(process: psutil.Process, module: str) -> list[psutil.Process]:
    return [p for p in without_servers(process.children(recursive=True)) if module in p.cmdline()]


def both_themes(lab: Lab, name: str, number: int) -> None:
    """Pictures in the dark and in the light theme, which stays."""
    if pictures() is None:
        return
    lab.theme("JupyterLab Dark")
    lab.shot(f"{name}-dark", number)
    lab.theme("JupyterLab Light")
    lab.shot(f"{name}-light", number)


def look_at_the_page_outside(lab: Lab, folder: Path) -> None:
    """`guava status --web` shows the same run live, on a page of its own, that tells when nobody serves it any more."""
    words = [sys.executable, "-m", "guava_nb", "status", "--web"]
    env = {**os.environ, "XDG_STATE_HOME": str(folder / STATE), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        try:
            found = re.search(r"http://127.0.0.1:\S+", served.stdout.readline())
            assert found is not None
            page, errors = lab.page.context.new_page(), []
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            page.goto(found[0])
            for width, scheme in ((1280, "light"), (1280, "dark"), (500, "light"), (500, "dark")):
                page.set_viewport_size({"width": width, "height": 1000})
                page.emulate_media(color_scheme=scheme)
                if (folder_of_pictures := pictures()) is not None:
                    page.screenshot(path=str(folder_of_pictures / f"web-{width}-{scheme}.png"))
            before = page.inner_text("#panel")
            seen(lambda: page.inner_text("#panel") != before, 30, "the page is live")
            assert "training" in before and page.locator("svg").count() == 6 and "guava1:" not in page.content()
            assert errors == [] and page.evaluate("document.body.scrollWidth <= window.innerWidth")
        finally:
            served.terminate()
    seen(lambda: "does not answer" in page.inner_text("#lost"), 30, "it says so when nobody serves it")
    page.close()


def look_at_what_came_of_it(lab: Lab, folder: Path) -> None:
    """Runs beside each other, classes beside predictions, and a run that was started to go on by itself."""
    for number, words in ((RUNS, "Written to runs.png"), (SHOW, "of 360 right"), (DETACHED, "Training goes on since")):
        lab.run_cell(number)
        lab.wait_output(number, words, 60)
    assert (lab.count(RUNS, "img"), lab.count(SHOW, "img")) == (1, 1)
    assert len((folder / "runs.csv").read_text().splitlines()) > 100
    assert (folder / "runs.png").read_bytes().startswith(b"\x89PNG")
    lab.run_cell(FOLLOW)
    shown = lab.wait_output(FOLLOW, "done", 60)
    assert re.search(r"from \d\d:\d\d:\d\d to \d\d:\d\d:\d\d", shown) and "as of" in shown
    for width in (500, 1280):
        lab.resize(width)
        both_themes(lab, f"runs-{width}", RUNS)
        lab.shot(f"classes-{width}", SHOW)


def test_the_cell_to_paste_is_shown_while_workers_are_missing_and_then_no_more(lab: Lab, other: Lab) -> None:
    lab.run_cell(LONG)
    shown = lab.wait_output(LONG, "2 of 3 workers are here", 60)
    code = code_of(lab)
    assert seen(lambda: f"%guava_worker {code}" in lab.output(LONG), 10, "the cell to paste") and shown
    both_themes(lab, "waiting-for-workers", LONG)
    assert lab.marks_all_of(LONG, "pre", "guava_worker")
    other.run_cell(WORKER)
    other.answer(WORKER, code)
    lab.wait_output(LONG, "training", 60)
    assert "guava1:" not in lab.output(LONG) and lab.errors == []


def test_a_worker_s_own_notebook_shows_its_work_its_device_and_its_link(lab: Lab, other: Lab) -> None:
    shown = other.wait_output(WORKER, "samples", 60)
    shown = other.wait_output(WORKER, "round trip", 60)
    assert "of each batch" in shown and "sent" in shown
    at_work = re.compile("(working|validating) on cpu")  # on a busy machine it may wait for a shard just now
    assert seen(lambda: at_work.search(other.output(WORKER)), 30, "it is at work")
    assert seen(lambda: "% busy" in other.output(WORKER), 30, "how busy its device is")
    both_themes(other, "worker-side", WORKER)
    assert code_of(lab) not in other.output(WORKER) and other.errors == []


def test_the_panel_moves_survives_a_reload_and_the_button_stops_the_run(lab: Lab, other: Lab, folder: Path) -> None:
    first = seen(lambda: max(0, step_of(lab, LONG)), 30, "the first step")
    seen(lambda: step_of(lab, LONG) > first + 20, 30, "the panel moves")
    seen(lambda: lab.count(LONG, "svg") == 6, 30, "charts of loss, accuracy, learning rate, gradient norm, CPU, RAM")
    shows = ("busy", "val loss", "learning rate", "epoch 7/")  # from then on the table of epochs has all its rows
    seen(lambda: all(words in lab.output(LONG) for words in shows), 60, "all that it shows")
    for width in (500, 1280):
        lab.resize(width)
        both_themes(lab, f"training-{width}", LONG)
        sizes = {lab.size_of_output(LONG) for _ in range(20)}
        assert len(sizes) == 1 and sizes.pop()[1] <= 0, "the page would jump, or be wider than its room"
    lab.save()
    lab.reload()
    shown = lab.output(LONG)  # what was saved last stays to be seen
    assert re.search("(training|validating) epoch", shown) and lab.count(LONG, "svg") == 6
    assert re.search(r"as of \d\d:\d\d:\d\d; if this time stands still: guava status --follow", shown)
    look_at_the_page_outside(lab, folder)
    lab.interrupt()
    lab.run_cell(STATUS)  # behind the training cell: it runs when that has ended
    shown = lab.wait_output(STATUS, "session", 60)
    assert "stopped" in shown and "3 ready of 3" in shown
    lab.shot("status-after-reload", STATUS)
    assert lab.errors == []


def test_a_lost_worker_is_shown_and_the_run_goes_on(lab: Lab, other: Lab) -> None:
    lab.run_cell(LONG)
    lab.wait_output(LONG, "training", 60)
    seen(lambda: step_of(lab, LONG) > 5, 30, "it trains")
    local_workers()[0].kill()
    lab.wait_output(LONG, "was lost", 30)
    before = step_of(lab, LONG)
    seen(lambda: step_of(lab, LONG) > before + 10, 30, "it goes on")
    both_themes(lab, "lost-worker", LONG)
    lab.interrupt()
    lab.wait_output(LONG, "stopped", 30)
    assert lab.errors == []


def test_a_finished_run_leaves_plain_html_and_a_small_file(lab: Lab, other: Lab, folder: Path) -> None:
    lab.run_cell(SHORT)
    lab.wait_output(SHORT, "done", 60)
    lab.run_cell(ENERGY)
    lab.wait_output(ENERGY, "time by phase", 30)
    both_themes(lab, "finished", SHORT)
    assert (lab.count(SHORT, "svg"), lab.count(SHORT, "img")) == (0, 1)
    lab.shot("energy", ENERGY)
    lab.save()
    path = folder / "main.ipynb"
    assert path.stat().st_size < 300_000
    look_at_what_came_of_it(lab, folder)
    for number in (PLAIN, TEXT, TEXT_STATUS):
        lab.run_cell(number)
    lab.wait_output(TEXT, "done", 60)
    lab.wait_output(TEXT_STATUS, "session", 30)
    lab.shot("plain-text", TEXT)
    lab.save()
    assert path.stat().st_size < 400_000, "with three pictures more"
    text = path.read_text()
    from nbconvert import HTMLExporter

    page, _ = HTMLExporter().from_filename(str(path))
    assert "data:image/png;base64" in page and "time by phase" in page
    assert "widget-view" not in text.split('"execution_count"', SHORT + 1)[SHORT]
    assert "Traceback" not in text and "stands still" not in text, "what is stored is how each cell ended"
    assert text.count(code_of(lab)) == text.split('"execution_count"')[UP + 1].count(code_of(lab)) > 0
    assert lab.errors == []


def test_the_worker_s_cell_ends_with_the_session(lab: Lab, other: Lab, folder: Path) -> None:
    code = code_of(lab)
    lab.run_cell(DOWN)
    lab.wait_output(DOWN, "Closed", 60)
    shown = other.wait_output(WORKER, "left", 60)
    assert code not in shown and "samples" in shown
    other.shot("worker-side-ended", WORKER)
    other.save()
    saved = (folder / "worker.ipynb").read_text()
    assert code not in saved and len(saved) < 300_000
    assert other.errors == [] and lab.errors == []
