"""Where a worker keeps rows: in memory, or in a file that outlives its process.

Both hold entries by key and keep within the budget even if the orchestrator does not count. Knows no batch and no message.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from guava_nb.config.state_folder import make_private_folder
from guava_nb.data.rows import key_of
from guava_nb.row_cache.policy import cost_function

__all__ = ["DiskRows", "MemoryRows", "RowStore", "open_store"]

_MAX_SLOTS = 64
_FILE = "rows.sqlite"
_LOCK_NAME = "in-use.lock"
_LAYOUT = 1


class RowStore(ABC):
    """Entries by key, within a budget of bytes.

    Args:
        budget_bytes: what all entries may take.
        mode: "memory" or "disk"; says what an entry takes.
    """

    def __init__(self, budget_bytes: int, mode: str) -> None:
        """Start empty."""
        self.budget_bytes = budget_bytes
        self._cost = cost_function(mode)
        self._sizes: dict[bytes, int] = {}
        self._used_bytes = 0

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """Return the entry; None when it is not here, or is damaged and was dropped."""

    def put(self, entries: Mapping[bytes, bytes]) -> list[bytes]:
        """Keep entries; returns the keys of those for which there was no room."""
        fresh: dict[bytes, bytes] = {}
        refused: list[bytes] = []
        used = self._used_bytes
        for key, entry in entries.items():
            cost = self._cost(len(entry))
            if key in self._sizes:
                continue
            if used + cost > self.budget_bytes:
                refused.append(key)
            else:
                used += cost
                fresh[key] = entry
        if not self._write(fresh):
            return [*refused, *fresh]
        self._sizes.update({key: len(entry) for key, entry in fresh.items()})
        self._used_bytes = used
        return refused

    def drop(self, keys: list[bytes]) -> None:
        """Forget rows; unknown ones do not matter."""
        known = [key for key in keys if key in self._sizes]
        for key in known:
            self._used_bytes -= self._cost(self._sizes.pop(key))
        if known:
            self._delete(known)

    def sizes(self) -> dict[bytes, int]:
        """Return the bytes of every entry."""
        return dict(self._sizes)

    @abstractmethod
    def _write(self, fresh: Mapping[bytes, bytes]) -> bool:
        """Store entries that have room; returns whether they are stored."""

    @abstractmethod
    def _delete(self, keys: list[bytes]) -> None:
        """Delete stored entries."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything that is not kept beyond this process."""


class MemoryRows(RowStore):
    """Entries in a dictionary."""

    def __init__(self, budget_bytes: int) -> None:
        """Start empty."""
        super().__init__(budget_bytes, "memory")
        self._entries: dict[bytes, bytes] = {}

    def get(self, key: bytes) -> bytes | None:
        """See `RowStore`."""
        return self._entries.get(key)

    def _write(self, fresh: Mapping[bytes, bytes]) -> bool:
        self._entries.update(fresh)
        return True

    def _delete(self, keys: list[bytes]) -> None:
        for key in keys:
            del self._entries[key]

    def close(self) -> None:
        """See `RowStore`."""
        self.drop(list(self._sizes))


class DiskRows(RowStore):
    """Entries in one SQLite file. Only keys and sizes are in memory.

    A worker takes the first folder of `directory` that no other process holds, so several share a machine, and one that
    starts anew finds what its predecessor left. Every entry is checked against its key when it is read. A file that is
    damaged as a whole is deleted; anything else in the worker's own folder, too.

    Args:
        directory: where the folders of all workers are; made if missing.
        budget_bytes: what the file may take.

    Raises:
        OSError: the folder cannot be made or written, or all its places are taken.
    """

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        """Open or make the file."""
        super().__init__(budget_bytes, "disk")
        self._folder, self._lock = _take_slot(directory)
        self._path = self._folder / _FILE
        try:
            self._tidy()
            self._database = self._open()
        except sqlite3.Error as error:
            self._lock.release()
            raise OSError(f"{self._path}: {error}") from error
        except OSError:
            self._lock.release()
            raise
        self._trim()

    def _tidy(self) -> None:
        """Delete what another version left in this folder, which is this worker's alone."""
        for path in self._folder.iterdir():
            if path.is_file() and not path.name.startswith(_FILE) and path.name != _LOCK_NAME:
                path.unlink()

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.DatabaseError:  # no database, or a damaged one
            self._delete_file()
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=OFF")  # what a crash of the machine spoils is found by its hash
            if database.execute("PRAGMA user_version").fetchone()[0] != _LAYOUT:
                database.execute("DROP TABLE IF EXISTS rows")
                database.execute("CREATE TABLE rows (key BLOB PRIMARY KEY, entry BLOB NOT NULL)")
                database.execute(f"PRAGMA user_version={_LAYOUT}")
            self._sizes = dict(database.execute("SELECT key, length(entry) FROM rows"))
            if any(type(key) is not bytes or len(key) != 16 for key in self._sizes):
                raise sqlite3.DatabaseError("a key is none of ours")
        except BaseException:
            database.close()
            raise
        self._used_bytes = sum(map(self._cost, self._sizes.values()))
        return database

    def _delete_file(self) -> None:
        for path in self._folder.glob(f"{_FILE}*"):
            path.unlink()
        self._sizes, self._used_bytes = {}, 0

    def _start_anew(self) -> None:
        """Replace a damaged file by an empty one; its rows count as missing."""
        with contextlib.suppress(sqlite3.Error):
            self._database.close()
        self._delete_file()
        self._database = self._connect()

    def _trim(self) -> None:
        surplus = []
        used = self._used_bytes
        for key, size in self._sizes.items():
            if used <= self.budget_bytes:
                break
            surplus.append(key)
            used -= self._cost(size)
        self.drop(surplus)

    def get(self, key: bytes) -> bytes | None:
        """See `RowStore`."""
        if key not in self._sizes:
            return None
        try:
            found = self._database.execute("SELECT entry FROM rows WHERE key=?", (key,)).fetchone()
        except sqlite3.Error:
            self._start_anew()
            return None
        if found is None or type(found[0]) is not bytes or key_of(found[0]) != key:
            self.drop([key])
            return None
        return bytes(found[0])

    def _write(self, fresh: Mapping[bytes, bytes]) -> bool:
        try:
            with _transaction(self._database):
                self._database.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?)", fresh.items())
        except sqlite3.DatabaseError as error:
            if not isinstance(error, sqlite3.OperationalError):  # damaged; a full disk leaves the file as it was
                self._start_anew()
            return False
        return True

    def _delete(self, keys: list[bytes]) -> None:
        try:
            with _transaction(self._database):
                self._database.executemany("DELETE FROM rows WHERE key=?", [(key,) for key in keys])
        except sqlite3.Error:
            self._start_anew()

    def close(self) -> None:
        """See `RowStore`."""
        with contextlib.suppress(sqlite3.Error):
            self._database.close()
        self._lock.release()


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _take_slot(directory: Path) -> tuple[Path, FileLock]:
    make_private_folder(directory, default_directory().parent)
    for number in range(_MAX_SLOTS):
        folder = directory / f"worker-{number}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _kept_private(folder):
            continue
        lock = FileLock(folder / _LOCK_NAME)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        return folder, lock
    raise OSError(f"all {_MAX_SLOTS} places in {directory} are in use, or belong to other users")


def _kept_private(folder: Path) -> bool:
    """Close a folder to other users, who may not read samples; returns whether it is this user's and could be closed."""
    held = folder.lstat()
    if folder.is_symlink() or (hasattr(os, "getuid") and held.st_uid != os.getuid()):
        return False
    if held.st_mode & 0o077 and os.name == "posix":
        folder.chmod(0o700)
    return True


def default_directory() -> Path:
    """Where rows are kept on a worker's machine unless the orchestrator says otherwise."""
    return Path.home() / ".cache" / "guava_nb" / "rows"


def open_store(mode: str, budget_bytes: int, directory: str) -> RowStore:
    """Open what a run asks for.

    Raises:
        OSError: the folder cannot be used.
    """
    if mode == "memory":
        return MemoryRows(budget_bytes)
    return DiskRows(Path(directory).expanduser() if directory else default_directory(), budget_bytes)
