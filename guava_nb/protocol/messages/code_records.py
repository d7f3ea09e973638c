"""Code of the user's that runs on workers between runs: cells, programs over all of them, values, packages, files."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from guava_nb.protocol.messages.group_records import FormGroup
from guava_nb.protocol.messages.wire_types import Channel, Message, Tree

__all__ = [
    "CodeRan",
    "CodeValues",
    "EndProgram",
    "InstallPackages",
    "InterruptCode",
    "PlaceFiles",
    "RunCode",
    "RunProgram",
]
__all__ += ["UserFile"]


class RunCode(Message, frozen=True, kw_only=True):
    """Orchestrator to worker (CHECKPOINT): set these values, run this text, and send what is wanted.

    Attributes:
        request_id: in the answers.
        cell: how the text is called in tracebacks.
        text: Python source; its last expression's value comes back too, under the name "".
        values: a dict of names and what they are set to before.
        wanted: names whose values come back.
        rank: seat of this worker, from 0.
        most_bytes: that the answer's payload may have.
    """

    NUMBER: ClassVar[int] = 130
    CHANNEL: ClassVar[Channel] = Channel.CHECKPOINT

    request_id: int
    cell: str
    text: str
    values: Tree
    wanted: tuple[str, ...]
    rank: int
    most_bytes: int


class InterruptCode(Message, frozen=True):
    """Orchestrator to worker: raise KeyboardInterrupt in the code of this request, also where it has not begun."""

    NUMBER: ClassVar[int] = 131

    request_id: int


class InstallPackages(Message, frozen=True):
    """Orchestrator to worker: have pip install these, and change nothing that is loaded there."""

    NUMBER: ClassVar[int] = 132

    request_id: int
    packages: tuple[str, ...]


class UserFile(msgspec.Struct, frozen=True, array_like=True):
    """A text file of the user's; `path` has slashes and leads down from a folder on sys.path."""

    path: str
    sha256: str
    text: str


class PlaceFiles(Message, frozen=True):
    """Orchestrator to worker: put these files where code can import them. On CONTROL, so that a run comes after them."""

    NUMBER: ClassVar[int] = 133

    request_id: int
    files: tuple[UserFile, ...]


class CodeValues(Message, frozen=True):
    """Worker to orchestrator (CHECKPOINT): the values that `RunCode` asked for, as a dict."""

    NUMBER: ClassVar[int] = 134
    CHANNEL: ClassVar[Channel] = Channel.CHECKPOINT

    request_id: int
    values: Tree


class CodeRan(Message, frozen=True, kw_only=True):
    """Worker to orchestrator (METRICS, behind what the code printed): how such a request ended.

    Attributes:
        nbytes: payload of the `CodeValues` that comes; -1: none comes.
        type_name, text, traceback: of what was raised; "" for nothing. Without a `type_name` the text says what was done.
    """

    NUMBER: ClassVar[int] = 135
    CHANNEL: ClassVar[Channel] = Channel.METRICS

    request_id: int
    nbytes: int = -1
    type_name: str = ""
    text: str = ""
    traceback: str = ""


class RunProgram(Message, frozen=True, kw_only=True):
    """Orchestrator to worker: run this program as one rank of a process group, as torchrun would start it.

    Attributes:
        request_id: in the answer.
        name: of the program in tracebacks, and its sys.argv[0].
        text: Python source, run as `__main__`.
        arguments: the rest of its sys.argv.
        seat: of this worker in the session, from 0.
        local_rank: how many earlier ranks are on this machine, of
        local_size: ranks there.
        group: the place to take in it.
    """

    NUMBER: ClassVar[int] = 136

    request_id: int
    name: str
    text: str
    arguments: tuple[str, ...]
    seat: int
    local_rank: int
    local_size: int
    group: FormGroup


class EndProgram(Message, frozen=True):
    """Orchestrator to worker: all ranks of this program have ended; leave its group."""

    NUMBER: ClassVar[int] = 137

    request_id: int
