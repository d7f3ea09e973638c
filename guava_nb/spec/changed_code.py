"""Whether a worker has the user's code as it is here, or as it was before a script or notebook changed it.

Knows the facts of both sides. Where they differ, a new process here imports the code once more: what differs from that was
changed in this one, and what differs there too belongs to that machine (its number of processors, the time of day).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from guava_nb.protocol.messages import Cell
from guava_nb.spec.cells import build_module, resolve
from guava_nb.spec.own_facts import HASH, Facts, facts_of, is_alike, loads, moved, shown, unlike

__all__ = ["CodeHere", "main"]

_START_S = 120.0
_MOST_TOLD = 3


class CodeHere:
    """The user's code of a run as this process has it.

    Args:
        roots: what the user gave, by role.
        names: of the same, as workers look them up, by role.
        cells: that are shared.
    """

    def __init__(self, roots: Mapping[str, object], names: Mapping[str, str], cells: Sequence[Cell]) -> None:
        self._roots, self._names, self._cells = dict(roots), dict(names), list(cells)
        self._facts = self._last = facts_of(roots)
        self._new: Facts | None = None

    def problem(self, theirs: Facts) -> str:
        """Return what a worker has otherwise and must not, in a sentence; "" where it has the same code."""
        differing = unlike(self._facts, theirs)
        if not differing:
            return ""
        if self._new is None:
            self._new = _facts_of_new_process(self._cells, self._names)
        changed = [p for p in differing if p in self._new and is_alike(self._new[p], theirs[p])]
        if changed:
            told = "; ".join(_told(place, self._facts[place], theirs[place]) for place in changed[:_MOST_TOLD])
            more = f"; and {len(changed) - _MOST_TOLD} more" if len(changed) > _MOST_TOLD else ""
            return (
                f"{told}{more}. Workers import modules as they lie on disk and run shared cells anew, so a change made here "
                "afterwards does not reach them. Write it into the module or the shared cell, or pass it as an argument "
                "(model_args and the like)"
            )
        older = [p for p in differing if "#" in theirs[p] and is_alike(self._new.get(p, ""), self._facts[p])]
        if older:
            return (
                f"{', '.join(older[:_MOST_TOLD])} has other code there than here: copy the module's file to that machine, start "
                "the worker anew there, or put the code into a %%guava_share cell"
            )
        return ""

    def begins_otherwise(self, theirs: Facts) -> str:
        """Return which globals have other values at a worker though its code is the same, in a sentence; "" for none.

        They are set by the run's code itself, or differ from process to process: drawn or read when the module is imported.
        """
        found = moved(self._facts, theirs)
        if not found:
            own = unlike(self._facts, theirs)[:_MOST_TOLD]
            if not own:
                return ""
            if own == [HASH]:
                return (
                    "the run's code calls Python's hash(), which gives the same text another number in each process, so each "
                    "worker computes with numbers of its own: take a hash that is the same everywhere, such as "
                    "zlib.crc32(text.encode()), or start this process and all workers with PYTHONHASHSEED=0 in their environment"
                )
            return (
                f"{'; '.join(_told(place, self._facts[place], theirs[place]) for place in own)}. Nothing here changed it after "
                "its module was imported, so it is drawn at random then, or read from the machine, or that machine has another "
                "version of the file: each worker trains with its own. Where it must be one for all, draw it from a seed "
                "(torch.Generator().manual_seed(0)), keep it in a buffer of the model (self.register_buffer), or pass it as an "
                "argument (model_args and the like)"
            )
        told = "; ".join(
            f"{place} is {ours} here and {its} there" for place, (ours, its) in list(found.items())[:_MOST_TOLD]
        )
        return (
            f"{told}. The run's code sets this itself, and workers begin with the value that the module or the shared cell gives "
            "it, while plain PyTorch would go on from the one here. Set it back here before the run, or keep it in a buffer of "
            "the model (self.register_buffer)"
        )

    def loads(self, name: str) -> bool:
        """Whether the run's code uses what is under a name, and does not only set it."""
        return loads(self._roots, name)

    def changed(self) -> str:
        """Return what was changed here since the last call, in words; "" for nothing."""
        before, self._last = self._last, facts_of(self._roots)
        ours = {**moved(self._last, before), **{p: (self._last[p], before[p]) for p in unlike(self._last, before)}}
        return "; ".join(f"{p} from {shown(old)} to {shown(new)}" for p, (new, old) in list(ours.items())[:_MOST_TOLD])


def _told(place: str, ours: str, theirs: str) -> str:
    if shown(ours) == shown(theirs):
        return f"{place} has other code here than there"
    return f"{place} is {shown(ours)} here and {shown(theirs)} there"


def _facts_of_new_process(cells: Sequence[Cell], names: Mapping[str, str]) -> Facts:
    """Import the code in a new process; nothing where that fails: then nothing tells what was changed here."""
    path = os.pathsep.join(one or os.getcwd() for one in sys.path)
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=msgspec.msgpack.encode((list(cells), dict(names))),
            capture_output=True, timeout=_START_S, env={**os.environ, "PYTHONPATH": path}, check=True,
        )  # fmt: skip
        return msgspec.msgpack.decode(done.stdout, type=dict[str, str])
    except (subprocess.SubprocessError, OSError, msgspec.DecodeError):
        return {}


def main() -> None:
    """Write the facts of the cells and names that come on standard input to standard output."""
    out = os.dup(1)
    os.dup2(2, 1)  # what the user's modules print is no answer
    cells, names = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[list[Cell], dict[str, str]])
    module = build_module(cells) if cells else None
    found = facts_of({role: resolve(name, module) for role, name in names.items()})
    with os.fdopen(out, "wb") as stream:
        stream.write(msgspec.msgpack.encode(found))


if __name__ == "__main__":
    main()
