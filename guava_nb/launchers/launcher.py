"""What every launcher can do: it starts `guava worker` somewhere, says how that stands, and ends what it started."""

from __future__ import annotations

import contextlib
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from guava_nb.config.state_folder import make_private_folder, write_private
from guava_nb.config.values import near
from guava_nb.errors import ConfigError
from guava_nb.protocol.joincode import JoinCode

__all__ = ["Launcher", "Order", "is_mark", "worker_words"]

_MARK = re.compile(r"guava-[0-9a-f]{10}")


@dataclass(frozen=True)
class Order:
    """What a launcher is told about the session that its workers are for.

    Attributes:
        code: leads to the session; a secret.
        is_reached_from_elsewhere: the code's address is one that other machines reach.
        port: that the session listens on, at this machine's loopback or all its addresses.
        folder: of this user alone, for files that go with the session.
        tell: takes a sentence for the person at the orchestrator, from any thread.
    """

    code: JoinCode
    is_reached_from_elsewhere: bool
    port: int
    folder: Path
    tell: Callable[[str], None] = lambda sentence: None


class Launcher(ABC):
    """One start of some workers. What a constructor takes is the text behind the colon: `8,gpus=1` of `slurm:8,gpus=1`.

    `start` is called once; `end` may be called at any time, twice, after a `start` that was cut short, and by a later process
    that only knows `what` and `mark`: so everything that is started carries the mark, and is found by it.

    Attributes:
        name: that stands before the colon.
        example: of the whole text.
        options: each `KEY=VALUE` that may stand in the text, with its meaning.
        is_prompt: workers come in seconds, and no queue decides when.
        needs_address: workers run on other machines, which must reach the session's address.
        mark: tells this start from every other one: "guava-" and ten hexadecimal digits; only the constructor makes one.
        count: how many workers it starts; 0 where only their machines can tell.

    Raises (by the constructor):
        ConfigError: the text cannot be read.
    """

    name: ClassVar[str] = ""
    example: ClassVar[str] = ""
    options: ClassVar[Mapping[str, str]] = {}
    is_prompt: ClassVar[bool] = True
    needs_address: ClassVar[bool] = True

    def __init__(self, what: str) -> None:
        self.what = what
        self.mark = f"guava-{secrets.token_hex(5)}"
        self.count = 0

    @abstractmethod
    def check(self) -> None:
        """Look whether what it needs is here and there, before anything is started.

        Raises:
            ConfigError: something is missing; the sentence says how to get it.
        """

    @abstractmethod
    def start(self, order: Order) -> str:
        """Start the workers; returns a sentence on what was started.

        Raises:
            ConfigError: they cannot be started. What was started before is ended by `end`.
        """

    @abstractmethod
    def follow(self, code: JoinCode) -> None:
        """The session has another address: let workers that are away, or still to come, know the new code."""

    def look(self) -> str:
        """How it stands, as a sentence, where that is news: a worker that ended, a job that waits. May take seconds."""
        return ""

    def failure(self) -> str:
        """Why no worker of this start will come any more; "" as long as one may."""
        return ""

    @abstractmethod
    def end(self) -> str:
        """End all that was started, and nothing else; returns "", or a sentence on what could not be ended."""

    def __repr__(self) -> str:
        """One line without secrets."""
        return f"{type(self).__name__}({self.what}, {self.mark})"

    # ------------------------------------------------------------------------------------------------ for subclasses

    def read(self, what: str, passes_on: bool = False) -> tuple[list[str], dict[str, str]]:
        """Take a text apart at its commas: plain words, and `KEY=VALUE` as a dict.

        Args:
            passes_on: keys that are not among `options` are given on to another program, and any is taken.

        Raises:
            ConfigError: a key is not known, or stands there twice.
        """
        words, found = list[str](), dict[str, str]()
        for part in filter(None, (part.strip() for part in what.split(","))):
            key, mark, value = part.partition("=")
            if not mark:
                words.append(part)
                continue
            if key in found:
                raise ConfigError(f"--on {self.name}: {key} is given twice; keep one")
            if key not in self.options and not passes_on:
                known = ", ".join(f"{key}= ({text})" for key, text in self.options.items())
                raise ConfigError(f'--on {self.name} has no "{key}".{near(key, self.options)} There are: {known}')
            found[key] = value
        return words, found

    def read_count(self, words: Sequence[str]) -> int:
        """The number of workers, which stands alone before the options.

        Raises:
            ConfigError: it is missing, or no number from 1 to 4096.
        """
        text = words[0] if len(words) == 1 else ""
        if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 4096):
            raise ConfigError(f"--on {self.name} needs the number of workers, as in --on {self.example}")
        return int(text)

    def read_number(self, found: Mapping[str, str], key: str, default: int) -> int:
        """A whole number among the options.

        Args:
            found: the options of a text, as `read` gives them.
            key: name of the option.
            default: where it is not given.

        Raises:
            ConfigError: it is none.
        """
        text = found.get(key, str(default))
        if not (text.isascii() and text.isdecimal()):
            raise ConfigError(f"--on {self.name}: {key}={text} should be a whole number")
        return int(text)

    def leave_code(self, order: Order) -> Path:
        """Write the join code into a file that only this user can read; returns its path.

        Raises:
            ConfigError: the folder cannot be written to.
        """
        path = order.folder / f"{self.mark}.code"
        try:
            make_private_folder(order.folder)
            write_secret(path, order.code.encode())
        except OSError as problem:
            raise ConfigError(
                f"{path} cannot be written ({problem.strerror or problem}): set XDG_STATE_HOME to a folder of yours"
            ) from problem
        return path


def is_mark(text: str) -> bool:
    """Whether a text can be the mark of a start: it goes into commands, so nothing else is taken for one."""
    return _MARK.fullmatch(text) is not None


def write_secret(path: Path, text: str) -> None:
    """Write a file of mode 0600, whole at once."""
    write_private(path, f"{text}\n".encode())


def remove_secret(path: Path) -> None:
    """Remove such a file, if it is there."""
    with contextlib.suppress(OSError):
        path.unlink()


def worker_words(python: str, join_file: str, mark: str, gpus: str = "", device: str = "") -> list[str]:
    """The command line of a worker: no secret is in it.

    Args:
        python: path of the Python there.
        mark: of the start.
        device: as `guava worker --device`; "": not said.
        join_file: where it reads the join code; "-" is its standard input.
        gpus: "auto" takes each GPU there, or the processor where there is none.
    """
    given = {"--join-file": join_file, "--mark": mark, "--gpus": gpus, "--device": device}
    return [python, "-m", "guava_nb", "worker", *(word for pair in given.items() if pair[1] for word in pair)]
