"""States in files: whole or not there, private, checked when read, bounded in number, gone when their session is."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from guava_nb.data.codec import pack, unpack
from guava_nb.worker.saving import state_files
from guava_nb.worker.saving.state_files import NoRoom, SavedRecord, StateFiles


def write(files: StateFiles, number: int, run_id: str = "run-1", value: Any = None) -> tuple[str, int]:
    tree, buffers = pack({"weight": torch.arange(1000.0), "number": number, "value": value})
    return files.write(SavedRecord(run_id, number, "digest", 5, 2, tree), buffers)


def states(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("value", ["", "a", "ab" * 40])  # so that the head has any length
def test_what_is_read_is_what_was_written(tmp_path: Path, value: str) -> None:
    digest, nbytes = write(StateFiles(tmp_path, "session"), 7, value=value)
    found = StateFiles(tmp_path, "session").read("run-1", "digest", 7)  # another process
    assert found is not None
    record, payload, read = found
    content = unpack(record.tree, payload)
    assert (record.step, record.ticks, read, content["number"], content["value"]) == (5, 2, digest, 7, value)
    assert torch.equal(content["weight"], torch.arange(1000.0))
    assert nbytes == sum(path.stat().st_size for path in states(tmp_path))


def test_only_its_user_can_read_it(tmp_path: Path) -> None:
    files = StateFiles(tmp_path / "states", "session")
    write(files, 1)
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in states(tmp_path)] == [0o600]


@pytest.mark.parametrize("place", [3, 20, -40, -1, None])
def test_a_damaged_or_cut_one_is_not_read(tmp_path: Path, place: int | None) -> None:
    files = StateFiles(tmp_path, "session")
    write(files, 1)
    [path] = states(tmp_path)
    content = bytearray(path.read_bytes())
    if place is None:
        del content[-1]
    else:
        content[place] ^= 1
    for damaged in (bytes(content), b""):
        path.write_bytes(damaged)
        assert files.read("run-1", "digest", 1) is None


def test_another_run_number_code_or_session_is_not_read(tmp_path: Path) -> None:
    files = StateFiles(tmp_path, "session")
    write(files, 1)
    assert files.read("run-2", "digest", 1) is None and files.read("run-1", "digest", 2) is None
    assert files.read("run-1", "other options", 1) is None
    assert StateFiles(tmp_path, "another").read("run-1", "digest", 1) is None
    [path] = states(tmp_path)
    shutil.copy(path, path.with_name(path.name.replace("-1.", "-2.")))  # under another number
    assert files.read("run-1", "digest", 2) is None


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = StateFiles(tmp_path, "session")
    write(files, 1)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(files, 2)
    assert files.read("run-1", "digest", 1) is not None and len(states(tmp_path)) == 1


def test_half_of_what_is_free_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10000, 2000, 8000))  # type: ignore[attr-defined]
    with pytest.raises(NoRoom, match="half stay free"):
        write(StateFiles(tmp_path, "session"), 1)
    assert states(tmp_path) == []


def test_one_is_kept_and_others_go_with_what_a_killed_process_was_writing(tmp_path: Path) -> None:
    files = StateFiles(tmp_path, "session")
    for number in (1, 2, 3):
        write(files, number)
    write(files, 2, "run-0")
    (files.folder / "x.123.partial").write_bytes(b"half")
    files.keep_only("run-1", [2])
    assert len(states(tmp_path)) == 1 and files.read("run-1", "digest", 2) is not None


def test_a_session_that_is_over_leaves_nothing_and_old_ones_go_with_it(tmp_path: Path) -> None:
    over, young, old = (StateFiles(tmp_path, name) for name in ("over", "young", "old"))
    for files in (over, young, old):
        write(files, 1)
    os.utime(old.folder, (0, 0))
    over.remove()
    assert [path.parent for path in states(tmp_path)] == [young.folder]
    assert state_files._OLD_S == 7 * 86400
    over.remove()  # twice
