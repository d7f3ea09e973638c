"""States of one session's runs in files of this machine: whole or not there, readable by their user alone, checked when read."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec

from guava_nb.config.state_folder import make_private_folder, sync_folder
from guava_nb.config.units import show_bytes
from guava_nb.protocol.messages import Tree
from guava_nb.systems import put_in_place

__all__ = ["NoRoom", "SavedRecord", "StateFiles"]

_MARK = b"guava state 1\n"
_DIGEST_BYTES, _LENGTH_BYTES = hashlib.sha256().digest_size, 8
#: The state's bytes begin at a multiple of this, since tensors are views of them.
_ALIGNMENT_BYTES = 64
_BLOCK_BYTES = 16 << 20
_BEGIN = len(_MARK) + _LENGTH_BYTES
#: A session's folder that was not written to for so long is one that no worker comes back to.
_OLD_S = 7 * 86400.0


#: Of a session with local rounds: so many checkpoints have their workers' own parts; last hexadecimal digits of their numbers.
_CHECKPOINTS, _PLACE_DIGITS = 4, 3


class NoRoom(OSError):
    """The disk has too little room for a state; the text says how much."""


class SavedRecord(msgspec.Struct, frozen=True):
    """What a file says of its state.

    Attributes:
        run_id, number: which one it is.
        run_digest: of the code and the options that the run was built of.
        step: the last one that was applied.
        ticks: that its schedule has had.
        tree: of the state, whose bytes follow.
    """

    run_id: str
    number: int
    run_digest: str
    step: int
    ticks: int
    tree: Tree


class StateFiles:
    """The files of one session. Any process of this machine's user that takes part in it finds them.

    Args:
        folder: of the states of all sessions.
        session: id of the orchestrator's session.
    """

    def __init__(self, folder: Path, session: str) -> None:
        """Touch nothing yet."""
        self._all, self.folder = folder, folder / hashlib.sha256(session.encode()).hexdigest()[:24]

    def write(self, record: SavedRecord, buffers: Sequence[memoryview]) -> tuple[str, int]:
        """Write a state so that it lasts; returns the SHA-256 of the file's content, as hex, and its bytes.

        Raises:
            NoRoom: it would take more than half of what is free.
            OSError: it cannot be written; nothing of it is left.
        """
        head = msgspec.msgpack.encode(record)
        parts: list[bytes | memoryview] = [
            _MARK,
            len(head).to_bytes(_LENGTH_BYTES, "little"),
            head,
            bytes(_padding(len(head))),
        ]
        parts += buffers
        needed = sum(len(memoryview(part).cast("B")) for part in parts) + _DIGEST_BYTES
        make_private_folder(self.folder)
        free = shutil.disk_usage(self.folder).free
        if needed > free / 2:
            raise NoRoom(
                f"a state takes {show_bytes(needed)}, and of the {show_bytes(free)} that are free in {self._all} half stay free"
            )
        path = self._path(record)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            found = _write(partial, parts)
            put_in_place(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        sync_folder(self.folder)
        return found, needed

    def read(
        self, run_id: str, run_digest: str, number: int, of_any_session: bool = False
    ) -> tuple[SavedRecord, memoryview, str] | None:
        """Return record, bytes and digest of a state; None where it is not there, of other code or options, or damaged."""
        path = self._found(run_id, number) if of_any_session else None
        content = _content(path or self.folder / _name(run_id, number))
        body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        found = hashlib.sha256(body)
        if bytes(body[: len(_MARK)]) != _MARK or not hmac.compare_digest(found.digest(), bytes(digest)):
            return None
        length = int.from_bytes(body[len(_MARK) : _BEGIN], "little")
        record = msgspec.msgpack.decode(body[_BEGIN : _BEGIN + length], type=SavedRecord)
        is_it = (record.run_id, record.number, record.run_digest) == (run_id, number, run_digest)
        return (record, body[_BEGIN + length + _padding(length) :], found.hexdigest()) if is_it else None

    def keep_only(self, run_id: str, numbers: Collection[int]) -> None:
        """Remove all other states of the session, and what killed processes were writing."""
        kept = {_name(run_id, number) for number in numbers}
        _remove(path for path in _within(self.folder) if path.name not in kept)

    def has(self, run_id: str, number: int) -> bool:
        """Whether a state lies here, of this session or of another one."""
        return self._found(run_id, number) is not None

    def keep_newest(self, run_id: str) -> None:
        """Remove the session's states but those of the newest checkpoints, whose numbers share all but the last digits."""
        newest: dict[str, float] = {}
        for path in (files := list(self.folder.glob(f"{_run(run_id)}-*.state"))):
            newest[_checkpoint(path)] = max(newest.get(_checkpoint(path), 0.0), _written_s(path))
        kept = sorted(newest, key=lambda one: newest[one])[-_CHECKPOINTS:]
        _remove(path for path in files if _checkpoint(path) not in kept)

    def _found(self, run_id: str, number: int) -> Path | None:
        return next(self._all.glob(f"*/{_name(run_id, number)}"), None)

    def remove(self) -> None:
        """Remove all states of the session, and those of sessions that were not written to for a week."""
        old = [one for one in _within(self._all) if one != self.folder and time.time() - _written_s(one) > _OLD_S]
        for folder in (self.folder, *old):
            _remove(_within(folder))
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _path(self, record: SavedRecord) -> Path:
        return self.folder / _name(record.run_id, record.number)


def _padding(head_bytes: int) -> int:
    return -(_BEGIN + head_bytes) % _ALIGNMENT_BYTES


def _content(path: Path) -> memoryview:
    """Return a file's content, b"" where it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        content = bytearray(file.seek(0, 2))
        file.seek(0)
        return memoryview(content)[: file.readinto(content)]
    return memoryview(b"")


def _run(run_id: str) -> str:
    return hashlib.sha256(run_id.encode()).hexdigest()[:16]


def _name(run_id: str, number: int) -> str:
    return f"{_run(run_id)}-{number:x}.state"


def _checkpoint(path: Path) -> str:
    return path.stem.rpartition("-")[2][:-_PLACE_DIGITS]


def _write(path: Path, parts: Sequence[bytes | memoryview]) -> str:
    hasher = hashlib.sha256()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o600)
    try:
        for part in parts:
            left = memoryview(part).cast("B")
            while len(left):
                hasher.update(left[:_BLOCK_BYTES])
                _write_all(handle, left[:_BLOCK_BYTES])
                left = left[_BLOCK_BYTES:]
        _write_all(handle, memoryview(hasher.digest()))
        os.fsync(handle)  # else a loss of power may leave the name without the content
    finally:
        os.close(handle)
    return hasher.hexdigest()


def _write_all(handle: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(handle, data) :]


def _within(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(folder.iterdir())
    return []


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def _written_s(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return time.time()
