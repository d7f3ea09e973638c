"""Whether a batch that is cut into pieces gives what the whole batch gives: loss, gradient, buffers, Python's own state.

Everything is computed on a copy of the model, which is thrown away, so nothing of the run can change: no gradient, no
buffer, no flag, no random state; counters of the user's own code are put back. The pieces go through the same code as
the shards of a step. Knows one replica; knows nothing of other workers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from guava_nb.parallel.replicas.buffer_policy import followed_parameters
from guava_nb.parallel.replicas.gather_batch import Gather
from guava_nb.parallel.tensor.without_randomness import WithoutRandomness
from guava_nb.protocol.messages import Finding, RunSpec
from guava_nb.replica.base_replica import BaseReplica
from guava_nb.replica.buffer_merge import BufferMerge
from guava_nb.replica.model.parameter_writes import ParameterWrites
from guava_nb.replica.objective import Loss, Objective, Observer
from guava_nb.replica.one_step_check.causes import causes_of
from guava_nb.replica.one_step_check.comparisons import Comparisons
from guava_nb.replica.one_step_check.differences import CLEAN, ROUGH, Measured, differ, differences, is_unlike
from guava_nb.replica.one_step_check.fitting_policies import unlike_buffers
from guava_nb.replica.one_step_check.python_state import Kept, PythonState, adopt, is_alike, is_apart
from guava_nb.replica.one_step_check.set_aside import (
    NO_MEMORY,
    copied,
    copying,
    names_kept,
    places_of_streams,
    set_aside,
    state_of_torch,
    uncompiled,
    whole_record,
    with_places,
)  # fmt: skip
from guava_nb.replica.one_step_check.simulated_gather import SimulatedGather, no_process_group
from guava_nb.replica.one_step_check.taken_away import fixed_statistics
from guava_nb.replica.one_step_check.treated_first import Pieces, treated_first, treats_first
from guava_nb.replica.replica import Replica
from guava_nb.replica.rng import seeded
from guava_nb.replica.shard import ShardWork
from guava_nb.spec.factories import Resolve
from guava_nb.spec.own_facts import roots_of
from guava_nb.telemetry.tasks import uncounted

__all__ = ["compare"]

#: Parameters of a larger model are not copied: copy and gradients of it could end the process for lack of memory.
MOST_MODEL_BYTES = 2 << 30
#: Names that are tried one by one.
_MOST_NAMES = 8
_USER_ERRORS = (Exception, SystemExit)



def compare(
    replica: BaseReplica, spec: RunSpec, resolve: Resolve, batches: Sequence[Any], rows: Sequence[int],
    weights: Mapping[str, Any] | None = None,
) -> Finding:  # fmt: skip
    """Compute a batch whole and in pieces; return the finding. Nothing is raised.

    Args:
        replica: of the run; it stays as it is. A rank's part of a model has no whole one, so one is built from the record.
        spec: the run's record.
        resolve: finds shared and importable objects.
        batches: the whole batch, then its pieces.
        rows: samples of each.
        weights: of the model that is built, as `Replica.state` gives them; None: its first ones.
    """
    if sum(bucket.numel * bucket.dtype.itemsize for bucket in replica.layout.buckets) > MOST_MODEL_BYTES:
        return Finding("large")
    whole, pieces = [(batches[0], rows[0])], list(zip(batches[1:], rows[1:], strict=True))
    case, found = _Case(spec, resolve, whole, pieces, weights), Finding("whole failed")
    with seeded(spec.seed, replica.device), uncounted(), no_process_group(), uncompiled():
        for precision in dict.fromkeys(("fp64" if spec.precision == "fp64" else "fp32", spec.precision)):
            found = _attempt(replica, case, precision)
            if found.outcome != "whole failed":
                break
        if found.outcome == "differs" and found.precision != "fp64":
            exact = _attempt(replica, case, "fp64")
            if exact.outcome in ("same", "differs") and exact.precision == "fp64":  # else it casts by itself
                return exact
            rough = max(found.loss_difference, found.gradient_difference) <= ROUGH[found.precision]
            return replace(found, outcome="same", causes=()) if rough and not found.buffers else found
    return found


class _Case(NamedTuple):
    """What `compare` is given."""

    spec: RunSpec
    resolve: Resolve
    whole: Pieces
    pieces: Pieces
    weights: Mapping[str, Any] | None


def _attempt(replica: BaseReplica, case: _Case, precision: str) -> Finding:
    roots, case = roots_of(case.spec, case.resolve).values(), case._replace(resolve=copying(case.resolve))
    with names_kept(roots):
        if isinstance(replica, Replica):
            with set_aside(replica.model) as is_touched:
                found = _try(case, precision, replica, replica.model)
                if not is_touched():
                    return found
        # No whole model is here, or its copy leads back to it (a closure, say): it is built once more.
        return _try(case, precision, replica, None)


def _try(case: _Case, precision: str, replica: BaseReplica, model: nn.Module | None) -> Finding:
    spec, device = case.spec, replica.device
    try:
        twin = copied(model)
        trial = Trial(whole_record(spec, precision), case.resolve, device, twin)
        if twin is None and case.weights is not None:
            trial.load_state(case.weights)
        trial.go_on_from(replica, is_copy=twin is not None)
        with contextlib.ExitStack() as ways:
            whole, pieces = case.whole, case.pieces
            if spec.sync_batchnorm:
                ways.enter_context(trial.fixed_statistics())
            if treats_first(spec):
                whole, pieces = ways.enter_context(treated_first(trial, whole, pieces))
            found = _look(trial, whole, pieces, spec.buffers)
            found = replace(found, precision="bf16" if trial.has_halves else precision)
        if spec.parallel is not None and spec.parallel.zero_stage >= 2:  # between two forwards, parts are written
            found = replace(found, written=trial.written_inside)
        return found
    except NO_MEMORY:
        return Finding("memory", precision=precision)
    except _USER_ERRORS as error:
        return Finding("whole failed", precision=precision, problem=f"{type(error).__name__}: {error}")
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _look(trial: Trial, whole: Pieces, pieces: Pieces, policies: str) -> Finding:
    one = trial.measure(whole)
    counted: dict[str, bool] = {}
    try:
        many = trial.measure(pieces, counted=counted)
    except NO_MEMORY:
        raise
    except _USER_ERRORS as error:
        return Finding("piece failed", problem=f"{type(error).__name__}: {error}")
    if not math.isfinite(one.loss):
        return Finding("whole failed", problem=f"the loss is {one.loss}")
    by_loss, by_gradient, parameter = differences(one, many)
    moved, again = trial.beside_norms(trial.moved_by(one, many)), functools.partial(trial.measure, pieces)
    buffers, fits = unlike_buffers(one, many, moved, policies, counted, again)
    kept, goes_on = trial.kept_by(one, whole, pieces[:1])
    unlike = tuple(name for name in kept if trial.is_unlike(name, one, pieces))
    found = Finding(
        "same", (), (one.loss, many.loss), by_loss, by_gradient, parameter, buffers,
        tuple(sorted(trial.drawn | trial.unruly)), trial.beside_norms(trial.moved_by(one)), kept=kept + goes_on, unlike=unlike,
        kept_looking=trial.moved_looking(kept, one, whole),
        compared=tuple(sorted(trial.compared)), written=trial.written, written_unlike=trial.written_unlike(one, many),
        gradient_norm=one.gradient_norm, fits=fits,
    )  # fmt: skip
    if max(by_loss, by_gradient) > CLEAN:
        return replace(found, outcome="differs", causes=causes_of(trial, whole, pieces, one))
    return replace(found, outcome="differs") if found.buffers or unlike else found


class Trial(Replica):
    """A copy of a run's model that is measured and thrown away.

    Attributes:
        drawn: random functions that were replaced by constants.
        unruly: streams that random numbers were drawn from by other functions.
        compared: whole numbers that targets were compared with.
        has_backward: the user's step or loss called backward by itself.
        has_halves: something was computed in numbers of 16 bits.
    """

    _keeps_graphs = True  # gathered rows go back through a piece after its loss has

    def __init__(self, spec: RunSpec, resolve: Resolve, device: torch.device, model: nn.Module | None) -> None:
        super().__init__(spec, resolve, device, model)
        self.drawn, self.unruly, self.compared, self.has_backward = set[str](), set[str](), set[int](), False
        self._draws = self.has_halves = False
        # Frozen ones that a forward moves are treated as buffers.
        self._writes = ParameterWrites({name: p for name, p in self._named.items() if p.requires_grad})
        self._writes.watch(self.model)
        self._objective = self._watched(self._objective)
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase) and module.dropout:  # it drops below torch's functions
                module.dropout, self.drawn = 0.0, {"dropout"}
        self._gathered, self._streams = SimulatedGather(), set[str]()
        norms = [norm for norm in self.model.modules() if isinstance(norm, _BatchNorm)]
        self._norms = [norm for norm in norms if norm.training or norm.running_mean is None]

    def _watched(self, objective: Objective) -> Objective:
        def measure(
            model: nn.Module, batch: Any, rows: int, want_scores: bool = False, observer: Observer | None = None
        ) -> Loss:
            before, places = [p.grad is None for p in self._named.values()], places_of_streams()
            torchs = state_of_torch(self.device)
            loss = objective(model, batch, rows, want_scores, observer)
            self.unruly.update(name for name, place in places_of_streams().items() if place != places[name])
            self._draws |= state_of_torch(self.device) != torchs
            self.has_backward |= any(
                was and p.grad is not None for was, p in zip(before, self._named.values(), strict=True)
            )
            return loss

        measure.user = getattr(objective, "user", None)  # type: ignore[attr-defined]
        return measure

    def go_on_from(self, replica: BaseReplica, is_copy: bool) -> None:
        """Be as far as a replica is, also where the model is no copy of its own; what is measured begins from here."""
        self._is_staged = replica.is_staged
        if not is_copy and (module := replica.module) is not None:
            adopt(self.model, module)
        for mine, its in zip(self.user_code.values(), replica.user_code.values(), strict=True):
            if isinstance(mine, nn.Module) and isinstance(its, nn.Module):
                adopt(mine, its)
        self._first = {name: value.detach().clone() for name, value in self._followed()}
        self._buffers.save_all()
        self._state = PythonState(with_places(self.model), self.user_code)

    def measure(
        self,
        pieces: Pieces,
        seed: int = 0,
        stale: Set[str] = frozenset(),
        keep: bool = False,
        apart: bool = True,
        policies: str = "",
        counted: dict[str, bool] | None = None,
    ) -> Measured:
        """Return loss, gradients and buffers after a step of these pieces; every piece draws the same random numbers.

        Batches are copied, because user code may write into them.

        Args:
            pieces: of the batch.
            seed: of the random numbers.
            stale: what is kept in Python under these names begins as the measurement before left it, which was told to `keep`.
            keep: let what is kept in Python stay as this measurement leaves it.
            apart: each piece begins with what was kept at first, as on a worker of its own.
            policies: of buffers; "": the run's.
            counted: as of `BufferMerge`; None: nothing was found so far.
        """
        rows = sum(count for _, count in pieces)
        loss_sum = count = 0.0
        bucket, parts, policies = self.layout.buffers, [part for _, part in pieces], policies or self._spec.buffers
        known = {} if counted is None else counted
        merge = None if bucket is None else BufferMerge(bucket, parts, policies, known)
        left, written = [], []
        gradients: dict[str, Tensor] = {}
        try:
            self._state.restore(stale)
            self._gathered.begin(is_whole=len(pieces) == 1)
            with WithoutRandomness() as still, Comparisons(self.compared), self._writes:
                for number, (batch, part) in enumerate(pieces):
                    if number and apart:
                        self._state.restore()
                        self._writes.restore()
                    result = self.run_shard(ShardWork(seed, 0, [copy.deepcopy(batch)], part, rows, (part,)))
                    self._move_gradients(gradients)  # a step that calls zero_grad() takes them from no other worker
                    loss_sum, count = loss_sum + result.loss_sum, count + result.count
                    left.append(self._state.read())
                    self._note_streams(left[-1])
                    written.append(self._writes.values())
                    if merge is not None:
                        present, changes = self._buffers.flatten()
                        merge.add(number, changes, present)
                self._gathered.finish()
            self._move_gradients(gradients)
            self._note_draws(still)
            if merge is not None and bucket is not None:
                self._buffers.adopt(*merge.result(bucket.present_bytes))
            buffers = {name: value.clone() for name, value in self._buffers.committed().items()}
        finally:
            self._drop_gradients()
            self._start_over()
            self._writes.restore()
            if not keep:
                self._state.restore()
        scale = rows / count if count else 1.0
        loss = loss_sum / count if count else math.nan
        return Measured(loss, {n: g * scale for n, g in gradients.items()}, buffers, left, written, count)

    def _note_draws(self, still: WithoutRandomness) -> None:
        self.drawn |= still.drawn
        self.has_halves |= still.has_halves
        if self._draws and not self.drawn:  # by a function that is not known here
            self.unruly.add("torch's random numbers")

    def _note_streams(self, now: Mapping[str, Kept]) -> None:
        streams = self._state.streams()
        self._streams |= streams.keys()
        moved = (name for name in self._state.moved(now) if name in streams)
        self.unruly.update(name for name in moved if not isinstance(streams[name], torch.Generator))

    def _move_gradients(self, gradients: dict[str, Tensor]) -> None:
        """Add the parameters' gradients to these, each of its parameter's shape, and leave none there."""
        for name, parameter in self._named.items():
            if parameter.grad is not None:
                mine = parameter.grad.to_dense() if parameter.grad.layout is not torch.strided else parameter.grad
                gradients[name] = gradients[name] + mine if name in gradients else mine
                parameter.grad = None

    @property
    def written(self) -> tuple[str, ...]:
        """Names of trained parameters that a forward writes into."""
        return self._writes.names

    @property
    def written_inside(self) -> tuple[str, ...]:
        """Those that are written while a module computes, and not by the step around it."""
        return self._writes.inside

    def written_unlike(self, one: Measured, many: Measured) -> tuple[str, ...]:
        """Return those that the pieces, or the last of several on one worker, leave unlike what the whole batch does."""
        pieces = many.written[-1:] if self._is_staged else many.written
        return tuple(
            name for name in self._writes.names
            if any(name not in one.written[-1] or is_unlike(one.written[-1][name], piece.get(name)) for piece in pieces)
        )  # fmt: skip

    def kept_by(self, one: Measured, whole: Pieces, piece: Pieces) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what a measurement left in Python that another one depends on, and what only goes on from itself.

        The latter, a counter say, may matter in a later step. What each forward writes anew counts for nothing.
        """
        moved = [name for name in self._state.moved(one.left[-1]) if name not in self._streams][:_MOST_NAMES]
        found, counted = [], []
        for name in moved:
            self.measure(whole, keep=True)
            again = self.measure(whole, stale={name})
            if differ(one, again):
                found.append(name)
                continue
            fresh = self.measure(piece)  # what one batch leaves may matter to other samples only
            self.measure(whole, keep=True)
            if differ(fresh, self.measure(piece, stale={name})):
                found.append(name)
                continue
            later = self._a_step_later(name, whole)
            if differ(*later):
                found.append(name)
            elif not all(is_alike(a.left[-1][name], b.left[-1].get(name), 0.0) for a, b in ((one, again), later)):
                counted.append(name)
        return tuple(found), tuple(counted)

    def _a_step_later(self, name: str, whole: Pieces) -> tuple[Measured, Measured]:
        """Measure with other weights, without and with what is kept: a copy of the weights shows only where these moved."""
        trained = [p for p in self._named.values() if p.requires_grad]
        before = [parameter.detach().clone() for parameter in trained]

        def move() -> None:
            for parameter in trained:
                parameter.mul_(0.99).add_(0.01)

        def move_back() -> None:
            for parameter, value in zip(trained, before, strict=True):
                parameter.copy_(value)

        try:
            with torch.no_grad():
                move()
            fresh = self.measure(whole)
            with torch.no_grad():
                move_back()
            self.measure(whole, keep=True)
            with torch.no_grad():
                move()
            return fresh, self.measure(whole, stale={name})
        finally:
            with torch.no_grad():
                move_back()

    def moved_looking(self, kept: Sequence[str], one: Measured, whole: Pieces) -> tuple[str, ...]:
        """Return which of these places, and of the buffers that a step moves, a forward of a validation changes too."""
        buffers = self.beside_norms(self.moved_by(one))
        if not kept and not buffers:
            return ()
        self._start_over()
        try:
            self.evaluate(copy.deepcopy(whole[0][0]), whole[0][1])
        except _USER_ERRORS:  # it may be no batch to validate with
            return ()
        moved, live = self._state.moved(self._state.read()), dict(self._followed())
        self._state.restore()
        found = [name for name in kept if name in moved]
        found += [name for name in buffers if name in live and not torch.equal(live[name], self._first[name])]
        self._start_over()
        return tuple(found)

    def is_unlike(self, name: str, one: Measured, pieces: Pieces) -> bool:
        """Whether the pieces leave something else under a name than the whole batch, and not each its own samples' part."""
        many = self.measure(pieces, apart=not self._is_staged)
        left = [kept.get(name, {}) for kept in (many.left[-1:] if self._is_staged else many.left)]
        whole, rough = one.left[-1].get(name, {}), ROUGH["fp32"]
        return not (all(is_alike(whole, kept, rough) for kept in left) or is_apart(whole, left, rough))

    def moved_by(self, *some: Measured) -> tuple[str, ...]:
        """Return the names of buffers that some measurement changed."""
        return tuple(
            name for name, value in self._first.items()
            if any(name in one.buffers and not torch.equal(one.buffers[name], value) for one in some)
        )  # fmt: skip

    def _followed(self) -> list[tuple[str, Tensor]]:
        return [*self.model.named_buffers(), *followed_parameters(self.model)]

    def _start_over(self) -> None:
        with torch.no_grad():
            for name, value in self._followed():
                if name in self._first and value.shape == self._first[name].shape:
                    value.copy_(self._first[name])
        self._buffers.save_all()

    @property
    def has_gathered(self) -> bool:
        """Whether the user's code called `gather_batch`."""
        return bool(self._gathered.whole)

    def _gather(self, work: ShardWork) -> Gather | None:
        self._gathered.begin_piece()
        return self._gathered

    @contextlib.contextmanager
    def fixed_statistics(self) -> Iterator[bool]:
        """Let batch norms use no batch's statistics; gives whether some did."""
        norms, self._norms = self._norms, []
        try:
            with fixed_statistics(norms, next(iter(self._named.values()))) as some:
                yield some
        finally:
            self._norms = norms

    def beside_norms(self, names: Sequence[str]) -> tuple[str, ...]:
        """Leave the buffers of batch norms out."""
        owners = {name for name, module in self.model.named_modules() if isinstance(module, _BatchNorm)}
        return tuple(name for name in names if name.rpartition(".")[0] not in owners)
