"""JupyterLab in a real browser: the panel as a person sees it, the interrupt button, a reload, and no error in the console.

Pictures of what was seen are kept in the folder that GUAVA_ARTEFACTS names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbconvert import HTMLExporter

from tests.support.browser import Lab, browser_page, jupyter_lab, needs_a_browser
from tests.support.processes import eventually

pytestmark = [pytest.mark.timeout(240)]

MODEL = """%%guava_share --name model
import time
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, images):
        time.sleep(0.01 * self.training)  # as long as a small model on a GPU takes
        return self.layers(images.float() / 16)"""
DATA = """from torch.utils.data import DataLoader, TensorDataset
from guava_nb.data.digits import split_digits
(x, y), (x_test, y_test) = split_digits(seed=0)
train = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
test = DataLoader(TensorDataset(x_test, y_test), batch_size=120)"""
TRAIN = "%guava_train --model Net --loss CrossEntropyLoss --data train --val test --epochs {} --lr 0.003"
#: Numbers of the cells of the orchestrator's notebook.
LOAD, UP, SHARE, LOADERS, LONG, STATUS, SHORT, ENERGY, MORE, DOWN = range(10)
CELLS = [
    "%load_ext guava_nb", "%guava_up --local 3", MODEL, DATA, TRAIN.format(2000), "%guava_status", TRAIN.format(3),
    "%guava_energy", "%guava_up --workers 4 --show-code", "%guava_down",
]  # fmt: skip


def write(folder: Path, name: str, cells: list[str]) -> None:
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
    with jupyter_lab(folder) as address:
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
    made.wait_output(UP, "3 ready of 3", 90)
    return made


def step_of(lab: Lab, number: int) -> int:
    found = re.search(r"step (\d+)", lab.output(number))
    return int(found[1]) if found else -1


def workers_of_the_kernel() -> list[psutil.Process]:
    """Worker processes below this test's server: other tests in this process may have workers of their own."""
    below = psutil.Process().children(recursive=True)
    servers = [process for process in below if "jupyterlab" in process.cmdline()]
    return [
        process
        for server in servers
        for process in server.children(recursive=True)
        if "guava_nb.engine.child" in " ".join(process.cmdline())
    ]


def test_the_panel_moves_survives_a_reload_and_the_button_stops_the_run(lab: Lab) -> None:
    lab.run_cell(LONG)
    lab.wait_output(LONG, "training", 60)
    first = eventually(lambda: max(0, step_of(lab, LONG)), 30, "the first step")
    eventually(lambda: step_of(lab, LONG) > first + 20, 30, "the panel moves")
    eventually(lambda: lab.has_picture(LONG), 30, "the curve appears")
    lab.shot("training-light", LONG)
    lab.theme("JupyterLab Dark")
    lab.shot("training-dark", LONG)
    lab.theme("JupyterLab Light")
    lab.save()
    lab.reload()
    assert "training" in lab.output(LONG)  # what was saved last stays to be seen
    lab.interrupt()
    lab.run_cell(STATUS)  # behind the training cell: it runs when that has ended
    shown = lab.wait_output(STATUS, "session", 60)
    assert "stopped" in shown and "3 ready of 3" in shown
    lab.shot("status-after-reload", LONG)
    assert lab.errors == []


def test_a_lost_worker_is_shown_and_the_run_goes_on(lab: Lab) -> None:
    lab.run_cell(LONG)
    lab.wait_output(LONG, "training", 60)
    eventually(lambda: step_of(lab, LONG) > 5, 30, "it trains")
    workers_of_the_kernel()[0].kill()
    lab.wait_output(LONG, "was lost", 30)
    before = step_of(lab, LONG)
    eventually(lambda: step_of(lab, LONG) > before + 10, 30, "it goes on")
    lab.shot("lost-worker", LONG)
    lab.interrupt()
    lab.wait_output(LONG, "stopped", 30)
    assert lab.errors == []


def test_a_finished_run_leaves_plain_html_and_a_small_file(lab: Lab, folder: Path) -> None:
    lab.run_cell(SHORT)
    lab.wait_output(SHORT, "done", 60)
    lab.run_cell(ENERGY)
    lab.wait_output(ENERGY, "time by phase", 30)
    lab.shot("finished", SHORT)
    lab.shot("energy", ENERGY)
    lab.save()
    path = folder / "main.ipynb"
    assert path.stat().st_size < 300_000
    text = path.read_text()
    page, _ = HTMLExporter().from_filename(str(path))
    assert "data:image/png;base64" in page and "time by phase" in page
    assert "widget-view" not in text.split('"execution_count"', SHORT + 1)[SHORT]
    assert lab.errors == []


def test_a_worker_s_own_notebook(lab: Lab, page: Any, url: str) -> None:
    lab.run_cell(MORE)
    code = re.search(r"guava1:[\w-]+", lab.wait_output(MORE, "guava1:", 30))
    assert code is not None
    lab.shot("waiting-for-workers", MORE)
    other = Lab(page.context.new_page(), url, "worker.ipynb")
    other.run_cell(0)
    other.run_cell(1)
    other.answer(1, code[0])
    other.wait_output(1, "ready on", 60)
    other.shot("worker-side", 1)
    lab.run_cell(DOWN)
    lab.wait_output(DOWN, "Closed", 60)
    shown = other.wait_output(1, "left", 60)
    assert code[0] not in shown
    assert other.errors == [] and lab.errors == []
