from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.training.saving import durable_file
from guava_nb.training.saving.durable_file import NotWritten, Sink, write_durably


class FullDisk:
    """`os.write` of a disk that has room for so many more bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, handle: int, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = _write(handle, data[: self.room])
        self.room -= written
        return written


_write = os.write


def write_parts(sink: Sink) -> None:
    for part in (b"abc", b"", b"defgh"):
        assert sink.write(part) == len(part)


@given(room=st.integers(0, 9))
def test_a_disk_that_is_full_at_any_byte_leaves_the_old_file_and_nothing_else(
    room: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("disk") / "it.pt"
    path.write_bytes(b"old")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable_file.os, "write", FullDisk(room))
        if room >= 8:
            write_durably(path, write_parts, 8)
        else:
            with pytest.raises(
                NotWritten, match=r"No space left on device: it needs (more than )?3.0 GB, and .+B are free in .+disk"
            ):
                write_durably(path, write_parts, 3 * 10**9)
    assert path.read_bytes() == (b"abcdefgh" if room >= 8 else b"old")
    assert [one.name for one in path.parent.iterdir()] == ["it.pt"]


@pytest.mark.parametrize(
    ("free", "told"), [(10**9, "it needs 3.0 GB, and 1.0 GB are"), (4 * 10**9, "more than 3.0 GB, and 4.0")]
)
def test_a_size_that_the_disk_seems_to_have_room_for_is_told_as_too_small(
    free: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_file.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(durable_file.os, "write", FullDisk(0))
    with pytest.raises(NotWritten, match=told):
        write_durably(tmp_path / "it.pt", write_parts, 3 * 10**9)


def test_file_and_folder_reach_the_disk_before_and_after_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real = os.fsync, os.replace

    def fsync(handle: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        real[0](handle)

    def replace(source: Path, target: Path) -> None:
        done.append("name")
        real[1](source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_durably(tmp_path / "new" / "it.pt", write_parts, 8)
    assert done == ["file", "name", "folder"]


def test_two_saves_of_one_name_do_not_meet(tmp_path: Path) -> None:
    def outer(sink: Sink) -> None:
        sink.write(b"outer")
        write_durably(tmp_path / "it.pt", lambda inner: inner.write(b"inner") and None, 5)
        assert (tmp_path / "it.pt").read_bytes() == b"inner"

    write_durably(tmp_path / "it.pt", outer, 5)
    assert (tmp_path / "it.pt").read_bytes() == b"outer"


def test_what_a_killed_process_was_writing_goes_with_the_next_save_and_what_a_living_one_writes_stays(
    tmp_path: Path,
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    machine = durable_file._machine()
    left, living, other = (
        tmp_path / f"it.pt.{who}-{pid}-01234567.partial"
        for who, pid in ((machine, ended.pid), (machine, os.getpid()), ("00000000", ended.pid))
    )
    for file in (left, living, other):
        file.touch()
    write_durably(tmp_path / "it.pt", write_parts, 8)
    assert not left.exists() and living.exists() and other.exists()
