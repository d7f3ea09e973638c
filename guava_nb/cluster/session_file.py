"""What of a session outlives its process: certificate, secret and port, in a file that only its user can read.

A process that opens the session anew with the same file is reached by the same join code, so workers come back to it by
themselves. A second file beside it is locked as long as a process has the session, so two never share one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path
from typing import IO

import msgspec

from guava_nb.config.state_folder import (
    OTHERS_DO,
    OTHERS_WRITE,
    make_private_folder,
    not_private,
    read_private,
    state_folder,
    write_private,
)
from guava_nb.errors import ConfigError
from guava_nb.systems import remove
from guava_nb.transport.certificate import Certificate

__all__ = ["SavedSession", "SessionFile", "is_locked_here"]

_VERSION = 1
_LOCAL = ".local"
#: Of the files beside it: those that end with the session, and all that a session file cannot be called.
_BESIDE = (".run", ".steps", ".launched", _LOCAL)
_TAKEN = (*_BESIDE, ".lock", ".probe", ".status")
#: Of those beside it: what a session that opens it reads.
_READ = (*_BESIDE, ".runs", ".run-now", ".status")
_ABOUT_BYTES = 8 << 10  # of such a file
_MOST = 64  # sessions of one name side by side
_HELD: set[Path] = set()  # by this process: a lock keeps others out, and not the process that has it


class SavedSession(msgspec.Struct, frozen=True):
    """What a listener needs to be known again.

    Attributes:
        secret: 16 bytes, of the join code.
        certificate, key: PEM; empty where the session is not encrypted.
        port: where it listened.
        session_id: what workers take it for: they keep what they hold of its runs.
    """

    secret: bytes
    certificate: bytes
    key: bytes
    port: int
    session_id: str = ""
    version: int = _VERSION

    def pinned(self) -> Certificate | None:
        """Return the certificate that the join code names, None where the session is not encrypted."""
        return Certificate.from_pem(self.certificate, self.key) if self.certificate else None


class SessionFile:
    """The file of one session, held by this process. Made by `take`.

    Attributes:
        path: where it lies.
        problem: a sentence where something lies there that cannot be read; "" elsewhere.
    """

    def __init__(self, path: Path, lock: IO[bytes]) -> None:
        """Hold a file whose lock was taken."""
        self.path, self._lock, self.problem = path, lock, ""

    @classmethod
    def take(cls, path: Path) -> SessionFile:
        """Hold this file, or the first one beside it that no process holds: `name.json`, `name-2.json`, ...

        Raises:
            ConfigError: the folder cannot be written to, or has no room or no locks; the name is that of a file beside it; or
                what is there is no session file, or not this user's alone: nothing of it was touched.
        """
        if path.suffix in _TAKEN:
            raise ConfigError(
                f"session_file {path}: files that end in {path.suffix} lie beside it; let it end in .json"
            )
        try:
            make_private_folder(path.parent)
            for number in range(1, _MOST + 1):
                one = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
                if one in _HELD:
                    continue
                if why := _why_not_ours(one):
                    if one == path:
                        raise ConfigError(f"session_file {path}: {why}")
                    continue
                with contextlib.ExitStack() as undone:
                    lock = undone.enter_context(one.with_suffix(".lock").open("ab"))
                    if is_locked_here(lock):
                        write_private(probe := one.with_suffix(".probe"), bytes(_ABOUT_BYTES))
                        probe.unlink()
                        undone.pop_all()
                        _HELD.add(one)
                        return cls(one, lock)
        except OSError as problem:
            raise ConfigError(
                f"session_file {path} cannot be written ({problem.strerror or problem}): name another file, or give "
                'session_file="off"'
            ) from problem
        raise ConfigError(f"{_MOST} processes hold {path} and the files beside it: name another session_file")

    def load(self) -> SavedSession | None:
        """Return what the process before left here; None where it ended its session, or `problem` says why not."""
        self.problem = ""
        try:
            saved = msgspec.json.decode(read_private(self.path), type=SavedSession)
            saved.pinned()
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, ValueError) as error:
            self._is_of_no_use(f"cannot be read ({error})")
            return None
        if saved.version != _VERSION:
            self._is_of_no_use(f"is of version {saved.version}, and this guava_nb reads version {_VERSION}")
        elif len(saved.secret) != 16:
            self._is_of_no_use(f"cannot be read (a secret of {len(saved.secret)} bytes)")
        return None if self.problem else saved

    def _is_of_no_use(self, why: str) -> None:
        self.problem = (
            f"The file of the last session, {self.path}, {why}. So a new session begins: workers that still wait for the last "
            "one need the join code of this one."
        )

    def save(self, session: SavedSession) -> None:
        """Write it, readable by this user alone; the old one stays whole until the new one is."""
        write_private(self.path, msgspec.json.encode(session))

    @property
    def run_path(self) -> Path:
        """Where the session's last run may be noted."""
        return self.path.with_suffix(".run")

    def note_local(self, names: list[str]) -> None:
        """Note workers that this process started: they end with it, and with them what only they hold."""
        path = self.path.with_suffix(_LOCAL)
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8", opener=_open_private) as file:
            file.writelines(f"{name}\n" for name in names)

    def local(self) -> list[str]:
        """Return the names of those that processes before started; none where the last one ended its session."""
        try:
            return sorted(set(read_private(self.path.with_suffix(_LOCAL)).decode().split("\n")[:-1]))
        except (OSError, UnicodeDecodeError):
            return []

    def release(self, forget: bool) -> None:
        """Let the next process hold it; `forget`: the session is over for good."""
        if forget:
            for path in (self.path, *map(self.path.with_suffix, _BESIDE)):
                remove(path)
        self._lock.close()
        _HELD.discard(self.path)


def _why_not_ours(path: Path) -> str:
    """Say why a session may not keep itself in a file: it would believe what is there, overwrite it, and delete it at its end."""
    for one in (path, *map(path.with_suffix, _READ)):
        if why := not_private(one, OTHERS_DO if one == path else OTHERS_WRITE):
            return (
                f"the file {one} exists, and {why}, so this session does not use it: remove it, close it to others if you "
                "know that it is yours (chmod 600), or name another file"
            )
    if path.parent == state_folder() or not os.path.lexists(path):
        return ""  # what lies in our own folder is ours, also where it is damaged
    with contextlib.suppress(OSError, msgspec.DecodeError):
        msgspec.json.decode(read_private(path), type=SavedSession)
        return ""
    return "this file exists and is no session file, so it is left as it is: name a file that does not exist yet"


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def is_locked_here(file: IO[bytes]) -> bool:
    """Lock a file for this process and not for its children; returns whether no other process has.

    Raises:
        OSError: files cannot be locked there, as on some network drives.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        if problem.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            raise
        return False
    return True
