"""Rows in memory and on disk: budget, damage, restart, several workers on one machine."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from guava_nb.data.rows import key_of
from guava_nb.row_cache.store import DiskRows, MemoryRows, RowStore, open_store


def rows(count: int, size: int = 300, first: int = 0) -> dict[bytes, bytes]:
    entries = [n.to_bytes(4, "big") * (size // 4) for n in range(first, first + count)]
    return {key_of(entry): entry for entry in entries}


@pytest.fixture(params=["memory", "disk"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], RowStore]:
    return lambda budget: open_store(request.param, budget, str(tmp_path))


def test_what_was_put_is_there_until_it_is_dropped(opened: Callable[[int], RowStore]) -> None:
    store, entries = opened(1 << 20), rows(20)
    assert store.put(entries) == []
    assert {key: store.get(key) for key in entries} == entries
    assert store.sizes() == dict.fromkeys(entries, 300)
    gone = list(entries)[:5]
    store.drop([*gone, b"x" * 16])
    assert [store.get(key) for key in gone] == [None] * 5 and len(store.sizes()) == 15
    assert store.get(b"y" * 16) is None
    store.close()


def test_the_budget_holds_even_if_nobody_else_counts(opened: Callable[[int], RowStore]) -> None:
    store, entries = opened(5 * 460), rows(8)
    refused = store.put(entries)
    assert len(refused) == 3 and set(store.sizes()) == set(entries) - set(refused)
    store.drop(list(store.sizes())[:2])
    assert len(store.put(rows(3, first=50))) == 1 and len(store.sizes()) == 5
    store.close()


def test_a_restart_finds_what_was_kept_and_a_neighbour_has_a_place_of_its_own(tmp_path: Path) -> None:
    first = DiskRows(tmp_path, 1 << 20)
    assert [folder.stat().st_mode & 0o077 for folder in tmp_path.iterdir()] == [0], "another user could read samples"
    first.put(rows(10))
    second = DiskRows(tmp_path, 1 << 20)
    assert second.sizes() == {}
    second.put(rows(3, first=100))
    first.close()
    again = DiskRows(tmp_path, 1 << 20)
    assert set(again.sizes()) == set(rows(10)) and again.get(next(iter(rows(1)))) is not None
    again.close()
    second.close()


def test_a_smaller_budget_keeps_what_fits(tmp_path: Path) -> None:
    store = DiskRows(tmp_path, 1 << 20)
    store.put(rows(10))
    store.close()
    again = DiskRows(tmp_path, 4 * 460)
    assert len(again.sizes()) == 4
    again.close()


def database(tmp_path: Path) -> Path:
    return next(tmp_path.glob("*/rows.sqlite"))


def test_a_row_whose_bytes_changed_is_dropped_when_it_is_read(tmp_path: Path) -> None:
    store, entries = DiskRows(tmp_path, 1 << 20), rows(4)
    store.put(entries)
    store.close()
    with sqlite3.connect(database(tmp_path)) as damage:
        damage.execute("UPDATE rows SET entry=randomblob(300) WHERE key=?", (next(iter(entries)),))
    damage.close()
    store = DiskRows(tmp_path, 1 << 20)
    assert [store.get(key) is not None for key in entries] == [False, True, True, True]
    assert len(store.sizes()) == 3
    store.close()


@pytest.mark.parametrize("garbage", [b"not a database at all" * 999, b""])
def test_a_file_that_is_no_database_is_replaced(tmp_path: Path, garbage: bytes) -> None:
    store = DiskRows(tmp_path, 1 << 20)
    store.put(rows(4))
    store.close()
    database(tmp_path).write_bytes(garbage)
    store = DiskRows(tmp_path, 1 << 20)
    assert store.sizes() == {}
    assert store.put(rows(4)) == [] and len(store.sizes()) == 4
    store.close()


def test_pages_that_are_spoilt_while_it_is_open_lose_rows_and_raise_nothing(tmp_path: Path) -> None:
    store, entries = DiskRows(tmp_path, 1 << 22), rows(200, size=6000)
    store.put(entries)
    store.close()
    path = database(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[8192 : len(raw) - 4096] = b"\xff" * (len(raw) - 12288)
    path.write_bytes(raw)
    store = DiskRows(tmp_path, 1 << 22)
    for key, entry in entries.items():
        assert store.get(key) in (None, entry)
    fresh = rows(3, first=900)
    assert store.put(fresh) == [] and all(store.get(key) == fresh[key] for key in fresh)
    store.close()


def test_only_the_own_folder_is_tidied(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    (tmp_path / "worker-0").mkdir()
    (tmp_path / "worker-0" / "old.bin").write_text("left behind")
    store = DiskRows(tmp_path, 1 << 20)
    assert (tmp_path / "thesis.txt").read_text() == "precious"
    assert not (tmp_path / "worker-0" / "old.bin").exists()
    store.close()


def test_memory_is_given_back(tmp_path: Path) -> None:
    store = MemoryRows(1 << 20)
    store.put(rows(5))
    store.close()
    assert store.sizes() == {} and store.put(rows(5)) == []


def test_rows_lie_in_a_folder_of_this_user_alone_whatever_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "worker-0").symlink_to(tmp_path / "elsewhere")  # planted by another user of a shared folder
    (tmp_path / "worker-1").mkdir(mode=0o777)
    store = open_store("disk", 1 << 20, str(tmp_path))
    store.close()
    assert (tmp_path / "worker-1").stat().st_mode & 0o777 == 0o700 and any((tmp_path / "worker-1").iterdir())
    assert not any((tmp_path / "elsewhere").iterdir())
    monkeypatch.setattr("os.getuid", lambda: 1 + (tmp_path / "worker-1").stat().st_uid)
    with pytest.raises(OSError, match="belong to other users"):
        open_store("disk", 1 << 20, str(tmp_path / "shared"))


@pytest.mark.skipif(os.name != "posix", reason="folders have no mode here")
def test_the_folders_above_a_cache_are_of_its_user_alone_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    before = os.umask(0o002)
    try:
        (tmp_path / ".cache" / "guava_nb").mkdir(parents=True)
        open_store("disk", 1 << 20, "").close()
        open_store("disk", 1 << 20, str(tmp_path / "named" / "rows")).close()
    finally:
        os.umask(before)
    ours = (".cache/guava_nb", ".cache/guava_nb/rows", ".cache/guava_nb/rows/worker-0", "named", "named/rows")
    assert {(tmp_path / one).stat().st_mode & 0o777 for one in ours} == {0o700}
    assert (tmp_path / ".cache").stat().st_mode & 0o777 == 0o775
