"""JupyterLab in a real browser: a server of our own, Chromium without a window, and what a person would click."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.processes import ROOT, eventually

TOKEN = "only-for-this-test"
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
]  # fmt: skip
#: Jupyter asks at its first start whether to show news, and offers tours: neither is part of what a test looks at.
_SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight stay in the page
}


#: Seconds between two looks at a page: each takes the driver's, the browser's and this process's time, a layout included.
LOOKS_EVERY_S = 0.2


def seen(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Wait until a condition on a page holds, as `eventually` does, with fewer looks; returns what it gave."""
    pause = threading.Event()
    return eventually(lambda: condition() or pause.wait(LOOKS_EVERY_S), timeout_s, what)


def needs_a_browser() -> None:
    """Skip where there is no Chromium, no driver for it, or no JupyterLab."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    pytest.importorskip("playwright.sync_api", reason="needs playwright")
    pytest.importorskip("jupyterlab", reason="needs JupyterLab")


@contextlib.contextmanager
def jupyter_lab(folder: Path, **environment: str) -> Iterator[str]:
    """Run JupyterLab over a folder; gives its address."""
    settings = folder / ".settings"
    for name, values in _SETTINGS.items():
        package, _, plugin = name.rpartition("/")
        (settings / package).mkdir(parents=True, exist_ok=True)
        (settings / package / f"{plugin}.jupyterlab-settings").write_text(json.dumps(values))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GUAVA_") and name != "CI"}
    runtime = folder / ".runtime"
    env = {
        **kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTER_RUNTIME_DIR": str(runtime), "JUPYTER_CONFIG_DIR": str(folder / ".config"), **environment,
    }  # fmt: skip
    process = subprocess.Popen(
        [
            sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser",
            "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0",
            f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder}",
        ],
        env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        info = eventually(lambda: next(iter(runtime.glob("jpserver-*.json")), None), 60, "JupyterLab starts")
        address = str(json.loads(eventually(lambda: info.read_text(), 10, "its address"))["url"])
        eventually(lambda: _answers(address), 60, "JupyterLab answers")  # it tells its address before it listens
        yield address
    finally:
        _end(process)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}api", timeout=5):
            return True
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and its kernels."""
    below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(15)
    for left in [*below, psutil.Process(process.pid)] if process.poll() is None else below:
        with contextlib.suppress(psutil.Error):
            left.kill()
    process.wait(10)


def pictures() -> Path | None:
    """The folder where pictures of what was seen are kept; None unless GUAVA_ARTEFACTS names one: drawing them takes a minute."""
    if not (name := os.environ.get("GUAVA_ARTEFACTS")):
        return None
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Lab:
    """A page with one notebook open.

    Attributes:
        errors: what the browser's console called an error, and exceptions of the page.
    """

    def __init__(self, page: Any, url: str, notebook: str) -> None:
        self.page, self.errors = page, []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(f"{url}lab/tree/{notebook}?token={TOKEN}&reset")
        self.wait_for_notebook()
        self.hide_sidebar()

    def _console(self, message: Any) -> None:
        # What the page tries to load from elsewhere fails here by design; a missing icon is no fault of a notebook's.
        harmless = ("Failed to load resource", "net::ERR_")
        if message.type == "error" and not any(words in message.text for words in harmless):
            self.errors.append(message.text)

    def wait_for_notebook(self, idle: bool = True) -> None:
        """Wait until the notebook is there with its kernel.

        Args:
            idle: and until that is idle; a busy one answers a page that was just loaded only when its cell has ended.
        """
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.page.wait_for_selector('.jp-KernelName:has-text("Python 3")', timeout=60_000)
        if idle:
            self.page.wait_for_selector('.jp-NotebookPanel-toolbar [data-status="idle"]', timeout=90_000)

    def run_cell(self, number: int) -> None:
        """Run a cell as a person does: click into it, Ctrl+Enter; again where the page was not ready to take it."""
        cell = self._cell(number)
        before = cell.locator(".jp-InputPrompt").inner_text()

        def taken() -> bool:
            cell.scroll_into_view_if_needed()
            cell.locator(".cm-content").click()
            self.page.keyboard.press("Control+Enter")
            until = time.monotonic() + 3
            while time.monotonic() < until:
                if cell.locator(".jp-InputPrompt").inner_text() != before:
                    return True
                self.page.wait_for_timeout(100)
            return False

        eventually(taken, 60, f"cell {number} is run")

    def _cell(self, number: int) -> Any:
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(number)

    def interrupt(self) -> None:
        """Press the toolbar's square."""
        self.page.locator('.jp-NotebookPanel-toolbar [data-command="notebook:interrupt-kernel"]').first.click()

    def output(self, number: int) -> str:
        """What stands below a cell."""
        return str(self._cell(number).locator(".jp-Cell-outputArea").inner_text())

    def wait_output(self, number: int, words: str, timeout_s: float = 60) -> str:
        """Wait until a cell's output has these words."""
        try:
            return str(seen(lambda: self._with(number, words), timeout_s, f"{words!r} in cell {number}"))
        except AssertionError as missing:
            raise AssertionError(
                f"{missing}; it shows {self.output(number)!r}, see {self.shot('failed', number)}"
            ) from None

    def _with(self, number: int, words: str) -> str:
        text = self.output(number)
        return text if words in text else ""

    def count(self, number: int, kind: str) -> int:
        """How many elements of a kind stand below a cell: "svg", "img"."""
        return int(self._cell(number).locator(f".jp-OutputArea-output {kind}").count())

    def size_of_output(self, number: int) -> tuple[int, int]:
        """Pixels that what stands below a cell takes a moment from now: height, and how far it is wider than its room."""
        self.page.wait_for_timeout(100)
        script = """cell => { const area = cell.querySelector('.jp-Cell-outputArea');
            return [area.getBoundingClientRect().height, area.scrollWidth - area.clientWidth]; }"""
        height, too_wide = self._cell(number).evaluate(script)
        return round(height), round(too_wide)

    def resize(self, width: int) -> None:
        """Make the page so many pixels wide, and wait until Lab has laid its panels out anew."""
        self.page.set_viewport_size({"width": width, "height": 1000})
        edges = """() => [...document.querySelectorAll('.jp-NotebookPanel, .jp-Cell-outputArea')]
            .map(element => element.getBoundingClientRect().right)"""
        seen: list[list[float]] = []

        def laid_out() -> bool:
            self.page.wait_for_timeout(100)
            seen.append(self.page.evaluate(edges))
            fills = width - 100 < max(seen[-1], default=0) <= width
            return fills and seen[-3:] == [seen[-1]] * 3

        eventually(laid_out, 30, f"the page is laid out {width} pixels wide")

    def marks_all_of(self, number: int, kind: str, words: str) -> bool:
        """Whether one click into an element of a cell's output marks the whole of it, for copying."""
        box = self._cell(number).locator(f".jp-Cell-outputArea {kind}", has_text=words).last
        box.click()
        marked = str(self.page.evaluate("() => window.getSelection().toString()"))
        return marked.split() == str(box.inner_text()).split()

    def answer(self, number: int, text: str) -> None:
        """Type into the prompt that a cell shows."""
        field = self._cell(number).locator(".jp-Stdin-input")
        field.wait_for(timeout=30_000)
        field.fill(text)
        field.press("Enter")

    def save(self) -> None:
        """Save the notebook, and wait until the page says that it is."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")

    def theme(self, name: str) -> None:
        """Change the page's theme: "JupyterLab Dark" or "JupyterLab Light"."""
        self.page.evaluate(
            "name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})",
            name,
        )
        kind = "true" if "Light" in name else "false"
        self.page.wait_for_selector(f'body[data-jp-theme-light="{kind}"]', state="attached")
        self.page.wait_for_selector("#jupyterlab-splash", state="detached")  # it covers the page for a moment

    def shot(self, name: str, number: int) -> None:
        """Keep a picture of the notebook as it looks now, with a cell at its top, where pictures are kept."""
        if (folder := pictures()) is not None:
            self._cell(number).evaluate("cell => cell.scrollIntoView(true)")
            self.page.mouse.move(0, 0)  # a row under it has another colour
            self.page.screenshot(path=str(folder / f"{name}.png"))

    def reload(self) -> None:
        """Load the page anew; the kernel goes on."""
        self.page.reload()
        self.wait_for_notebook(idle=False)

    def hide_sidebar(self) -> None:
        """Give the notebook the whole page."""
        self.page.evaluate("() => window.jupyterapp.shell.collapseLeft()")


@contextlib.contextmanager
def browser_page(width: int = 1280, height: int = 1000) -> Iterator[Any]:
    """A page of a fresh Chromium without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=_FLAGS, headless=True)
        try:
            yield browser.new_context(viewport={"width": width, "height": height}).new_page()
        finally:
            browser.close()
