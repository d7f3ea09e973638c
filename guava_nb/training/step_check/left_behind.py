"""What workers do not have alike, because some made a forward less than others or came later; told, once each.

Knows which names a check found that each forward changes, and how batches are shared out; asks no worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.split import share_ranges
from guava_nb.protocol.messages import ParallelSpec
from guava_nb.training.membership import Membership
from guava_nb.training.plan import TrainingPlan
from guava_nb.training.run import Run

__all__ = ["LeftBehind"]

#: Names that a message has.
_MOST_NAMES = 3


class LeftBehind:
    """Looks at each step for workers that stay behind others.

    Args:
        members, plan, run: of the run.
    """

    def __init__(self, members: Membership, plan: TrainingPlan, run: Run) -> None:
        """Nothing is known yet."""
        self._members, self._plan, self._run = members, plan, run
        self._kept, self._buffers = dict[str, None](), dict[str, None]()
        self._idle = self._between = ""
        self._has_told_idle = self._has_told_between = self._has_told_change = False
        self._team: tuple[Sequence[int], int] | None = None  # with the generation of its group

    def note(self, kept: Iterable[str], buffers: Iterable[str]) -> None:
        """Remember what each forward changes: names that are `kept` in Python, and of buffers, statistics left out."""
        self._kept |= dict.fromkeys(kept)
        self._buffers |= dict.fromkeys(buffers)
        self._tell_idle()

    def look(self, group: Sequence[LoadedBatch], step: int) -> None:
        """Look at the batches of a step, from 0, that is about to be issued."""
        self._look_for_idle(group, step)
        self._look_at_team(step)

    def _look_for_idle(self, group: Sequence[LoadedBatch], step: int) -> None:
        """Note where a worker gets no sample, and so misses what each forward changes; tell once."""
        replicas, team = self._members.replica_set, self._members.available()
        shape = replicas.spec.parallel or ParallelSpec()
        # A replica of several ranks is given its samples together.
        weights = [weight for weight in self._plan.weights(team)[:: shape.pp * shape.tp] if weight > 0]
        if len(weights) < 2 or replicas.spec.rounds is not None:
            return
        idle = [[start == stop for start, stop in share_ranges(batch.rows, weights)] for batch in group]
        # With ZeRO 2 and 3, say, it makes a forward of some other sample, for the others wait for it. Buffers go back after.
        is_stood_in = shape.zero_stage >= 2 or shape.gather or replicas.spec.sync_batchnorm
        if not (self._idle or is_stood_in) and all(map(any, idle)):
            self._idle = f"step {step + 1} has {max(batch.rows for batch in group)} samples for {len(weights)} workers"
        if not self._between and any(a and not b for one in zip(*idle, strict=True) for a, b in pairwise(one)):
            rows = " and ".join(str(batch.rows) for batch in group)
            self._between = f"step {step + 1} has batches of {rows} samples for {len(weights)} workers"
        self._tell_idle()

    def _tell_idle(self) -> None:
        if self._kept and self._idle and not self._has_told_idle:
            self._has_told_idle = True
            self._members.cluster.notice(
                f"{self._idle}: those without a sample make no forward, so {_shown(self._kept)}, which each forward "
                "changes, stays behind there, and what depends on it comes to other numbers than plain PyTorch. Leave such a "
                "batch out (drop_last=True), or keep in a buffer (self.register_buffer) what is no parameter"
            )
        if self._buffers and self._between and not self._has_told_between:
            self._has_told_between = True
            self._members.cluster.notice(
                f"{self._between}: one without a sample of a batch makes no forward of it, so {_shown(self._buffers)}, which "
                "each forward changes, is behind there for the later batches of that step. Where a forward makes something of "
                "it, that comes to other numbers than plain PyTorch: give each batch at least as many samples as there are "
                "workers"
            )

    def _look_at_team(self, step: int) -> None:
        """Tell once what workers keep in Python and do not have alike any more: some came, or did a step more than once."""
        replicas, before = self._members.replica_set, self._team
        ranks = list(getattr(replicas, "team", ())) or sorted(self._members.available())
        self._team = ranks, getattr(replicas, "generation", 0)
        # Where nothing is left of what was done, all begin with the same.
        is_new = before is not None and self._team != before and (self._run.history or {*ranks} & {*before[0]})
        names = self._kept or dict.fromkeys(name.strip("()") for name in replicas.kept)
        if not is_new or not names or self._has_told_change:
            return
        self._has_told_change = True
        self._members.cluster.notice(
            f"{_shown(names)}, which each forward changes outside parameters and buffers, is not alike on all workers "
            f"from step {step + 1} on, since workers came or were lost: one that builds the model anew begins it anew, and "
            "one that did another's part, or a step again, changed it twice. What depends on it comes to other numbers than "
            "plain PyTorch: keep it in a buffer (self.register_buffer)"
        )


def _shown(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:_MOST_NAMES])
