"""A real InteractiveShell with the magics over fakes; what it prints is judged as a person would see it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from guava_nb.doctor.memory import Memory
from guava_nb.notebook import up as opening
from guava_nb.notebook.magics import GuavaMagics, load, unload
from guava_nb.notebook.notebook_session import NotebookSession
from tests.support.fake_session import FakeOrchestrator, FakeRun, FakeWorker

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Notebook:
    """Runs cells; `orchestrators` and `workers` are the fakes made so far, `next_run` shapes the next run."""

    def __init__(self, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
        self.shell = shell
        self.orchestrators: list[FakeOrchestrator] = []
        self.workers: list[FakeWorker] = []
        self.next_run = FakeRun()
        self.worker_options: dict[str, Any] = {}
        self.too_few = False
        self._capsys = capsys
        load(shell)
        self.magics: GuavaMagics = shell.magics_manager.registry["GuavaMagics"]
        self.magics.session = NotebookSession(shell, self._new_orchestrator, self._start_worker)

    @property
    def orchestrator(self) -> FakeOrchestrator:
        return self.orchestrators[-1]

    def run(self, cell: str) -> SimpleNamespace:
        """Run a cell; returns ok, value and everything it wrote, without colours."""
        self._capsys.readouterr()
        result = self.shell.run_cell(cell, store_history=True)
        captured = self._capsys.readouterr()
        text = _ANSI.sub("", captured.out + captured.err)
        return SimpleNamespace(ok=result.success, value=result.result, text=text, lines=text.strip().splitlines())

    def complete(self, line: str) -> list[str]:
        """What tab offers at the end of a line."""
        with provisionalcompleter():
            return [found.text for found in self.shell.Completer.completions(line, len(line))]

    def _new_orchestrator(self, **settings: Any) -> FakeOrchestrator:
        self.orchestrators.append(FakeOrchestrator(settings, self.next_run, too_few=self.too_few))
        return self.orchestrator

    def _start_worker(self, code: str, device: str, name: str | None) -> FakeWorker:
        self.workers.append(FakeWorker(code, device, name, **self.worker_options))
        return self.workers[-1]


#: Looks like an authtoken of ngrok.
TOKEN = "2" * 40


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InteractiveShell]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        config = Config()
        config.HistoryManager.enabled = False
        yield InteractiveShell.instance(config=config)
        InteractiveShell.clear_instance()


@pytest.fixture
def notebook(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Notebook]:
    monkeypatch.setenv("GUAVA_UI", "text")
    monkeypatch.setattr(opening, "memory_here", lambda: Memory(1 << 40, 1 << 40))
    monkeypatch.delenv("GUAVA_JOIN_CODE", raising=False)
    monkeypatch.setenv("NGROK_AUTHTOKEN", TOKEN)
    monkeypatch.setattr(
        "guava_nb.tunnels.tokens._config_paths", list
    )  # another test, or a developer, may have a token there
    unload(shell)
    shell.config.pop("Guava", None)  # what an earlier test chose by %config
    # IPython collects garbage here: with torch loaded that takes a quarter of a second, in each of hundreds of tests.
    with mock.patch("gc.collect"):
        shell.reset(new_session=True)
    yield Notebook(shell, capsys)
    unload(shell)
    # Its module stays `__main__` until the session ends, and multiprocessing asks every main module for this.
    shell.user_module.__spec__ = None
