"""Keeps a run's state on this machine's disk, while steps go on, and sends what the line has room for: differences."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
from torch import Tensor

from guava_nb.data.codec import pack, unpack
from guava_nb.protocol.messages import FetchState, SavedState, SaveState, State
from guava_nb.replica.replica import Replica
from guava_nb.replica.rounds.local_replica import LocalReplica
from guava_nb.wire_formats.held_tensors import HeldTensors
from guava_nb.worker.preparation import PreparedRun, Send
from guava_nb.worker.saving.state_files import SavedRecord, StateFiles

__all__ = ["Found", "StateKeeper"]

log = logging.getLogger(__name__)

_NO_FOLDER = "this worker lives in its user's own process"
#: Own parts are found by their number alone: another run goes on from them.
_OWN = "own"


class Found(NamedTuple):
    """A state that was read from disk.

    Attributes:
        record: what its file says of it.
        state: for `Replica.load_state`.
        digest: of the file.
    """

    record: SavedRecord
    state: dict[str, Any]
    digest: str


class StateKeeper:
    """Keeps states of the run in work.

    Args:
        send: queues a message for the orchestrator; from any thread.
        folder: where states of all sessions lie; None keeps none, and says so when it is asked.

    Attributes:
        on_saved: called when a state lies on the disk; from a thread of its own.
    """

    def __init__(self, send: Send, folder: Path | None) -> None:
        """Touch nothing yet."""
        self._send, self._folder = send, folder
        self._files: StateFiles | None = None
        self._own: StateFiles | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._base, self._held = 0, None  # number of the weights to which differences are sent, and their copy
        self.on_saved: Callable[[], None] = lambda: None

    _held: HeldTensors | None

    def open(self, session: str) -> None:
        """Take part in a session of this id; what lies here of another one is of no more use."""
        if self._folder is None:
            return
        files = StateFiles(self._folder, session)
        if self._files is not None and self._files.folder != files.folder:
            self.close(remove=True)
        self._files, self._own = files, StateFiles(self._folder, f"{session} own")

    def keep(self, run: PreparedRun, question: FetchState, step: int, ticks: int) -> None:
        """Copy the state of the last committed step, and answer when it is kept as wanted; raises what `Replica.state` does.

        Args:
            run: in work.
            question: with the order to save, which says where and what.
            step: the last committed one.
            ticks: that its schedule has had.
        """
        order, began = question.save, time.monotonic()
        assert order is not None and isinstance(run.replica, Replica)
        schedule = run.replica.schedule_state()
        state = run.replica.own_part() if order.own and isinstance(run.replica, LocalReplica) else run.replica.state()
        named = run.replica.model.named_parameters(remove_duplicate=False)
        learned = {name for name, parameter in named if parameter.requires_grad}
        record = SavedRecord(run.run_id, order.number, _run_digest(run), step, ticks, pack({})[0])

        def work() -> None:
            try:
                saved, small = self._keep_own(record, state) if order.own else self._do(order, record, state, learned)
            except Exception as error:  # no file, no memory: the run goes on, and the orchestrator has its own ways
                log.warning("the state after step %d is not kept here: %s", step + 1, error)
                saved, small = SavedState(problem=str(error)[:300] or type(error).__name__), {}
            sent = {**(state if question.model else {}), **small, "schedule": schedule}
            tree, buffers = pack(sent)
            saved = msgspec.structs.replace(saved, seconds=time.monotonic() - began)
            self._send(State(question.request_id, run.run_id, step, tree, (), ticks, saved), buffers)

        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "guava-states")
        self._thread.submit(work)

    def _keep_own(self, record: SavedRecord, part: dict[str, Any]) -> tuple[SavedState, dict[str, Any]]:
        if self._own is None:
            return SavedState(problem=_NO_FOLDER), {}
        tree, buffers = pack(part)
        digest, nbytes = self._own.write(
            msgspec.structs.replace(record, run_id=_OWN, run_digest="", tree=tree), buffers
        )
        self._own.keep_newest(_OWN)
        return SavedState(digest, nbytes), {}

    def own_parts(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return which of these own parts lie here."""
        return tuple(number for number in numbers if self._own is not None and self._own.has(_OWN, number))

    def own_part(self, number: int) -> dict[str, Any] | None:
        """Return an own part; None where it is not here whole."""
        found = self._own.read(_OWN, "", number, of_any_session=True) if number and self._own is not None else None
        return None if found is None else unpack(found[0].tree, found[1])

    def _do(
        self, order: SaveState, record: SavedRecord, state: dict[str, Any], learned: set[str]
    ) -> tuple[SavedState, dict[str, Any]]:
        """Make the difference first, so that the file has it: it may be lost with this process before it has arrived."""
        small: dict[str, Any] = {}
        model = {name: value for name, value in state["model"].items() if isinstance(value, Tensor)}
        held, left_out = self._settle(order, model, learned), 0.0
        if held >= 0 and order.count:
            assert self._held is not None
            messages, exact, left_out = self._held.propose(model, order.count)
            small = {"messages": messages, "exact": exact}
        if not order.number:
            return SavedState(held=held, left_out=left_out), small
        if self._files is None:
            return SavedState(held=held, left_out=left_out, problem=_NO_FOLDER), small
        self._files.keep_only(record.run_id, [order.known])
        content = {"state": state, "base": self._base, "held": None if self._held is None else self._held.content()}
        tree, buffers = pack(content)
        digest, nbytes = self._files.write(msgspec.structs.replace(record, tree=tree), buffers)
        self.on_saved()
        return SavedState(digest, nbytes, 0.0, held, left_out), small

    def _settle(self, order: SaveState, model: dict[str, Tensor], learned: set[str]) -> int:
        """Have the copy of what the orchestrator holds; returns how many differences are in it, -1 where it is not here."""
        if not order.base:
            return -1
        if order.held < 0:
            if 2 * sum(one.nbytes for one in model.values()) > psutil.virtual_memory().available / 2:
                return -1
            self._base, self._held = order.base, HeldTensors(model, learned)
            return 0
        is_here = self._base == order.base and self._held is not None and self._held.settle(order.held)
        return order.held if is_here else -1

    def find(self, run: PreparedRun, numbers: Sequence[int]) -> Found | None:
        """Return the first of these states of a run that is on the disk, whole, and of the same code and options."""
        for number in numbers if self._files is not None else ():
            assert self._files is not None
            if (found := self._files.read(run.run_id, _run_digest(run), number)) is not None:
                record, payload, digest = found
                content = unpack(record.tree, payload)
                held = content["held"]
                self._base, self._held = content["base"], None if held is None else HeldTensors.from_content(held)
                return Found(record, content["state"], digest)
        return None

    def forget(self) -> None:
        """The run is over here, or begins anew with another state: no difference to it is asked for any more."""
        self._base, self._held = 0, None

    def close(self, remove: bool = False) -> None:
        """Wait for what is being written; `remove`: the session is over, and its files with it."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if remove and self._files is not None:
            self._files.remove()


def _run_digest(run: PreparedRun) -> str:
    return hashlib.sha256(msgspec.msgpack.encode((run.cells, run.spec))).hexdigest()
