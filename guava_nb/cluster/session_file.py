"""What of a session outlives its process: certificate, secret and port, in a file that only its user can read.

A process that opens the session anew with the same file is reached by the same join code, so workers come back to it by
themselves. A second file beside it is locked as long as a process has the session, so two never share one.
"""

from __future__ import annotations

import contextlib
import errno
import sys
from pathlib import Path
from typing import IO

import msgspec

from guava_nb.config.state_folder import write_private
from guava_nb.errors import ConfigError
from guava_nb.transport.certificate import Certificate

__all__ = ["SavedSession", "SessionFile", "is_locked_here"]

_VERSION = 1
_LOCAL = ".local"
#: Of the files beside it: those that end with the session, and all that a session file cannot be called.
_BESIDE = (".run", ".steps", ".launched", _LOCAL)
_TAKEN = (*_BESIDE, ".lock", ".probe", ".status")
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
            ConfigError: the folder cannot be written to, or has no room or no locks; or the name is that of a file beside it.
        """
        if path.suffix in _TAKEN:
            raise ConfigError(
                f"session_file {path}: files that end in {path.suffix} lie beside it; let it end in .json"
            )
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for number in range(1, _MOST + 1):
                one = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
                if one in _HELD:
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
            saved = msgspec.json.decode(self.path.read_bytes(), type=SavedSession)
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
        with contextlib.suppress(OSError), self.path.with_suffix(_LOCAL).open("a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in names)

    def local(self) -> list[str]:
        """Return the names of those that processes before started; none where the last one ended its session."""
        try:
            return sorted(set(self.path.with_suffix(_LOCAL).read_text(encoding="utf-8").split("\n")[:-1]))
        except (OSError, UnicodeDecodeError):
            return []

    def release(self, forget: bool) -> None:
        """Let the next process hold it; `forget`: the session is over for good."""
        if forget:
            for path in (self.path, *map(self.path.with_suffix, _BESIDE)):
                path.unlink(missing_ok=True)
        self._lock.close()
        _HELD.discard(self.path)


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
