"""What a session has started by launchers: begun together with it, watched, and ended with it, also by a later process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from guava_nb.config.state_folder import read_private, write_private
from guava_nb.errors import ConfigError, GuavaError
from guava_nb.launchers.launcher import Launcher, Order, is_mark
from guava_nb.launchers.registry import make_launcher
from guava_nb.protocol.joincode import JoinCode

__all__ = ["Launches"]

#: Seconds between two looks at what was started.
LOOK_S = 5.0


class _Saved(msgspec.Struct, frozen=True):
    """What finds a start again: no secret."""

    text: str
    mark: str


class Launches:
    """All starts of one session.

    Args:
        tell: takes sentences for the person, from any thread.
        path: where the starts are noted, so that a kernel that is started anew can end them; None: nowhere.
    """

    def __init__(self, tell: Callable[[str], None], path: Path | None) -> None:
        self._tell, self._path = tell, path
        self._started: list[Launcher] = []
        self._texts: dict[str, str] = {}
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None
        self._load()

    def find(self, text: str) -> Launcher | None:
        """The one that was started by this text and may still bring workers."""
        return next((one for one in self._started if self._texts[one.mark] == text and not one.failure()), None)

    def start(self, launcher: Launcher, text: str, order: Order) -> None:
        """Check, then start, and tell what was started; what was begun is ended again where that fails.

        Args:
            launcher: that was made of `text`.
            text: noted, to make the launcher again.
            order: about the session.

        Raises:
            ConfigError: what it needs is missing, or it cannot be started.
        """
        if launcher.needs_address and not order.is_reached_from_elsewhere:
            raise ConfigError(
                f"--on {launcher.name} starts workers on other machines, and this session is reached from this one only: add "
                "--tunnel direct (this machine's own address, or direct:HOST), --host with an address of it, or another tunnel"
            )
        launcher.check()
        self._started.append(launcher)
        self._texts[launcher.mark] = text
        self._save()  # before it begins: it may be all that a killed kernel leaves
        try:
            self._tell(launcher.start(order))
        except BaseException:
            self._end(launcher)
            raise
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="guava-launches", daemon=True)
            self._watcher.start()

    def follow(self, code: JoinCode) -> None:
        """The session has a new code."""
        for launcher in list(self._started):
            try:
                launcher.follow(code)
            except GuavaError as problem:
                self._tell(f"workers of --on {launcher.name} were not told the new join code: {problem}")

    def failure(self) -> str:
        """Why none of them brings a worker any more; "" as long as one may."""
        found = [launcher.failure() for launcher in self._started]
        return "; ".join(found) if found and all(found) else ""

    def end(self) -> None:
        """End all that was started and nothing else; what cannot be ended is told. Safe to call twice."""
        self._ended.set()
        for launcher in list(self._started):
            self._end(launcher)
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(LOOK_S)

    def _end(self, launcher: Launcher) -> None:
        try:
            problem = launcher.end()
        except GuavaError as error:
            problem = str(error)
        if problem:
            self._tell(f"--on {launcher.name} (it carries the mark {launcher.mark}): {problem}")
        self._started.remove(launcher)
        self._save()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            for launcher in list(self._started):
                with contextlib.suppress(GuavaError):  # a program that does not answer now will the next time
                    if news := launcher.look():
                        self._tell(news)

    # ------------------------------------------------------------------------------------------------------ the file

    def _save(self) -> None:
        if self._path is None:
            return
        saved = [_Saved(self._texts[one.mark], one.mark) for one in self._started if self._texts[one.mark]]
        with contextlib.suppress(OSError):
            if saved:
                write_private(self._path, msgspec.json.encode(saved))
            else:
                self._path.unlink(missing_ok=True)

    def _load(self) -> None:
        """Take over what a process before this one started for the session and did not end; not what others may have written."""
        if self._path is None:
            return
        try:
            saved = msgspec.json.decode(read_private(self._path), type=list[_Saved])
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            return
        for one in saved:
            if not is_mark(one.mark) or one.mark in self._texts:
                continue
            with contextlib.suppress(ConfigError):
                launcher = make_launcher(one.text)
                launcher.mark = one.mark
                self._started.append(launcher)
                self._texts[one.mark] = one.text
