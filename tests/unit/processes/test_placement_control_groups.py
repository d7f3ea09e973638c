"""Which control groups a process is in, by the files of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from guava_nb.processes.placement import own_groups


@pytest.mark.parametrize(
    ("own", "found"),
    [
        ("0::/\n", [(".", 2)]),
        ("0::/a/b\n", [(".", 2), ("a", 2), ("a/b", 2)]),
        ("0::/../../pod\n", [(".", 2), ("pod", 2)]),
        ("3:cpu,cpuacct:/x\n4:memory:/y\n", [("cpu", 1), ("cpu/x", 1)]),
        ("no groups here", []),
    ],
)
def test_the_groups_of_a_process_outermost_first(tmp_path: Path, own: str, found: list[tuple[str, int]]) -> None:
    (tmp_path / "own").write_text(own)
    groups = own_groups("cpu", tmp_path, tmp_path / "own")
    assert list(groups) == [(tmp_path / path, version) for path, version in found]


def test_without_linux_there_are_none(tmp_path: Path) -> None:
    assert list(own_groups("cpu", tmp_path, tmp_path / "nothing")) == []
