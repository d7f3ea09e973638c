"""Free memory by the limits of control groups, of both versions, as hosts lay them out."""

from __future__ import annotations

import types
from pathlib import Path

import psutil
import pytest

from guava_nb.doctor.memory import Memory, memory_here

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=12 * GIB, total=16 * GIB))


def group(folder: Path, version: int, limit: str, used: int, cache: int) -> None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    key = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon 7\n{key} {cache}\n")


def look(root: Path, own: str) -> Memory:
    (root / "own").write_text(own)
    return memory_here(root / "groups", root / "own")


def test_without_limits_it_is_the_machine_s(tmp_path: Path) -> None:
    whole = Memory(12 * GIB, 16 * GIB)
    assert memory_here(tmp_path, tmp_path / "nothing") == whole
    group(tmp_path / "groups", 2, "max", GIB, 0)
    assert look(tmp_path, "0::/\n") == whole
    group(tmp_path / "groups/memory", 1, "9223372036854771712", GIB, 0)
    assert look(tmp_path, "5:cpu,memory:/\n0::/\n") == whole


@pytest.mark.parametrize(
    ("version", "own", "folder"),
    [
        (2, "0::/\n", "groups"),
        (2, "0::/../../kubepods/pod1\n", "groups"),  # another namespace: its path is not here
        (2, "0::/user.slice/app\n", "groups/user.slice"),  # the limit is on a group above
        (1, "3:cpu:/docker/x\n4:memory:/docker/x\n0::/\n", "groups/memory"),
        (1, "4:memory:/docker/x\n", "groups/memory/docker/x"),
    ],
)
def test_a_limit_counts_and_cached_files_are_free(tmp_path: Path, version: int, own: str, folder: str) -> None:
    group(tmp_path / folder, version, str(2 * GIB), GIB + (1 << 29), 1 << 29)
    assert look(tmp_path, own) == Memory(GIB, 2 * GIB, is_limited=True)


def test_the_tightest_of_nested_limits_counts(tmp_path: Path) -> None:
    group(tmp_path / "groups/a", 2, str(4 * GIB), 3 * GIB, 0)
    group(tmp_path / "groups/a/b", 2, str(3 * GIB), GIB, 0)
    assert look(tmp_path, "0::/a/b\n") == Memory(GIB, 3 * GIB, is_limited=True)
    group(tmp_path / "groups/a/b", 2, str(3 * GIB), 4 * GIB, 0)
    assert look(tmp_path, "0::/a/b\n").free_bytes == 0
