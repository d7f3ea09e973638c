"""Runs lessons in real kernels and stores them with what they show: tables, figures, the panel's end state.

    python -m tests.support.lessons [NAME ...]    # all, or those whose names begin so: 00 08

To be run again when a lesson, or what a panel shows, has changed. What depends on this machine (paths, its name) is taken out,
and a cell's output is marked for nbval to leave alone, unless the cell's tags say nbval-check-output. A lesson takes half
a minute to two minutes on two idle cores, and up to ten where other programs use them: let a `timeout` around this be as long.
"""

from __future__ import annotations

import base64
import contextlib
import getpass
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from guava_nb import Orchestrator
from tests.support.browser import browser_page
from tests.support.processes import loader
from tests.support.training import SmallNet

__all__ = ["FOLDER", "MOST_BYTES", "NOTEBOOKS", "PICTURES", "WORKER", "figures", "leaks", "other_side", "shown_texts"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
#: The notebook of a worker, which needs another side to join.
WORKER = "01_colab_worker"
#: A lesson with its outputs is no larger.
MOST_BYTES = 400_000
#: Pictures for the page about lessons: what a cell of a lesson shows, a figure as it is stored, a table as a browser draws it.
PICTURES = {
    "worker.png": ("01_colab_worker", "join"),
    "energy.png": ("08_energy", "recording"),
    "home_links.png": ("09_home_links", "hours"),
    "own_loops.png": ("11_own_loops", "pull"),
}
LIMIT_S = 240
#: Stands for the name of the machine that a lesson ran on.
_ANONYMOUS = "this-machine"
#: Live views need the kernel that made them.
_LIVE = "application/vnd.jupyter.widget-view+json"
_PATHS = re.compile(r"(?<![\w.:/-])/(?:root|home|Users|tmp|var|work|usr|opt|mnt)/[\w./+-]+|[A-Z]:\\\\?Users")


@contextlib.contextmanager
def other_side(epochs: int = 1, rows: int = 64) -> Iterator[str]:
    """What the orchestrator's notebook does while 01 works: wait for the worker, train on it, close. Gives the join code."""
    trained: list[int] = []
    with Orchestrator(num_workers=1) as orchestrator:

        def train() -> None:
            orchestrator.wait_for_workers(timeout=LIMIT_S / 2)
            orchestrator.register_model(SmallNet)
            run = orchestrator.start_training(loader(rows=rows), num_epochs=epochs, precision="fp64", progress=False)
            trained.append(run.report()["samples"])
            orchestrator.close()

        thread = threading.Thread(target=train)
        thread.start()
        yield orchestrator.join_code.encode()
        thread.join(LIMIT_S)
    assert trained == [rows * epochs]


def shown_texts(notebook: Any) -> Iterator[str]:
    """Every text that a stored notebook shows below its cells, pictures left out."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            yield str(output.get("text", ""))
            yield "\n".join(output.get("traceback", ()))
            yield from (str(text) for kind, text in output.get("data", {}).items() if not kind.startswith("image/"))


def figures(notebook: Any, cell_id: str) -> list[bytes]:
    """The figures below a cell of a stored notebook, as PNG."""
    (cell,) = (cell for cell in notebook.cells if cell.id == cell_id)
    data = [output.get("data", {}) for output in cell.outputs]
    return [base64.b64decode(one["image/png"]) for one in data if "image/png" in one]


def leaks(text: str) -> list[str]:
    """What a stored output shall not have: paths and the name of the machine it ran on, join codes."""
    found = _PATHS.findall(text) + re.findall(r"guava1:[A-Za-z0-9_-]{6,}", text)
    return found + [name for name in re.findall(r"joined: [^<\n]*? on ([\w.-]+)", text) if name != _ANONYMOUS]


def _without_names(text: str) -> str:
    """A text without the names of this machine and its user, and without join codes."""
    text = re.sub(r"guava1:[A-Za-z0-9_-]{6,}", "guava1:...", text)
    with contextlib.suppress(Exception):
        for name in {socket.gethostname(), getpass.getuser()} - {"root"}:
            text = re.sub(rf"\b{re.escape(name)}\b", _ANONYMOUS, text)
    return text


def store(path: Path) -> None:
    """Run a lesson as its reader would, and write it with its outputs."""
    import nbformat
    from nbclient.exceptions import DeadKernelError

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="lesson-") as folder, contextlib.ExitStack() as stack:
        environment = {**os.environ, "GUAVA_UI": "html", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # libraries as here
        environment |= {"TMPDIR": folder, "XDG_STATE_HOME": folder, "IPYTHONDIR": folder}
        if path.stem == WORKER:
            environment["GUAVA_JOIN_CODE"] = stack.enter_context(other_side(epochs=300, rows=640))
        client, since = _watched_client(notebook), time.monotonic()
        try:
            client.execute(env={name: value for name, value in environment.items() if name != "CI"})
        except DeadKernelError as error:
            # nbclient takes SIGTERM and SIGINT of this process as the order to end the kernel, and then says that it died.
            raise SystemExit(
                f"{path.name} is not stored: its kernel ended after {time.monotonic() - since:.0f} s. That is also what an "
                "interrupt of this program, or the end of a `timeout` around it, comes to"
            ) from error
        replaced = {f"{folder}/": "", folder: ".", f"{ROOT}/": "", str(ROOT): "."}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            _clean(cell, replaced)
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.validate(notebook)
    text = nbformat.writes(notebook) + "\n"
    problems = [leak for shown in shown_texts(notebook) for leak in leaks(shown)]
    if problems or len(text.encode()) > MOST_BYTES:
        raise SystemExit(f"{path.name} is not stored: {len(text.encode())} bytes of {MOST_BYTES}; it shows {problems}")
    path.write_text(text, encoding="utf-8")
    for name, (lesson, cell_id) in PICTURES.items():
        if lesson == path.stem:
            found = figures(notebook, cell_id)
            picture = found[-1] if found else _drawn(_without_names(client.at_work[cell_id]))
            (FOLDER / "pictures" / name).write_bytes(picture)


def _watched_client(notebook: Any) -> Any:
    """What runs a notebook; its `at_work` keeps, by cell, the last panel in which a worker works."""
    from nbclient import NotebookClient

    class Watched(NotebookClient):  # type: ignore[misc]
        at_work: dict[str, str] = {}

        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            html = str(msg["content"].get("data", {}).get("text/html", ""))
            if "working" in html:
                self.at_work[cell.id] = html
            return super().process_message(msg, cell, cell_index)

    return Watched(notebook, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}})


def _drawn(html: str) -> bytes:
    """HTML as a browser draws it."""
    with browser_page(width=900, height=100) as page:
        page.set_content(
            f'<body style="font: 14px sans-serif; width: max-content; margin: 8px"><div>{html}</div></body>'
        )
        return bytes(page.locator("body > div").screenshot())


def _clean(cell: Any, replaced: dict[str, str]) -> None:
    """Take out what lives, what tells of this machine, and when the cell ran."""
    cell.metadata.pop("execution", None)

    def cleaned(text: str) -> str:
        for theirs, ours in replaced.items():
            text = text.replace(theirs, ours)
        return _without_names(text)

    for output in cell.outputs:
        data = output.get("data", {})
        data.pop(_LIVE, None)
        for holder, key in [(output, "text"), (output, "evalue"), *((data, kind) for kind in data if "text/" in kind)]:
            if key in holder:
                holder[key] = cleaned(holder[key])
        if "traceback" in output:
            output["traceback"] = [cleaned(line) for line in output["traceback"]]
    tags = cell.metadata.get("tags", [])
    if cell.outputs and not any(tag.startswith("nbval-") for tag in tags):
        cell.metadata["tags"] = [*tags, "nbval-ignore-output"]


def main() -> None:
    """Read the line, and run."""
    wanted = tuple(sys.argv[1:])
    for path in NOTEBOOKS:
        if not wanted or path.name.startswith(wanted):
            store(path)
            print(path.name, path.stat().st_size, "bytes", flush=True)


if __name__ == "__main__":
    main()
