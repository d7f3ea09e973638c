"""A process group's end on this rank: numbers its operations, sends what goes out, sorts in what comes.

Knows sequences, early arrivals, tags and what is pending; knows nothing of torch's classes. What comes is handled in the
thread that brings it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from guava_nb.backend.operation import Inbound, Operation, Part, Receive, Run, Slot
from guava_nb.errors import CollectiveError, CollectiveTimeout, GroupBroken, GuavaError
from guava_nb.protocol.messages import (
    Expire,
    FlatTensor,
    GroupEnded,
    LeaveGroup,
    Message,
    OpenGroup,
    OperationFailed,
    Parcel,
    Piece,
    Taken,
)

__all__ = ["GroupMember", "called_back"]

_ONLY_CALLED = -2
_NOTHING = FlatTensor("uint8", 0)
_HUB_ANSWER_S = 10.0  # for the names of the missing, once time is up
Send = Callable[[Message, Sequence[memoryview]], None]


class _CalledBack(threading.local):
    """A group, and the number of its collective after which this thread calls another, in a callback; None outside of one."""

    after: tuple[GroupMember, int] | None = None


_CALLED_BACK = _CalledBack()


@contextlib.contextmanager
def called_back(circle: GroupMember, sequence: int) -> Iterator[None]:
    """What this thread calls in the block, it calls in callbacks of one collective's future.

    Args:
        circle: the group of that collective.
        sequence: its number there.
    """
    before, _CALLED_BACK.after = _CALLED_BACK.after, (circle, sequence)
    try:
        yield
    finally:
        _CALLED_BACK.after = before


class GroupMember:
    """One group on one rank.

    Args:
        name: the group's name on the relay.
        rank: of this process in it.
        members: names of all ranks, in order.
        send: gives a message to the hub; never blocks.
    """

    def __init__(self, name: str, rank: int, members: Sequence[str], send: Send) -> None:
        """Prepare; `open` tells the hub."""
        self.name, self.rank, self.members, self._send = name, rank, tuple(members), send
        self.size = len(self.members)
        self.sequence = 0
        self._lock = threading.Lock()
        self._pending: dict[int, Operation] = {}
        self._early: dict[int, list[tuple[Piece, memoryview | bytes]]] = {}
        self._sends: dict[tuple[int, int], Operation] = {}  # target and number, until the hub has them
        self._numbers: dict[int, int] = {}  # per target, of the last tensor sent
        self._inbound: dict[tuple[int, int], Inbound] = {}  # source and number, in the order of arrival
        self._receives: list[Receive] = []
        self._left: set[int] = set()
        self._broken: GuavaError | None = None
        self._overdue: GuavaError | None = None  # failure of a collective that was over here before it failed

    def open(self) -> None:
        """Open the group at the hub, which at once sends what waits there; no other member needs to be there yet."""
        self._send(OpenGroup(self.name, self.rank, self.size, self.members[self.rank]), ())

    def who(self, rank: int) -> str:
        """Name a rank for a sentence."""
        return f"rank {rank} ({self.members[rank]})" if 0 <= rank < self.size else f"rank {rank}"

    # --------------------------------------------------------------------------------------------------- collectives

    def start(self, operation: Operation, run: Run | None = None) -> Operation:
        """Begin a collective; it is finished by the reader thread.

        Args:
            operation: what to do.
            run: calls its argument as soon as the bytes that go out are ready; None: they are.

        Raises:
            CollectiveError: a callback calls it, and other collectives were called meanwhile, so ranks may call in unlike orders.
        """
        if run is not None:
            operation.hold()  # what the others send may all be here before this rank's own bytes are
        with self._lock:
            self._check_order(operation)
            self.sequence += 1
            operation.sequence = self.sequence
            broken, self._overdue = self._broken or self._overdue, None
            problem = ""
            if broken is None:
                self._pending[operation.sequence] = operation
                for piece, payload in self._early.pop(operation.sequence, ()):
                    problem = problem or self._fill(operation, piece, payload)
        if broken is not None:
            operation.end(_again(broken))
            return operation
        if run is None:
            self._send_pieces(operation)
        else:
            run(lambda failure: self._late(operation, failure, lambda: self._send_pieces(operation)))
        self._settle(operation, problem)
        return operation

    def _check_order(self, operation: Operation) -> None:
        after = _CALLED_BACK.after
        if after is None or after[0] is not self:
            return
        if after[1] != self.sequence:
            raise CollectiveError(
                f"{operation.what} is called in a callback of an earlier collective's future, and this rank called others in "
                f"group {self.name!r} meanwhile: another rank may call them in another order, and sums would be of unlike "
                "tensors. Wait for each future before the next collective (DDP with PowerSGD: a bucket_cap_mb that makes one "
                "bucket)"
            )
        _CALLED_BACK.after = self, self.sequence + 1

    def _late(self, operation: Operation, failure: Exception | None, send: Callable[[], None]) -> None:
        """The bytes that go out have come from their device, or never will."""
        if failure is not None:
            self._settle(operation, f"the bytes could not be brought from the device: {failure}")
        elif not operation.done:
            send()
            with self._lock:
                operation.release()
            self._settle(operation)

    def _send_pieces(self, operation: Operation) -> None:
        sequence, call, reduce = operation.sequence, operation.spec, operation.reduce
        pieces = [(part, offset, data) for part in operation.parts for offset, data in part.chunks()]
        dtype = call.dtype if call is not None else "uint8"
        head = partial(Piece, group=self.name, sequence=sequence, source=self.rank)
        if not pieces:
            self._send(head(target=_ONLY_CALLED, offset=0, total=0, tensor=_NOTHING, call=call), ())
        for index, (part, offset, data) in enumerate(pieces):
            flat = FlatTensor(dtype, data.nbytes // part.item_bytes)
            last = operation.confirm and index == len(pieces) - 1
            piece = head(
                target=part.target, offset=offset, total=part.total, tensor=flat, reduce=reduce, confirm=last, call=call
            )
            self._send(piece, (data.data,) if data.nbytes else ())
            call = None

    def _fill(self, operation: Operation, piece: Piece, payload: memoryview | bytes) -> str:
        problem = operation.fill(piece.source, piece.offset, piece.total, piece.tensor.dtype, payload)
        if not problem and operation.complete:
            self._pending.pop(operation.sequence, None)
        return f"from {self.who(piece.source)}: {problem}" if problem else ""

    def _settle(self, operation: Operation, problem: str = "") -> None:
        """Without the lock: end it if it is over."""
        if problem:
            with self._lock:
                self._pending.pop(operation.sequence, None)
            operation.end(CollectiveError(f"{operation.what} in group {self.name!r}: {problem}"))
        elif operation.complete and not operation.done:
            with self._lock:
                self._pending.pop(operation.sequence, None)
            operation.end()

    # ----------------------------------------------------------------------------------------------- send and receive

    def send(self, operation: Operation, part: Part, dtype: str, tag: int, run: Run | None) -> Operation:
        """Send a tensor to one rank; done when its memory may be used again."""
        target = part.target
        with self._lock:
            number = self._numbers[target] = self._numbers.get(target, 0) + 1
            broken, left = self._broken, target in self._left
            if broken is None and not left and operation.confirm:
                self._sends[target, number] = operation
        if broken is not None:
            operation.end(_again(broken))
        elif left:
            operation.end(CollectiveError(f"send: {self.who(target)} has left group {self.name!r}"))
        elif run is None:
            self._send_parcels(part, dtype, tag, number, operation.confirm)
        else:
            operation.hold()
            parcels = (part, dtype, tag, number, operation.confirm)
            run(lambda failure: self._late(operation, failure, lambda: self._send_parcels(*parcels)))
        if not operation.done and operation.complete:
            operation.end()
        return operation

    def _send_parcels(self, part: Part, dtype: str, tag: int, number: int, confirm: bool) -> None:
        chunks = list(part.chunks())
        head = partial(
            Parcel, group=self.name, source=self.rank, target=part.target, tag=tag, number=number, total=part.total
        )
        for index, (offset, data) in enumerate(chunks):
            tensor = FlatTensor(dtype, data.nbytes // part.item_bytes)
            last = confirm and index == len(chunks) - 1
            parcel = head(offset=offset, tensor=tensor, confirm=last)
            self._send(parcel, (data.data,) if data.nbytes else ())

    def receive(self, operation: Operation, source: int, tag: int, slot: Slot) -> Operation:
        """Receive a tensor from a rank, or from any (-1)."""
        wanted = Receive(operation, source, tag, slot)
        operation.add_slot(source, slot)
        problem = ""
        with self._lock:
            error = None if self._broken is None else _again(self._broken)
            inbound = self._first_inbound(wanted)
            if inbound is not None:
                error = None  # it came before the group broke
                problem = self._match(wanted, inbound)
            elif error is None and self._all_left(source):
                error = CollectiveError(f"receive: {self._sender(source)} has left group {self.name!r}")
            elif error is None:
                self._receives.append(wanted)
        if problem:
            error = CollectiveError(problem)
        if error is not None or operation.complete:
            operation.end(error)
        return operation

    def _sender(self, source: int) -> str:
        return "every other rank" if source < 0 else self.who(source)

    def _all_left(self, source: int) -> bool:
        return source in self._left if source >= 0 else len(self._left) >= self.size - 1 > 0

    def _first_inbound(self, wanted: Receive) -> Inbound | None:
        for inbound in self._inbound.values():
            if inbound.receive is None and inbound.tag == wanted.tag and wanted.source in (-1, inbound.source):
                return inbound
        return None

    def _match(self, wanted: Receive, inbound: Inbound) -> str:
        """Lock held: this tensor is for that receive."""
        operation = inbound.receive = wanted.operation
        operation.slots = {inbound.source: wanted.slot}
        operation.source = inbound.source
        pieces, inbound.pieces = inbound.pieces, []
        problem = ""
        for parcel, payload in pieces:
            problem = problem or self._take(inbound, parcel, payload)
        if pieces and inbound.received >= inbound.total:
            del self._inbound[inbound.source, inbound.number]
        return problem

    def _take(self, inbound: Inbound, parcel: Parcel, payload: memoryview | bytes) -> str:
        assert inbound.receive is not None
        problem = inbound.receive.fill(parcel.source, parcel.offset, parcel.total, parcel.tensor.dtype, payload)
        return f"receive from {self.who(parcel.source)}: {problem}" if problem else ""

    # ------------------------------------------------------------------------------------------------- what comes in

    def post(self, message: Message, payload: memoryview | bytes) -> None:
        """Take a message of this group; called by a reader thread."""
        if isinstance(message, Piece):
            self._on_piece(message, payload)
        elif isinstance(message, Parcel):
            self._on_parcel(message, payload)
        elif isinstance(message, Taken):
            self._on_taken(message)
        elif isinstance(message, OperationFailed):
            self._on_failed(message)
        elif isinstance(message, LeaveGroup):
            self._on_left(message.rank)
        elif isinstance(message, GroupEnded):
            self.end(GroupBroken(f"group {self.name!r} is broken: {message.reason}"))

    def _on_piece(self, piece: Piece, payload: memoryview | bytes) -> None:
        with self._lock:
            operation = self._pending.get(piece.sequence)
            if operation is None:
                if piece.sequence > self.sequence:
                    self._early.setdefault(piece.sequence, []).append((piece, payload))
                return
            problem = self._fill(operation, piece, payload)
        if problem or operation.complete:
            self._settle(operation, problem)

    def _on_parcel(self, parcel: Parcel, payload: memoryview | bytes) -> None:
        key = (parcel.source, parcel.number)
        problem = ""
        with self._lock:
            inbound = self._inbound.get(key)
            if inbound is None:
                inbound = self._inbound[key] = Inbound(parcel.source, parcel.tag, parcel.number, parcel.total)
                wanted = next(
                    (r for r in self._receives if r.tag == parcel.tag and r.source in (-1, parcel.source)), None
                )
                if wanted is not None:
                    self._receives.remove(wanted)
                    self._match(wanted, inbound)
            inbound.received += parcel.tensor.numel
            operation = inbound.receive
            if operation is None:
                inbound.pieces.append((parcel, payload))
            else:
                problem = self._take(inbound, parcel, payload)
            if inbound.received >= parcel.total and operation is not None:
                del self._inbound[key]
        if operation is not None and (problem or operation.complete):
            operation.end(CollectiveError(problem) if problem else None)

    def _on_taken(self, message: Taken) -> None:
        with self._lock:
            if message.sequence < 0:
                operation = self._sends.pop((message.target, -message.sequence), None)
            else:
                operation = self._pending.get(message.sequence)
            if operation is not None:
                operation.confirmed()
        if operation is not None:
            self._settle(operation)

    def _on_failed(self, message: OperationFailed) -> None:
        kind = CollectiveTimeout if message.timed_out else CollectiveError
        error = kind(message.reason)
        error.missing = message.missing  # type: ignore[attr-defined]
        with self._lock:
            operation = self._pending.pop(message.sequence, None)
            failed = [operation] if operation is not None else []
            if operation is None:
                # Over here already, as for the root of a broadcast. The ranks go different ways from there on: what was
                # called since, or is called next, says so instead of waiting for them.
                failed = [later for number, later in self._pending.items() if number > message.sequence]
                self._overdue = None if failed else error
                for later in failed:
                    del self._pending[later.sequence]
        for one in failed:
            one.end(error)

    def _on_left(self, rank: int) -> None:
        with self._lock:
            self._left.add(rank)
            gone = [r for r in self._receives if r.source == rank or self._all_left(r.source)]
            self._receives = [r for r in self._receives if r not in gone]
        for receive in gone:
            receive.operation.end(CollectiveError(f"receive: {self.who(rank)} has left group {self.name!r}"))

    # ------------------------------------------------------------------------------------------------------- endings

    def end(self, error: GuavaError) -> None:
        """Everything pending and everything to come fails with this error; the first one counts."""
        with self._lock:
            if self._broken is not None:
                return
            self._broken = error
            pending = self._everything()
            self._pending.clear()
            self._sends.clear()
            self._receives.clear()
            self._early.clear()
        for operation in pending:
            operation.end(_again(error))

    def leave(self) -> None:
        """Say that this rank is done with the group; nothing can be started afterwards."""
        with self._lock:
            if isinstance(self._broken, _Left):
                return
            was_broken, self._broken = self._broken, _Left(f"group {self.name!r} was destroyed here")
            pending = self._everything()
            self._pending.clear()
            self._sends.clear()
        self._send(LeaveGroup(self.name, self.rank), ())
        for operation in pending:
            operation.end(_again(was_broken or self._broken))

    def _everything(self) -> list[Operation]:
        under_way = [inbound.receive for inbound in self._inbound.values() if inbound.receive is not None]
        return [*self._pending.values(), *self._sends.values(), *(r.operation for r in self._receives), *under_way]

    @property
    def broken(self) -> GuavaError | None:
        """Why nothing can be started here; None while the group stands."""
        return self._broken

    # --------------------------------------------------------------------------------------------------------- time

    def next_deadline(self) -> float | None:
        """When the first pending operation has waited long enough (monotonic seconds)."""
        with self._lock:
            return min((operation.deadline for operation in self._everything()), default=None)

    def check_deadlines(self, now: float) -> None:
        """End what has waited long enough; a collective is ended by the hub, which knows who is missing."""
        with self._lock:
            late = [operation for operation in self._everything() if operation.deadline <= now]
        for operation in late:
            self.expire(operation)

    def expire(self, operation: Operation, waited_s: float | None = None) -> None:
        """End an operation that has waited long enough."""
        waited_s = operation.timeout_s if waited_s is None else waited_s
        if operation.sequence and not operation.expired:
            operation.expired = True
            operation.deadline = time.monotonic() + _HUB_ANSWER_S
            self._send(Expire(self.name, operation.sequence, waited_s), ())
            return
        with self._lock:
            self._pending.pop(operation.sequence, None)
            self._receives = [receive for receive in self._receives if receive.operation is not operation]
            self._sends = {key: sent for key, sent in self._sends.items() if sent is not operation}
        where = "the hub, which did not answer" if operation.sequence else operation.what
        operation.end(
            CollectiveTimeout(f"reached its timeout of {waited_s:g} s waiting for {where} in group {self.name!r}")
        )


class _Left(CollectiveError):
    """This rank itself left."""


def _again(error: GuavaError) -> GuavaError:
    """A fresh error of the same words for every operation, so that tracebacks do not pile up on one."""
    made = (CollectiveError if isinstance(error, _Left) else type(error))(str(error))
    made.__cause__ = error.__cause__
    return made
