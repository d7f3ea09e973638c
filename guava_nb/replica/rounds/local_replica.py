"""One replica that takes several optimizer steps of its own between two exchanges.

A round is one step of the machine around it. Its shard is a piece of each of H loader batches; its forward and backward are
H steps of the user's own optimizer and schedule on these pieces; its gradient is the *pseudo-gradient*, the weights at the
round's start less those at its end, weighted by samples. Applying the sum of these is the outer step (local SGD, Stich 2018,
arXiv 1805.09767; DiLoCo, Douillard et al. 2023, arXiv 2311.08105). Until then everything here stands as at the round's start.

With `sync_delay` the next round begins where this one ended here, and after so many steps the common weights are mixed in
(delayed averaging, Zhou et al. 2020, arXiv 2006.00441; with `mixing` Streaming DiLoCo, Douillard et al. 2025, arXiv 2501.18512,
of one fragment). So these steps need nothing that is still on its way, and `begin_early` may take them meanwhile; when they are
taken changes no number.

With `partial` messages have the largest elements of the pseudo-gradient only, and a round begins with the common weights plus
what messages left out so far of this worker's pseudo-gradient. A message is not weighted by samples: all get the mean of an
element over those workers that sent it.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from guava_nb.errors import LocalProtocolError, TrainingError
from guava_nb.hub.bucket_sum import is_finite
from guava_nb.outer_methods.outer_methods import OUTER_METHODS, OuterMethod, mixed, pseudo_gradient
from guava_nb.parallel.replicas.gather_batch import Gather, refusing
from guava_nb.protocol.messages import Commit, RunSpec
from guava_nb.replica.base_replica import Buckets, explained, pick
from guava_nb.replica.buckets import BUFFERS, Bucket, pack_present
from guava_nb.replica.gradient_buckets import OnBucket
from guava_nb.replica.replica import Replica
from guava_nb.replica.rounds.round_end import FirstSteps, RoundEnd
from guava_nb.replica.shard import LaunchedShard, ShardResult, ShardWork, rows_of_parts
from guava_nb.replica.state_dict import plain
from guava_nb.spec.factories import Resolve

__all__ = ["LocalReplica", "whole_replica"]

_LOCAL = "in a run with sync='local' each worker takes its steps on its own samples, so no batch can be gathered: use sync='step'"


def whole_replica(spec: RunSpec, resolve: Resolve, device: torch.device, model: nn.Module | None = None) -> Replica:
    """Return the replica of a whole model that a run's record asks for; arguments and errors as of `Replica`."""
    return (Replica if spec.rounds is None else LocalReplica)(spec, resolve, device, model)


class LocalReplica(Replica):
    """A whole model that is trained in rounds of local steps. See the module's text.

    Attributes:
        steps: optimizer steps of all committed rounds.
    """

    def __init__(self, spec: RunSpec, resolve: Resolve, device: torch.device, model: nn.Module | None = None) -> None:
        """Build everything a run's record describes; arguments and errors as of `Replica`."""
        super().__init__(spec, resolve, device, model)
        assert spec.rounds is not None
        self.steps = 0
        self._undo = None  # a round that fails is undone as a whole
        rounds, known = spec.rounds, OUTER_METHODS[spec.rounds.outer]
        self._delay, self._mixing = rounds.sync_delay, rounds.mixing
        self._method = replace(known, learning_rate=rounds.outer_lr, momentum=rounds.outer_momentum)
        self._momentum: dict[str, Tensor] = {}  # of the outer step, by parameter
        self._after: RoundEnd | None = None  # of the open round
        self._away: RoundEnd | None = None  # of the last committed one, where the next one begins there
        self._early: FirstSteps | None = None
        self._own: dict[int, tuple[bytes, Tensor]] = {}  # what a lone worker's round came to

    # ----------------------------------------------------------------------------------------------------- a round's shard

    def launch_shard(self, work: ShardWork, on_bucket: OnBucket | None = None, gates: bool = False) -> LaunchedShard:
        """Take the steps of a round, and hand over how far they went; see `Replica.launch_shard`.

        A second shard of the same round, whose worker was lost, begins where the first one began.

        Raises:
            TrainingError: what the optimizer or the schedule keeps cannot be copied; else as `Replica.launch_shard`.
        """
        started, early = time.monotonic(), self._taken_early(work)
        common, saved = self._weights(), self._buffers.saved
        start = self._kept_inner() if early is None else self._held_inner()
        self._is_shared = work.rows != work.global_rows
        changes: dict[int, tuple[bytes, Tensor]] = {}
        try:
            begun = self._begun(common)
            early, first = self._come_to_mixing(work, early, begun, saved)
            results = [] if early is None else early.results
            result = _together([*results, *self._take_steps(work, first, work.num_steps, self.steps)], work)
            after = self._round_end(work, goes_on=self._delay > 0 and on_bucket is not None)
            if result.finite:
                changes = self._changes(begun, saved, work.rows / work.global_rows, shared=on_bucket is not None)
        finally:
            self._go_back(common, saved, start)
        self._after = self._after or after
        if on_bucket is None:
            self._own, result = changes, self._checked_changes(changes, result)
        else:
            for number, (present, flat) in changes.items():
                on_bucket(number, present, flat)
            result = replace(result, owed=self._owed(changes))
        result = _timed(result, time.monotonic() - started, 0.0 if early is None else early.seconds)
        return LaunchedShard(lambda: result)

    def _take_steps(self, work: ShardWork, first: int, last: int, before: int) -> list[ShardResult]:
        """Take the steps of a round from `first` to before `last`, with so many in the rounds before; return what they came to.

        Where this worker has no samples of a step, only its schedule moves.
        """
        rows, each, launched = rows_of_parts(work), work.local_batches, list[LaunchedShard]()
        for number in range(first * each, last * each):
            places = [i for i, batch in enumerate(work.part_steps) if batch == number and rows[i]]
            if places:
                counts, step = [rows[i] for i in places], before * each + number
                inner = ShardWork(
                    step, work.shard, [work.parts[i] for i in places], sum(counts), sum(counts), counts, work.is_cut,
                    [work.axes[i] for i in places] if work.axes and not work.is_cut else (),
                )  # fmt: skip
                one = super().launch_shard(inner, None, gates=True)
                self._step_or_undo(None, one.factor, step)
                launched.append(one)
            if (number + 1) % each == 0:
                self._move_schedule()
        return [one.read() for one in launched]

    def _begun(self, common: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights with which a round begins, and have them in the model: the common ones less what was kept back here.

        Args:
            common: the committed weights, of their shapes, by name; returned as they are where nothing was kept back.
        """
        rests = {bucket: self.wire.rest(bucket.index) for bucket in self.layout.buckets if self._method.keeps_rest}
        if not any(rest is not None for rest in rests.values()):
            return common
        with torch.no_grad():
            for bucket, rest in rests.items():
                if rest is not None:
                    for name, part in zip(bucket.names, bucket.views(rest.to(self.device)), strict=True):
                        self._named[name].sub_(part)
        return self._weights()

    # ------------------------------------------------------------------------------- the steps before the common weights

    @property
    def can_begin_early(self) -> bool:
        """Whether the next round may begin before the sum of the open one, whose shard was done here, has come."""
        return self._after is not None and self._after.weights is not None and self._early is None

    def begin_early(self, work: ShardWork) -> float:
        """Take the first steps of the next round's shard, and leave all here as it was; `launch_shard` goes on from there.

        Returns:
            Seconds of forward.

        Raises:
            Exception: as `launch_shard`; what was done of the open round stands.
        """
        assert self._after is not None
        started, end = time.monotonic(), self._after
        common, saved, start = self._weights(), self._buffers.saved, self._held_inner()
        self._is_shared = work.rows != work.global_rows
        try:
            self._put_inner(self._copied(end.inner))
            early = self._first_steps(work, end, self.steps + end.num_steps)
            early = replace(early, weights=self._weights(), inner=self._held_inner())
        finally:
            self._go_back(common, saved, start)
        self._early = replace(early, seconds=time.monotonic() - started)
        return sum(one.forward_s for one in early.results)

    def _taken_early(self, work: ShardWork) -> FirstSteps | None:
        """Return the steps that were taken of a shard already; those of another attempt are forgotten."""
        early = self._early
        if early is None or early.asked[1] != work.step:  # another worker's shard of the open round
            return None
        self._early = None
        return early if early.asked == _asked(work) and early.begun_at is self._away else None

    def _come_to_mixing(
        self, work: ShardWork, early: FirstSteps | None, begun: Mapping[str, Tensor], saved: list[Tensor]
    ) -> tuple[FirstSteps | None, int]:
        """Take the first steps where they were not taken, and mix in what the round begins with.

        Args:
            work: the round's shard.
            early: the first steps, where they were taken already.
            begun: the weights with which the round begins, of their shapes, by name.
            saved: the committed buffers.

        Returns:
            The first steps and their number; None and 0 where the last round left nothing here.
        """
        if self._away is None:  # nothing was done before
            return None, 0
        if early is None:
            early = self._first_steps(work, self._away, self.steps)
        else:
            self._put_inner(early.inner)
        own = self._named if early.weights is None else early.weights
        with torch.no_grad():
            for name, sent in (self._away.weights or {}).items():
                self._named[name].copy_(mixed(own[name], sent, begun[name], self._mixing))
        self._buffers.reopen(saved)
        self._buffers.write_committed()
        if early.moved is not None:
            self._buffers.adopt(*early.moved)
        return early, self._num_before(work)

    def _first_steps(self, work: ShardWork, end: RoundEnd, before: int) -> FirstSteps:
        """Take a round's steps before the common weights are mixed in, from the end of the one before."""
        with torch.no_grad():
            for name, value in (end.weights or {}).items():
                self._named[name].copy_(value)
        self._buffers.reopen(end.buffers)
        self._buffers.write_committed()
        results = self._take_steps(work, 0, self._num_before(work), before)
        self._buffers.reopen(end.buffers)
        moved = None if self.layout.buffers is None else self._buffers.flatten()
        return FirstSteps(_asked(work), end, results, moved)

    def _num_before(self, work: ShardWork) -> int:
        """Return how many steps of a round come before the common weights are mixed in: one at least comes after."""
        return min(self._delay, work.num_steps - 1)

    def _round_end(self, work: ShardWork, goes_on: bool) -> RoundEnd:
        names = [name for bucket in self.layout.buckets for name in bucket.names] if goes_on else []
        weights = {name: self._named[name].detach().clone() for name in names} if goes_on else None
        return RoundEnd(self._held_inner(), work.num_steps, weights, self._buffers.saved)

    def _move_schedule(self) -> None:
        if self._schedule is not None:
            with warnings.catch_warnings():  # torch misses the optimizer's step where this worker had no samples
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                self._schedule.on_step()

    def _gather(self, work: ShardWork) -> Gather | None:
        return refusing(_LOCAL) if self._is_shared else super()._gather(work)

    def _changes(
        self, weights: Mapping[str, Tensor], saved: list[Tensor], part: float, shared: bool
    ) -> dict[int, tuple[bytes, Tensor]]:
        """Return, by bucket, presence bits and how far the weights went, `[numel]` in the wire dtype; and the buffers' changes.

        Args:
            weights: those with which the round began, by name.
            saved: the committed buffers.
            part: this shard's part of the samples, a factor of what is added up.
            shared: other workers get it: on the CPU, and checked. Else what earlier messages left out is added.
        """
        if shared:
            self._watch.check()
            self._switches.frozen()
            self._buffers.refuse_resized(shared=True)
            self._buffers.refuse_unfollowed()
        changes = {}
        with torch.no_grad():
            for bucket in self.layout.buckets:
                pairs = [(weights[name], self._named[name]) for name in bucket.names]
                parts = [pseudo_gradient(start, end).reshape(-1) for start, end in pairs]
                flat = _joined(parts)
                if not (self._method.keeps_rest and bucket.wire_format):
                    flat.mul_(part)
                flat = flat.cpu() if shared else self.wire.settle(bucket.index, flat)
                changes[bucket.index] = (pack_present([True] * len(parts)), flat)
        if self.layout.buffers is not None:
            self._buffers.reopen(saved)
            changes[BUFFERS] = self._buffers.flatten()
        return changes

    def _checked_changes(self, changes: Buckets, result: ShardResult) -> ShardResult:
        """Look for what is not finite in the weights that a lone worker would take: they are checked nowhere else."""
        for number, (present, flat) in changes.items():
            if not is_finite(flat):
                name = self.layout.bucket(number).not_finite(flat, present)[0]
                return replace(result, finite=False, nonfinite=name)
        return result

    def _owed(self, changes: Buckets) -> float | None:
        if self.wire.is_exact:
            return None
        way = math.hypot(*(float(flat.norm()) for number, (_, flat) in changes.items() if number != BUFFERS))
        return self.wire.owed_norm() / way if way else None

    # ------------------------------------------------------------------------------------------------- the round's start

    @property
    def _inner(self) -> list[Any]:
        return [one for one in (self.optimizer, self.scheduler) if one is not None]

    def _weights(self) -> dict[str, Tensor]:
        """Return copies of the parameters, each of its shape, by name."""
        return {name: parameter.detach().clone() for name, parameter in self._named.items()}

    def _held_inner(self) -> list[dict[str, Any]]:
        """Return what the optimizer and the schedule keep, not copied."""
        return [dict(vars(one)) for one in self._inner]

    def _kept_inner(self) -> list[dict[str, Any]]:
        """Copy what the optimizer and the schedule keep; the parameters themselves are not copied."""
        return self._copied([vars(one) for one in self._inner])

    def _copied(self, values: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        memo: dict[int, Any] = {id(one): one for one in (*self.model.parameters(), *self._inner)}
        try:
            return [copy.deepcopy(kept, memo) for kept in values]
        except Exception as error:  # of the user's own classes
            raise TrainingError(
                f"{' or '.join(type(one).__name__ for one in self._inner)} keeps what cannot be copied ({error}), and with "
                "sync='local' a round that is not committed must be undone: keep tensors and plain data in it, or use sync='step'"
            ) from error

    def _put_inner(self, values: Sequence[dict[str, Any]]) -> None:
        for one, kept in zip(self._inner, values, strict=True):
            vars(one).clear()
            vars(one).update(kept)

    def _go_back(self, weights: Mapping[str, Tensor], saved: list[Tensor], start: Sequence[dict[str, Any]]) -> None:
        """Put weights and buffers, of their shapes, optimizer and schedule back to the round's start."""
        self._put_inner(start)
        with torch.no_grad():
            for name, value in weights.items():
                self._named[name].copy_(value)
        self._drop_gradients()
        self._buffers.reopen(saved)
        self._buffers.restore()

    # -------------------------------------------------------------------------------------------------- commit or abort

    def apply(self, sums: Buckets | None, commit: Commit, step: int = 0) -> None:
        """Take the outer step, and end the round; see `BaseReplica.apply`.

        Args:
            sums: the mean pseudo-gradient and what became of the buffers; None takes this worker's own, of a lone one.
            commit: `steps` of the round, and whether it counts; its scale is that of losses, and is not used here.
            step: number of the round.

        Raises:
            LocalProtocolError: a bucket is missing or has another size.
            ApplyFailed: the user's schedule raised on a worker without samples of the round.
        """
        if commit.skip:
            self.restore()
            return
        method, sums, after = self._outer_method(is_lone=not sums), sums or self._own, self._after
        if not sums:
            raise LocalProtocolError("a round was committed of which nothing came")
        self._buffers.begin_step()
        for bucket in self.layout.buckets:
            self._take_outer_step(method, bucket, pick(sums, bucket.index)[1].to(self.device))
        self._adopt_buffers(sums)
        self._finish_step(sums)
        self._after, self._own = None, {}
        self.steps += commit.steps
        self._away = None if after is None or after.weights is None else after
        if after is not None:
            self._put_inner(after.inner)
        else:
            for _ in range(commit.steps):
                self._advance_schedule()

    def _outer_method(self, is_lone: bool) -> OuterMethod:
        """Return the outer method of a round: a lone worker leaves nothing out for which a longer step could stand in."""
        return replace(self._method, learning_rate=1.0) if is_lone and self._method.keeps_rest else self._method

    @torch.no_grad()
    def _take_outer_step(self, method: OuterMethod, bucket: Bucket, mean: Tensor) -> None:
        """Step a bucket's parameters with the mean of the pseudo-gradients, `[numel]`."""
        parameters = [self._named[name] for name in bucket.names]
        before = _joined([parameter.detach().reshape(-1).to(bucket.dtype) for parameter in parameters])
        kept = [self._momentum[name].reshape(-1) for name in bucket.names if name in self._momentum]
        known = _joined(kept) if len(kept) == len(bucket.names) else None
        after, momentum = method.step(before, mean, known)
        for parameter, view in zip(parameters, bucket.views(after), strict=True):
            parameter.copy_(view)
        if momentum is not None:
            self._momentum.update(zip(bucket.names, bucket.views(momentum), strict=True))

    def _advance_schedule(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            super()._advance_schedule()

    @property
    def can_apply_ahead(self) -> bool:
        """No: a round's end is not known before its steps are over."""
        return False

    def stand_in(self, step: int) -> None:
        """Do nothing: what forwards change of parameters is in the pseudo-gradient."""

    def restore(self) -> None:
        """Forget the open round."""
        super().restore()
        self._after, self._early, self._own = None, None, {}

    # ------------------------------------------------------------------------------------------------------------ state

    def state(self, model: bool = True, optimizer: bool = True) -> dict[str, Any]:
        """Return the state at the end of the last round; "outer", with the optimizer, is that of the outer step.

        Weights are the common ones: who loads them begins the next round there.
        """
        state = super().state(model, optimizer)
        if optimizer:
            state["outer"] = {"steps": self.steps, "momentum": plain(self._momentum, "outer")}
        return state

    def own_part(self) -> dict[str, Any]:
        """Return what only this worker has at the end of the last round, as plain data; `load_state` takes it as "own".

        That is what its optimizer and schedule keep, what its messages left out, and where its next round begins.

        Raises:
            CheckpointError: as `state`.
        """
        end = self._away
        away = None if end is None else (end.num_steps, end.weights, end.buffers)
        mine = {"messages": self._messages, "rests": self.wire.rests(), "away": away}
        return {**super().state(model=False), **plain(mine, "own")}

    @property
    def _messages(self) -> str:
        """What must be alike where what messages left out is taken over: buckets and how they travel."""
        rounds, spec = self._spec.rounds, self._spec
        assert rounds is not None
        return f"{self.layout.digest()} {spec.wire} {rounds.outer} {rounds.density} {rounds.bits}"

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Become a whole state, with an own part where "own" has one.

        One of a run that exchanged every step has no outer part, which then begins anew.
        """
        own = state.get("own")
        super().load_state(state if own is None else {**state, **own})
        self._away = None
        if outer := state.get("outer"):
            self.steps = int(outer["steps"])
            with explained("outer"):
                momentum = {name: outer["momentum"][name] for name in self._named if name in outer["momentum"]}
            self._momentum = {name: value.to(self.device, copy=True) for name, value in momentum.items()}
        if own is not None and own["messages"] == self._messages:
            self.wire.take_rests({key: rest.to(self.device, copy=True) for key, rest in own["rests"].items()})
            if own["away"] is not None and self._delay:
                steps, weights, buffers = own["away"]
                begun = {name: value.to(self.device, copy=True) for name, value in weights.items()}
                self._away = RoundEnd([], steps, begun, [value.to(self.device, copy=True) for value in buffers])


# ----------------------------------------------------------------------------------------------------------- functions


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors, `[n]` each, one after another, `[numel]`; a large one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _asked(work: ShardWork) -> tuple[int, int, int]:
    return work.generation, work.step, work.shard


def _timed(result: ShardResult, seconds: float, early_s: float) -> ShardResult:
    """Count all that is no forward as backward: the optimizer's steps too, since they are this worker's work on the shard."""
    return replace(result, backward_s=max(0.0, seconds + early_s - result.forward_s), early_s=early_s)


def _together(results: Sequence[ShardResult], work: ShardWork) -> ShardResult:
    """Return what the steps of a round came to, as of one."""
    bad = next((one for one in results if not one.finite), None)
    tokens = [one.tokens for one in results if one.tokens is not None]
    return ShardResult(
        loss_sum=sum(one.loss_sum for one in results), count=sum(one.count for one in results), rows=work.rows,
        finite=bad is None, nonfinite="" if bad is None else bad.nonfinite, backward_s=0.0,
        forward_s=sum(one.forward_s for one in results), tokens=sum(tokens) if tokens else None,
    )  # fmt: skip
