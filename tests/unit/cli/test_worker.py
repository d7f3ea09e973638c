"""The worker command without workers: the code, the devices, what is said."""

from __future__ import annotations

import os
import signal
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from guava_nb.cli import worker
from guava_nb.cli.live import LiveLines
from guava_nb.cli.main import main
from guava_nb.cli.worker import VARIABLE, devices_for, follow, own_device, read_code
from guava_nb.errors import ConfigError, JoinCodeError
from guava_nb.launchers.task_place import TaskPlace
from guava_nb.status import OwnFigures


class Code:
    """Stand-in for JoinCode: keeps the text."""

    @classmethod
    def decode(cls, text: str) -> str:
        if "bad" in text:
            raise JoinCodeError("the join code is damaged")
        return f"decoded {text}"


@pytest.fixture(autouse=True)
def _rooms(monkeypatch: pytest.MonkeyPatch) -> dict[str, types.ModuleType]:
    rooms = {}
    for name in ("guava_nb.protocol.joincode", "guava_nb.telemetry.hardware", "guava_nb.worker.network_worker"):
        rooms[name] = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, rooms[name])
    rooms["guava_nb.protocol.joincode"].JoinCode = Code  # type: ignore[attr-defined]
    rooms["guava_nb.telemetry.hardware"].visible_devices = lambda: ["cuda:0", "cuda:1"]  # type: ignore[attr-defined]
    monkeypatch.setattr("guava_nb.processes.gpu_driver.has_gpu_driver", lambda: True)
    return rooms


def never() -> str:
    raise AssertionError("nobody should be asked")


def test_the_code_comes_from_the_line_the_environment_or_the_person() -> None:
    environ = {VARIABLE: "from-environment", "OTHER": "x"}
    assert read_code("from-line", dict(environ), never) == "decoded from-line"
    assert read_code(None, environ, never) == "decoded from-environment"
    assert environ == {"OTHER": "x"}, "the secret must not stay for code that runs later"
    assert read_code(None, {}, lambda: "typed") == "decoded typed"


def test_no_code_and_a_damaged_code() -> None:
    with pytest.raises(ConfigError, match=f"no join code.*{VARIABLE}"):
        read_code(None, {}, lambda: " ")
    with pytest.raises(JoinCodeError, match="damaged"):
        read_code("bad", {}, never)


def test_without_a_terminal_nobody_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    sys.modules["guava_nb.worker.network_worker"].start_worker = never  # type: ignore[attr-defined]
    assert main(["worker"]) == 2
    assert capsys.readouterr().err.startswith("guava: ConfigError: no join code")


def test_the_prompt_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(worker.getpass, "getpass", lambda prompt: "typed" if "not shown" in prompt else "")
    assert worker.ask_for_code() == "typed"


def test_devices(_rooms: dict[str, types.ModuleType]) -> None:
    assert devices_for(None, "cuda:1") == ["cuda:1"]
    assert devices_for("all", "auto") == ["cuda:0", "cuda:1"]
    assert devices_for("1, 1", "auto") == ["cuda:1"]
    with pytest.raises(ConfigError, match="cuda:7 not here; here are: cuda:0, cuda:1"):
        devices_for("0,7", "auto")
    _rooms["guava_nb.telemetry.hardware"].visible_devices = lambda: ["cpu"]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="sees no GPU"):
        devices_for("all", "auto")


@pytest.mark.parametrize("words", [("--device", "cuda"), ("--device", "gpu"), ("--gpus", "all"), ("--gpus", "0,1")])
def test_a_gpu_without_a_driver_is_refused_before_torch_is_loaded(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("guava_nb.processes.gpu_driver.has_gpu_driver", lambda: False)
    monkeypatch.setitem(sys.modules, "guava_nb.worker.network_worker", None)  # what loads torch cannot be imported
    monkeypatch.setitem(sys.modules, "guava_nb.telemetry.hardware", None)
    assert main(["worker", "code", *words]) == 2
    assert "a GPU" in capsys.readouterr().err


@dataclass
class Status:
    state: str
    name: str = "w"
    device: str = "cpu"
    detail: str = ""
    address: str = "127.0.0.1:1"
    lines: tuple[str, ...] = ()
    step: int = 0
    figures: OwnFigures = field(default_factory=OwnFigures)


@dataclass
class Handle:
    """A worker that goes through a list of states, one per wait; at a signal among them the wait is interrupted."""

    states: list[Any]
    calls: list[str] = field(default_factory=list)

    def wait(self, timeout_s: float) -> bool:
        if timeout_s and isinstance(self.states[0], signal.Signals):
            signal.raise_signal(self.states.pop(0))
            return False
        if timeout_s and len(self.states) > 1:
            self.states.pop(0)
        return len(self.states) == 1

    def status(self) -> Status:
        return self.states[0]

    def leave(self) -> None:
        self.calls.append("leave")

    def kill(self) -> None:
        self.calls.append("kill")

    def close(self) -> None:
        self.calls.append("close")


def states(*names: str) -> list[Any]:
    return [Status(name) for name in ("", *names)]


def test_each_change_is_said_once() -> None:
    said: list[str] = []
    handle = Handle(states("joining", "ready", "working", "working", "left"))
    assert follow([handle], said.append, poll_s=1) == 0  # type: ignore[list-item]
    assert said == [f"w: {state}, 127.0.0.1:1" for state in ("joining", "ready", "working", "left")]


def test_one_crash_among_several_is_a_failure_with_its_last_lines() -> None:
    said: list[str] = []
    crash = Status("crashed", detail="exit status -9", lines=("a", "b"))
    first, second = Handle([Status(""), Status("ready"), crash]), Handle(states("ready", "left", "left"))
    assert follow([first, second], said.append, poll_s=1) == 1  # type: ignore[list-item]
    crashed = said.index("w: crashed (exit status -9), 127.0.0.1:1")
    assert said[crashed + 1 : crashed + 3] == ["    a", "    b"]
    assert said[-1] == "w: left, 127.0.0.1:1"


def test_what_it_does_is_shown_live_but_not_while_a_new_code_may_be_pasted() -> None:
    class Live:
        drawn: list[str] = []

        def draw(self, text: str) -> None:
            self.drawn.append(text)

    busy = Status("working", step=7, figures=OwnFigures(samples=64), lines=("old", "a", "b", f"guava1:{'x' * 20}"))
    handle = Handle([Status(""), busy, Status("reconnecting"), busy, Status("left", figures=OwnFigures(samples=64))])
    said: list[str] = []
    assert follow([handle], said.append, poll_s=1, live=Live()) == 0  # type: ignore[list-item,arg-type]
    shown = "worker w: working on cpu for 127.0.0.1:1, step 7\n  work  64 samples\n  | a\n  | b\n  | guava1:<hidden>"
    assert Live.drawn == [shown, "", shown, "", ""]
    assert said[-1] == "    work  64 samples", "and stays"


def test_the_first_interrupt_leaves_the_second_ends() -> None:
    handle = Handle([signal.SIGINT, signal.SIGINT, *states("left")])
    said: list[str] = []
    assert follow([handle], said.append, poll_s=1) == 0  # type: ignore[list-item]
    assert handle.calls == ["leave", "kill"]
    assert said[0].startswith("leaving after this step")


def test_an_interrupt_while_a_panel_is_drawn_leaves_no_old_panel_below_what_is_said() -> None:
    class Terminal:
        written, interrupts = "", 1

        def write(self, text: str) -> None:
            self.written += text

        def flush(self) -> None:
            if self.interrupts and self.written.endswith("64 samples\n"):
                self.interrupts = 0
                signal.raise_signal(signal.SIGINT)

        def isatty(self) -> bool:
            return True

    terminal, done = Terminal(), OwnFigures(samples=64)
    live = LiveLines(terminal, lambda: (80, 24))
    handle = Handle(
        [Status(""), Status("ready"), Status("working", step=7, figures=done), Status("left", figures=done)]
    )
    assert follow([handle], live.say, poll_s=1, live=live) == 0  # type: ignore[list-item]
    assert handle.calls == ["leave"]
    assert "\x1b[2A\x1b[Jleaving after this step" in terminal.written
    assert terminal.written.endswith("\x1b[2A\x1b[Jw: left, 127.0.0.1:1\n    work  64 samples\n")


def test_the_command_starts_one_worker_per_device_and_always_closes_them(
    _rooms: dict[str, types.ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[str, str, str]] = []
    handles: list[Handle] = []

    def start_worker(code: str, device: str, name: str) -> Handle:
        started.append((code, device, name))
        handles.append(Handle(states("left")))
        return handles[-1]

    _rooms["guava_nb.worker.network_worker"].start_worker = start_worker  # type: ignore[attr-defined]
    assert main(["worker", "code", "--gpus", "all", "--name", "lab"]) == 0
    assert started == [("decoded code", "cuda:0", "lab-0"), ("decoded code", "cuda:1", "lab-1")]
    assert all(handle.calls == ["close"] for handle in handles)
    shown = capsys.readouterr()
    assert "run its Python code on this machine" in shown.err
    assert "code" not in shown.out


def test_single_worker_keeps_its_name(_rooms: dict[str, types.ModuleType]) -> None:
    names: list[str] = []
    make: Callable[..., Handle] = lambda code, device, name: names.append(name) or Handle(states("left"))  # noqa: E731
    _rooms["guava_nb.worker.network_worker"].start_worker = make  # type: ignore[attr-defined]
    assert main(["worker", "code", "--name", "lab"]) == 0
    assert names == ["lab"]


def test_each_of_several_processes_on_a_machine_takes_the_gpu_of_its_local_rank() -> None:
    assert own_device("auto", None) == own_device("auto", TaskPlace("Slurm", 3, 4, 0, 1)) == "auto"
    assert own_device("cpu", TaskPlace("Slurm", 3, 4, 1, 2)) == "cpu"
    assert [own_device("auto", TaskPlace("Slurm", 4 + k, 8, k, 4)) for k in range(4)] == ["cuda:0", "cuda:1"] * 2


def test_a_process_whose_starter_gave_it_one_gpu_takes_that(_rooms: dict[str, types.ModuleType]) -> None:
    for here in (["cuda:0"], ["cpu"]):
        _rooms["guava_nb.telemetry.hardware"].visible_devices = lambda here=here: here  # type: ignore[attr-defined]
        assert own_device("auto", TaskPlace("Slurm", 3, 4, 3, 4)) == "auto"


def test_gpus_auto_is_the_processor_where_there_is_none(_rooms: dict[str, types.ModuleType]) -> None:
    assert devices_for("auto", "auto") == ["cuda:0", "cuda:1"]
    _rooms["guava_nb.telemetry.hardware"].visible_devices = lambda: ["cpu"]  # type: ignore[attr-defined]
    assert devices_for("auto", "auto") == ["cpu"]


@pytest.mark.parametrize(
    "line", [["worker", "guava1:x", "--join-file", "f"], ["worker", "--listen", "--join-file", "f"]]
)
def test_a_code_has_one_source(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 2 and "leave one of the two out" in capsys.readouterr().err


class Listening:
    """A worker that listens, and the code to dial it with."""

    port = 4242
    closed = False

    def __init__(self) -> None:
        self.code = self

    def encode(self) -> str:
        return "guava1:SECRETSECRET"

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("at_terminal", [True, False])
def test_the_code_of_a_listening_worker_is_shown_in_a_terminal_alone(
    at_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: at_terminal, raising=False)
    listening, said = Listening(), list[str]()
    worker._say_change(listening, Status("listening"), said.append)  # type: ignore[arg-type]
    files = list(tmp_path.rglob("*.code"))
    assert (listening.encode() in said[1]) is at_terminal and bool(files) is not at_terminal
    for file in files:
        assert file.read_text() == "guava1:SECRETSECRET\n" and str(file) in said[1]
        assert os.name != "posix" or (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_the_file_with_the_code_goes_with_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    listening, seen = Listening(), list[Path]()

    def follow(workers: list[Any], say: Callable[[str], None], **others: Any) -> int:
        worker._say_change(workers[0], Status("listening"), say)  # type: ignore[arg-type]
        seen.extend(tmp_path.rglob("*.code"))
        return 0

    monkeypatch.setattr(worker, "_listening", lambda *words: listening)
    monkeypatch.setattr(worker, "follow", follow)
    assert main(["worker", "--listen", "--device", "cpu"]) == 0
    assert len(seen) == 1 and not seen[0].exists() and listening.closed


def test_a_code_that_no_file_can_keep_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    told = worker._how_to_dial(Listening())  # type: ignore[arg-type]
    assert "cannot be kept" in told and "SECRET" not in told
