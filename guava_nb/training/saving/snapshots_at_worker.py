"""Snapshots that stay on the disk of a lone worker, and the differences of their weights that come here."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn

from guava_nb.cluster.job import Job
from guava_nb.cluster.line_rate import begin_measuring
from guava_nb.config.units import show_bytes
from guava_nb.errors import RemoteProtocolError
from guava_nb.protocol.messages import SaveState
from guava_nb.sync.beginning import Beginning
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.sync.state_copy import StateCopy
from guava_nb.sync.states_on_disk import StateOnDisk
from guava_nb.training.plan import Snapshot, TrainingPlan
from guava_nb.training.step_accounting import StepAccounting
from guava_nb.wire_formats.held_tensors import HeldTensors, largest_count

__all__ = ["ApproximateState", "Kept", "SnapshotsAtWorker", "difference_count"]

# What the orchestrator knows of a state that stays with a worker behind a thin line: its weights, nearly, by short messages.


class ApproximateState:
    """A whole state that is here, moved by differences of its weights.

    What does not move with it (the optimizer's moments, a loss scale) stays as it was at the base.

    Args:
        number: by which the worker knows the base.
        state: the base, whole; nothing of it is changed.
        model: of the run, for the names of what learns.

    Attributes:
        number: as above.
        left_out: which part of the weights' way since the difference before the last one left out, 0 to 1.
    """

    def __init__(self, number: int, state: Mapping[str, Any], model: nn.Module) -> None:
        """Hold the base."""
        self.number, self.left_out = number, 0.0
        learned = {name for name, one in model.named_parameters(remove_duplicate=False) if one.requires_grad}
        tensors = {name: value for name, value in state["model"].items() if isinstance(value, Tensor)}
        self._held = HeldTensors(tensors, learned)
        self._rest = {**state, "model": {name: value for name, value in state["model"].items() if name not in tensors}}

    @property
    def count(self) -> int:
        """Differences that came."""
        return self._held.count

    @property
    def learned_elements(self) -> int:
        """Elements of the weights that move."""
        return self._held.moving_elements

    def take(self, count: int, parts: Mapping[str, Any], left_out: float) -> None:
        """Take a difference, of so many elements of each 4,096, with the schedule of its step.

        Raises:
            RemoteProtocolError: it is none of this state; nothing has changed.
        """
        messages, exact, schedule = parts.get("messages"), parts.get("exact"), parts.get("schedule")
        if not isinstance(messages, list) or not all(_is_message(one) for one in messages):
            raise RemoteProtocolError("a difference came that is no list of messages")
        if not isinstance(exact, dict) or not all(isinstance(one, Tensor) for one in exact.values()):
            raise RemoteProtocolError("a difference came whose other tensors are none")
        rest = self._scheduled(schedule)
        self._held.take(count, messages, exact)
        self._rest, self.left_out = rest, min(1.0, max(0.0, left_out))

    def _scheduled(self, schedule: Any) -> dict[str, Any]:
        """Return the rest of the state with the settings of the optimizer's groups, and the scheduler, of a step."""
        optimizer = self._rest.get("optimizer")
        groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
        came = schedule.get("groups") if isinstance(schedule, dict) else None
        if not isinstance(came, list) or not all(isinstance(one, dict) for one in came):
            raise RemoteProtocolError("a difference came without its schedule")
        rest = {**self._rest, "scheduler": schedule.get("scheduler")}
        if isinstance(groups, list):
            if len(groups) != len(came):
                raise RemoteProtocolError(f"a schedule of {len(came)} groups came, and the optimizer has {len(groups)}")
            merged = [{**old, **new, "params": old["params"]} for old, new in zip(groups, came, strict=True)]
            rest["optimizer"] = {**optimizer, "param_groups": merged}  # type: ignore[dict-item]
        return rest

    def state(self) -> dict[str, Any]:
        """Return it as a whole state."""
        return {**self._rest, "model": {**self._rest["model"], **self._held.tensors()}}


def _is_message(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() == 1


#: An exact state comes here where that takes the line no longer than this; before a rate is known, this one is assumed.
_EXACT_S, _ASSUMED_BYTES_S = 10.0, 1e6
#: Bytes of a transfer from which its time tells a rate.
_TELLING_BYTES = 256 << 10
#: Differences take so many bytes of an element and step: 124 million parameters and 2,000 steps, 55 MB.
_BYTES_A_STEP = 2.2e-4
#: Elements of each 4,096 that are worth a message, since those of long ones cost less each; and the most.
_WORTH, _MOST = 512, 1024
#: Seconds after which a shorter message goes all the same.
_LONGEST_S = 300.0
#: A copy of the weights at a worker takes no longer.
_BASE_S = 120.0


def difference_count(elements: int, steps: int, seconds: float) -> int:
    """Return how many of each 4,096 elements a difference sends that many steps after the last one; 0: it waits for the next.

    Args:
        elements: that learn.
        steps: since the last one.
        seconds: from the last one to the next.
    """
    count = largest_count(elements, _BYTES_A_STEP * elements * steps, _MOST)
    return count if count >= _WORTH or seconds >= _LONGEST_S else 0


class Kept(NamedTuple):
    """A state on a worker's disk, and where the run stands with it."""

    state: StateOnDisk
    snapshot: Snapshot


class SnapshotsAtWorker:
    """What a lone worker is told to keep of a run's state, and what is known here of it.

    Args:
        job, replica_set, plan, accounting: of the run.
        clock: monotonic seconds.

    Attributes:
        approximate: the weights that are here beside the exact snapshot; None before they have a base.
        at: the snapshot that these weights make; None while they are the base.
    """

    def __init__(
        self, job: Job, replica_set: ReplicaSet, plan: TrainingPlan, accounting: StepAccounting,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Nothing is kept."""
        self._job, self._replica_set, self._plan, self._accounting = job, replica_set, plan, accounting
        self._clock = clock
        self._rate: float | None = None
        self._lines: dict[int, Callable[[], float | None]] = {}
        self._exact_bytes = 0
        self._refused = ""
        self._has_told = False
        self._has_room = True  # in memory, here and there, for a copy of the weights
        self.forget()

    def forget(self, but: Kept | None = None) -> None:
        """The run goes back: what was kept may be of steps that are done anew, but for the state that it goes back to."""
        self._known, self._asked = but, None
        if but is None or (self.at is not None and self.at.step > but.snapshot.step):
            self.approximate: ApproximateState | None = None
            self.at: Snapshot | None = None
        self._sent_step, self._sent_at = self._replica_set.step, self._clock()
        self._exact_next = self._is_base_lost = False

    _known: Kept | None
    _asked: Kept | None
    at: Snapshot | None = None

    # ------------------------------------------------------------------------------------------------------ which way

    @property
    def is_forced(self) -> bool:
        """Whether the user wants them at the worker, however fast the line is."""
        return self._plan.snapshot_place == "worker" and self._plan.snapshot_every_steps != 0

    def is_chosen(self) -> bool:
        """Whether snapshots stay at the worker: the line is too thin for exact ones, or the user wants it so."""
        holders = list(self._replica_set.at)
        if not self._may_stay(holders):
            return False
        if self.is_forced or not self._is_long_at(_ASSUMED_BYTES_S):
            return self.is_forced
        return self._is_long_at(self._rate or self._measured(holders[0]) or _ASSUMED_BYTES_S)

    def expect(self, ranks: Collection[int]) -> None:
        """Have the line of these workers, who are about to build the run, measured meanwhile where the choice depends on it."""
        if self._may_stay(ranks) and not self.is_forced and self._is_long_at(_ASSUMED_BYTES_S):
            self._measured(*ranks)

    def _is_long_at(self, rate_bytes_s: float) -> bool:
        """Whether an exact state takes a line of this rate too long."""
        return (self._exact_bytes or 3 * self._replica_set.master.weights_bytes) / rate_bytes_s > _EXACT_S

    def _may_stay(self, holders: Collection[int]) -> bool:
        """Whether snapshots of a run may stay with the workers that hold its state: with one, where nothing speaks against it."""
        spec, members = self._replica_set.spec, self._job.cluster.roster.members
        by_time = self._plan.snapshot_every_steps is None and self._plan.budget is None
        is_wanted = self.is_forced or (by_time and self._plan.snapshot_place == "auto")
        if self._refused or not is_wanted or not self._replica_set.elastic:
            return False
        if spec.parallel is not None or spec.optimizer_site != "workers":
            return False
        return len(holders) == 1 and not any(members[rank].hello.own for rank in holders)

    def _measured(self, rank: int) -> float | None:
        """Return the rate of a worker's line up, in bytes a second; it is measured once, None until that has come."""
        if rank not in self._lines:
            self._lines[rank] = begin_measuring(self._job, rank)
        return self._lines[rank]()

    def wants_base(self) -> bool:
        """Whether the worker shall hold the weights of now as the base of differences: they are exact here."""
        replica_set = self._replica_set
        is_here = replica_set.master_step == replica_set.step
        return is_here and self._has_room and (self.approximate is None or self._is_base_lost) and self.is_chosen()

    def set_base(self) -> None:
        """Have the worker hold the weights of now, which are here too, with no step in flight."""
        if not self.wants_base():  # steps were in flight
            return
        self._has_room = 2 * self._replica_set.master.weights_bytes < psutil.virtual_memory().available / 2
        if not self._has_room:
            return
        number = _number()
        copy = self._replica_set.ask_for_copy(self._job, SaveState(base=number), whole=False)
        if copy is None:
            return
        here = self._job.ready | self._job.suspects
        self._job.pump(lambda: copy.is_over(lambda rank: rank not in here), _BASE_S)
        if copy.is_whole and copy.saved is not None and copy.saved.held == 0:
            self._hold(number, self._replica_set.master.state())
        elif copy.is_over(lambda rank: False):  # it has no room; the exact ones come here from time to time
            self._has_room = False

    def _hold(self, number: int, state: dict[str, object]) -> None:
        self.approximate = ApproximateState(number, state, self._replica_set.master.model)
        self.at, self._sent_step, self._sent_at = None, self._replica_set.step, self._clock()
        self._is_base_lost = False

    # ---------------------------------------------------------------------------------------------------- ask and take

    def order(self, period_s: float) -> tuple[SaveState, bool]:
        """Return what the worker shall do with the state of the last committed step, and whether that comes here too.

        Args:
            period_s: until the next one.
        """
        self._tell()
        number, known = _number(), 0 if self._known is None else self._known.state.number
        held = self.approximate
        if held is None or self._is_base_lost:  # an exact one is needed, after one more on the disk
            whole, self._exact_next = self._exact_next, True
            return SaveState(number, known, base=number if whole and self._has_room else 0), whole
        steps = self._replica_set.step - self._sent_step
        count = difference_count(held.learned_elements, steps, self._clock() - self._sent_at + period_s)
        return SaveState(number, known, held.number, held.count, count), False

    def _tell(self) -> None:
        """Tell once that the snapshots stay there, where the user has not chosen it."""
        if self.is_forced or self._has_told:
            return
        self._has_told, nbytes = True, self._exact_bytes or 3 * self._replica_set.master.weights_bytes
        names = " and ".join(map(self._job.cluster.name, sorted(self._replica_set.at)))
        self._job.cluster.notice(
            f"{names} keeps the run's snapshots on its own disk, since one takes {show_bytes(nbytes)} and its line is thin: "
            "another process of that machine goes on from there exactly, and without the disk the run goes on from approximate "
            "weights (snapshot_place='orchestrator' brings each one here)"
        )

    def asked(self, copy: StateCopy, snapshot: Snapshot) -> None:
        """Note what was asked for: from now on it may lie there, whether or not the answer comes."""
        if copy.save is not None:
            self._asked = Kept(StateOnDisk(copy.save.number, copy.step, copy.ticks), snapshot)

    def took_exact(self, copy: StateCopy, seconds: float, state: dict[str, object]) -> None:
        """Take note of an exact snapshot that came in so many seconds; it may be the base of differences."""
        self._exact_bytes = copy.nbytes
        self._note_rate(copy.nbytes, seconds)
        self._exact_next = False
        if copy.save is not None and copy.saved is not None and copy.saved.held == 0:
            self._hold(copy.save.base, state)
            self._sent_step = copy.step

    def took(self, copy: StateCopy, seconds: float) -> None:
        """Take what came of an order after so many seconds."""
        saved, order, asked, self._asked = copy.saved, copy.save, self._asked, None
        if saved is None or order is None or asked is None:  # an older worker, which knows no such order
            self._refuse("it runs a version of guava-nb that keeps none")
            return
        if saved.problem:
            self._refuse(saved.problem)
        elif saved.digest:
            self._known = Kept(asked.state._replace(digest=saved.digest), asked.snapshot)
            self._exact_bytes = max(0, saved.nbytes)
        if not copy.whole and order.base:
            self._take_difference(copy, order, asked.snapshot)
        if not copy.whole:
            self._note_rate(copy.nbytes, seconds - saved.seconds if 0 < saved.seconds < seconds else seconds)

    def _take_difference(self, copy: StateCopy, order: SaveState, snapshot: Snapshot) -> None:
        assert copy.saved is not None and self.approximate is not None
        if copy.saved.held != order.held:  # another worker, or a state of before: what is here stays here
            self._is_base_lost = True
            return
        if not order.count:
            return
        try:
            self.approximate.take(order.count, copy.parts()[0], copy.saved.left_out)
        except RemoteProtocolError as error:
            self._refuse(f"its difference cannot be taken: {error}")
            return
        self.at, self._sent_step, self._sent_at = snapshot, copy.step, self._clock()

    def _note_rate(self, nbytes: int, seconds: float) -> None:
        if nbytes >= _TELLING_BYTES:
            rate = nbytes / max(seconds, 1e-3)
            self._rate = rate if self._rate is None else (self._rate + rate) / 2

    def _refuse(self, why: str) -> None:
        if not self._refused:
            names = " and ".join(map(self._job.cluster.name, sorted(self._replica_set.at)))
            nbytes = show_bytes(self._exact_bytes or 3 * self._replica_set.master.weights_bytes)
            self._job.cluster.notice(
                f"{names} keeps no snapshots on its disk: {why}. They come here instead, about {nbytes} each"
            )
        self._refused = why

    # ------------------------------------------------------------------------------------------------ after a loss

    @property
    def step_on_disk(self) -> int | None:
        """The newest step whose state is known to lie on a worker's disk; None: none is. From any thread."""
        known = self._known  # looked at once: the job may forget it meanwhile
        return None if known is None else known.state.step

    def on_disk(self) -> list[StateOnDisk]:
        """Return the states that a worker may find on its disk and that are newer than the snapshot here, the newest first."""
        found = [one.state for one in (self._asked, self._known) if one is not None]
        return [state for state in found if state.step > self._accounting.snapshot.step]

    def kept(self, state: StateOnDisk) -> Kept:
        """Return where the run stands with a state of `on_disk`."""
        return next(one for one in (self._asked, self._known) if one is not None and one.state == state)

    def way_on(self) -> str:
        """Say from where the run goes on with a worker that has nothing of it, and with one on the machine that was lost."""
        nth, snapshot, states = self._replica_set.nth, self._accounting.snapshot, self.on_disk()
        is_near = self.at is not None and self.at.step > snapshot.step
        here = (
            f"approximate weights after {nth(self.at.step)}" if is_near and self.at is not None else nth(snapshot.step)
        )
        return here + (
            f" (on the machine that was lost exactly, from {nth(states[-1].step)} or later)" if states else ""
        )

    def newest(self) -> tuple[Snapshot, float] | None:
        """Return approximate weights as a snapshot, and what their last difference left out; None: what is here is as new."""
        if self.at is None or self.approximate is None or self.at.step <= self._accounting.snapshot.step:
            return None
        replica_set = self._replica_set
        name = f"approximate weights after {replica_set.nth(self.at.step)} of {replica_set.run_id}"
        made = Snapshot(self.at.step, self.at.position, Beginning(name, None, self.approximate.state()))
        return made, self.approximate.left_out


def _number() -> int:
    """Return a number that means nothing in another process of the orchestrator."""
    return 1 + secrets.randbits(52)
