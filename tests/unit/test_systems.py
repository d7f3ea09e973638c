"""Files that a reader has open, and processes that no interrupt of ours reaches, on POSIX and as on Windows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from guava_nb import systems
from guava_nb.errors import ConfigError


@pytest.fixture
def on_windows(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(systems, "os", type("Windows", (), {"name": "nt", "replace": staticmethod(os.replace)}))
    monkeypatch.setattr(systems.time, "sleep", lambda seconds: None)
    return monkeypatch


class Locked:
    """A file that another program has open for so many attempts."""

    def __init__(self, attempts: int) -> None:
        self.left = attempts

    def refuse(self) -> None:
        self.left -= 1
        if self.left >= 0:
            raise PermissionError(13, "The process cannot access the file because it is being used by another process")

    def replace(self, partial: Path, path: Path) -> None:
        self.refuse()
        os.replace(partial, path)


def test_a_file_takes_the_place_of_one_that_is_being_read(on_windows: pytest.MonkeyPatch, tmp_path: Path) -> None:
    locked, old, new = Locked(3), tmp_path / "old", tmp_path / "new"
    old.write_text("old", encoding="utf-8")
    new.write_text("new", encoding="utf-8")
    on_windows.setattr(systems.os, "replace", locked.replace)
    systems.put_in_place(new, old)
    assert old.read_text(encoding="utf-8") == "new" and not new.exists() and locked.left == -1


def test_a_file_that_stays_open_is_told_and_left(on_windows: pytest.MonkeyPatch, tmp_path: Path) -> None:
    locked, times = Locked(10**9), iter(range(100))
    on_windows.setattr(systems.time, "monotonic", lambda: next(times) / 2)
    on_windows.setattr(systems.os, "replace", locked.replace)
    with pytest.raises(PermissionError, match="used by another process"):
        systems.put_in_place(tmp_path / "new", tmp_path / "old")
    on_windows.setattr(Path, "unlink", lambda path, missing_ok: locked.refuse())
    assert not systems.remove(tmp_path / "old")
    assert next(times) < 20


def test_elsewhere_a_refusal_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    locked = Locked(1)
    monkeypatch.setattr(systems.os, "replace", locked.replace)
    with pytest.raises(PermissionError):
        systems.put_in_place(tmp_path / "new", tmp_path / "old")
    assert locked.left == 0


def test_a_file_that_is_not_there_is_gone(tmp_path: Path) -> None:
    assert systems.remove(tmp_path / "none")


def test_a_process_has_a_group_of_its_own(on_windows: pytest.MonkeyPatch) -> None:
    on_windows.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0x200, raising=False)
    on_windows.setattr(subprocess, "CREATE_NO_WINDOW", 0x8000000, raising=False)
    assert systems.own_group() == {"creationflags": 0x200}
    assert systems.own_group(CREATE_NO_WINDOW=True) == {"creationflags": 0x8000200}
    on_windows.undo()
    assert systems.own_group(CREATE_NO_WINDOW=True) == {"start_new_session": True}


@pytest.mark.parametrize("name", ["posix", "nt"])
def test_a_leave_reaches_the_handler_of_this_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows `os.kill` would end the process before its handler ran."""
    if name == "nt":
        monkeypatch.setattr(systems, "os", type("Windows", (), {"name": "nt"}))
    elif sys.platform == "win32":
        pytest.skip("signals of POSIX")
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        systems.ask_to_end()
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("wanted", ["cuda", "cuda:1", "0"])
def test_a_gpu_is_refused_at_once_where_no_driver_is(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setattr(systems, "has_gpu_driver", lambda: False)
    with pytest.raises(ConfigError, match=f"device '{wanted}' is not here: this machine has no driver of a GPU"):
        systems.check_device(wanted)
    monkeypatch.setattr(systems, "has_gpu_driver", lambda: True)
    systems.check_device(wanted)


@pytest.mark.parametrize("wanted", ["gpu", "GPU", "CUDA:0", "nvidia"])
def test_another_word_for_a_gpu_is_told_its_name(wanted: str) -> None:
    with pytest.raises(ConfigError, match="a GPU is called cuda, or cuda:1 by its number"):
        systems.check_device(wanted)


def test_what_no_driver_decides_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "has_gpu_driver", lambda: False)
    for wanted in ("auto", "cpu", "mps", "xpu:1"):
        systems.check_device(wanted)


def test_a_driver_is_a_library_or_the_device_of_rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(systems, "_ROCM", tmp_path / "kfd")
    monkeypatch.setattr(systems, "_DRIVERS", ("libguava_no_such_driver.so",))
    assert not systems.has_gpu_driver()
    (tmp_path / "kfd").touch()
    assert systems.has_gpu_driver()
    (tmp_path / "kfd").unlink()
    loaded: list[str] = []
    monkeypatch.setattr(systems.ctypes, "CDLL", loaded.append)
    assert systems.has_gpu_driver() and loaded == ["libguava_no_such_driver.so"]
