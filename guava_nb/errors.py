"""The one tree of errors that guava_nb raises.

    GuavaError
    ├── ConfigError (ValueError)          a setting or an argument is wrong; nothing was started
    │   ├── JoinCodeError                 a join code is damaged, cut off or of another version
    │   └── MeshError                     the axes of a mode do not multiply to the workers that are here
    ├── SourceError                       shared cells cannot run elsewhere (unknown name, notebook syntax, bad code)
    ├── ProtocolError
    │   ├── LocalProtocolError            we used the protocol wrongly: our bug
    │   ├── RemoteProtocolError           the peer's bytes are not ours to read
    │   │   ├── FrameTooLarge             a length beyond the agreed limit
    │   │   └── VersionMismatch           the peer speaks another wire version
    │   └── AuthenticationError           secret or certificate fingerprint do not match
    ├── LinkError
    │   ├── LinkClosed                    we closed it
    │   ├── LinkBroken (ConnectionError)  the world did; the cause is chained
    │   └── LinkTimeout (TimeoutError)    nothing came within the deadline
    ├── ClusterError
    │   ├── JoinRefused                   the other side said no, with its reason
    │   ├── WorkerLost                    a worker is gone and the run cannot go on without it
    │   └── RendezvousTimeout (TimeoutError)  too few workers came in time
    ├── TrainingError
    │   ├── NotFinite                     NaN or Inf in loss or gradients; the step was not applied
    │   ├── SamplesKill                   one worker after the other was lost over the same samples
    │   ├── PreparationError              a worker cannot build what the run needs; nothing was trained
    │   └── CheckpointError               a checkpoint cannot be read, or belongs to another model
    ├── CollectiveError (RuntimeError)    a collective of torch.distributed failed; torch's programs expect RuntimeError
    │   ├── GroupBroken                   the group cannot go on: a member was lost, or it was given up
    │   └── CollectiveTimeout (TimeoutError)  some ranks did not come in time; the text names them
    └── RemoteError                       code that ran on a worker raised; carries its traceback as text

A message says what happened, who (worker, step, address), how much against what limit, and what to do next.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

__all__ = [
    "AuthenticationError",
    "CheckpointError",
    "ClusterError",
    "CollectiveError",
    "CollectiveTimeout",
    "ConfigError",
    "FrameTooLarge",
    "GroupBroken",
    "GuavaError",
    "JoinCodeError",
    "JoinRefused",
    "LinkBroken",
    "LinkClosed",
    "LinkError",
    "LinkTimeout",
    "LocalProtocolError",
    "MeshError",
    "NotFinite",
    "PreparationError",
    "ProtocolError",
    "RemoteError",
    "RemoteProtocolError",
    "RendezvousTimeout",
    "SamplesKill",
    "SourceError",
    "TrainingError",
    "VersionMismatch",
    "of_the_user",
    "WorkerLost",
]


class GuavaError(Exception):
    """Anything guava_nb raises on purpose. A notebook shows it as one line."""

    def _render_traceback_(self) -> list[str]:
        """Show the message alone: IPython calls this instead of printing a traceback."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(GuavaError, ValueError):
    """A setting or an argument is wrong; nothing was started."""


class JoinCodeError(ConfigError):
    """A join code is damaged, cut off, or of another version."""


class MeshError(ConfigError):
    """The axes of a mode do not multiply to the workers that are here.

    Attributes:
        arithmetic: the numbers alone.
        missing: workers that lack; below 0: workers too many.
    """

    def __init__(self, arithmetic: str, advice: str = "", missing: int = 0) -> None:
        super().__init__(f"{arithmetic}: {advice}" if advice else arithmetic)
        self.arithmetic, self.missing = arithmetic, missing


class SourceError(GuavaError):
    """Shared cells cannot run on another machine."""


class CellLeftOut(SourceError):
    """What was asked for is of a shared cell that cannot run on another machine and was left out."""


class ProtocolError(GuavaError):
    """Something about the bytes on a connection."""


class LocalProtocolError(ProtocolError):
    """This side used the protocol wrongly; a bug of ours."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol does not allow."""


class FrameTooLarge(RemoteProtocolError):
    """A length beyond the agreed limit; nothing was allocated for it."""


class VersionMismatch(RemoteProtocolError):
    """The peer speaks another version of the wire protocol."""


class AuthenticationError(ProtocolError):
    """The secret or the certificate fingerprint does not match the join code."""


class LinkError(GuavaError):
    """Something about a connection."""


class LinkClosed(LinkError):
    """This side closed the connection."""


class LinkBroken(LinkError, ConnectionError):
    """The connection broke; the cause is chained."""


class LinkTimeout(LinkError, TimeoutError):
    """Nothing came from the peer within the deadline."""


class ClusterError(GuavaError):
    """Something about who takes part."""


class JoinRefused(ClusterError):
    """The other side refused the join and said why.

    Attributes:
        code: of the refusal, for programs; "" where there is none.
    """

    def __init__(self, reason: str, code: str = "") -> None:
        """Keep both."""
        super().__init__(reason)
        self.code = code


class WorkerLost(ClusterError):
    """A worker is gone and the run cannot go on without it."""


class RendezvousTimeout(ClusterError, TimeoutError):
    """Too few workers came in time."""


class TrainingError(GuavaError):
    """A run could not start or could not go on."""


class NotFinite(TrainingError):
    """NaN or Inf in loss or gradients; the step was not applied anywhere."""


class SamplesKill(TrainingError):
    """One worker after the other was lost over the same samples: it is not the workers."""


class PreparationError(TrainingError):
    """A worker cannot build what the run needs; nothing was trained."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be read or belongs to another model."""


class CollectiveError(GuavaError, RuntimeError):
    """A collective operation failed."""


class GroupBroken(CollectiveError):
    """A process group cannot go on: a member was lost, or the step was given up. The text names the member."""


class CollectiveTimeout(CollectiveError, TimeoutError):
    """Some ranks did not take part in a collective in time; the text names them."""


class RemoteError(GuavaError):
    """Code that ran on a worker raised.

    Attributes:
        worker: the worker's name.
        type_name: name of the exception's class there.
        remote_traceback: the traceback there, as text.
    """

    def __init__(self, worker: str, type_name: str, text: str, remote_traceback: str = "") -> None:
        """Keep the parts; the message names worker, type and text."""
        super().__init__(f"worker {worker} raised {type_name}: {text}")
        self.worker = worker
        self.type_name = type_name
        self.remote_traceback = remote_traceback

    def _render_traceback_(self) -> list[str]:
        """Show the message and the worker's own traceback, which is the user's code."""
        lines = super()._render_traceback_()
        if self.remote_traceback:
            lines += ["", f"Traceback on {self.worker}:", *self.remote_traceback.rstrip().splitlines()]
        return lines


#: Where code of this package and of Python itself lies.
_OURS, _STANDARD = f"{Path(__file__).resolve().parent}{os.sep}", str(Path(os.__file__).parent)


def of_the_user(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the user's own code on: their callback is not found sooner between our frames.

    One without a frame of theirs is a fault of ours, and stays as it is.
    """
    kept: list[TracebackType] = []
    while trace is not None:
        kept, trace = [*kept, trace], trace.tb_next
    theirs = [k for k, one in enumerate(kept) if not _is_installed(one.tb_frame.f_code.co_filename)]
    found: TracebackType | None = None
    for one in reversed(kept[theirs[0] :] if theirs else kept):
        if not theirs or not one.tb_frame.f_code.co_filename.startswith(_OURS):
            found = TracebackType(found, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return found


def _is_installed(file: str) -> bool:
    """Whether code is of this package, of another one, or of Python itself."""
    return file.startswith((_OURS, _STANDARD)) or "site-packages" in file or "dist-packages" in file
