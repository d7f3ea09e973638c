"""Which step each worker of a run has applied, as far as its reports can be true; pure."""

from __future__ import annotations

from collections.abc import Collection

from guava_nb.protocol.messages import StepApplied
from guava_nb.sync.parameter_hashes import ParameterHashes

__all__ = ["StepsHeld"]


class StepsHeld:
    """What the workers of one run hold, by what they report.

    Attributes:
        at: last committed step of each worker that holds a replica in step with the run.
        step: last committed step of the run, -1 before the first.
        generation_of: generation of each worker's last report of a commit.
    """

    def __init__(self) -> None:
        """No worker holds anything."""
        self.step = -1
        self.at: dict[int, int] = {}
        self.generation_of: dict[int, int] = {}
        self._aborted: dict[int, tuple[int, int]] = {}  # generation of the last abort of each, and the step to end at
        self._sent: dict[int, int] = {}  # the last step that each was sent, or whose state
        # The last step that a lone worker, or ranks that vote, were sent: so far they may be ahead of the run.
        self._ahead_to: dict[int, int] = {}
        self._learning_rates: dict[int, float] = {}
        self._hashes = ParameterHashes()
        self._device_kind: dict[int, str] = {}

    def note_commit(self, rank: int, message: StepApplied) -> str | None:
        """Note that a worker applied a step; one that it cannot have applied is no news.

        Returns:
            A sentence without the worker's name when its parameters differ from others', else None.
        """
        if rank not in self.at or not (self._has_undone(rank, message) or self._goes_on(rank, message.step)):
            return None
        self.at[rank] = message.step
        # The report of a step that was committed before an abort comes after the answer to the abort.
        self.generation_of[rank] = max(message.generation, self.generation_of.get(rank, -1))
        self.note_rate(message.step, message.learning_rate)
        if not message.parameter_hash:
            return None
        kind = self.kind_of(rank)
        if not self._hashes.differs(message.step, kind, message.parameter_hash, rank):
            return None
        return f"parameters differ after step {message.step} from those of other workers of the same kind ({kind})"

    def kind_of(self, rank: int) -> str:
        """Return which kind of device a worker has, and which part of the model."""
        return self._device_kind.get(rank, "")

    def sent(self, ranks: Collection[int], step: int, is_applied_first: bool) -> None:
        """Note that workers were sent a step; `is_applied_first`: they may apply it before it is committed here."""
        self._sent.update(dict.fromkeys(ranks, step))
        if is_applied_first:
            self._ahead_to = dict.fromkeys(ranks, step)

    def _may_hold(self, rank: int, step: int) -> bool:
        """Whether a worker can have applied a step: it was sent it, and it was committed or may be applied before that."""
        if step > max(self.at.get(rank, -1), self._sent.get(rank, -1)):
            return False
        return step <= max(self.step, self._ahead_to.get(rank, -1))

    def _goes_on(self, rank: int, step: int) -> bool:
        return self.at[rank] <= step and self._may_hold(rank, step)

    def _has_undone(self, rank: int, message: StepApplied) -> bool:
        """Whether this is a worker's first answer to an abort, and it took back the one step that it should."""
        return self.answers_abort(rank, message) and message.step == self._aborted[rank][1] == self.at[rank] - 1

    def answers_abort(self, rank: int, message: StepApplied) -> bool:
        """Whether this is a worker's first answer to the last abort, which says how far it is."""
        generation, _ = self._aborted.get(rank, (-1, -1))
        return message.generation == generation > self.generation_of.get(rank, -1)

    def has_settled(self, rank: int, has_failed: bool = False) -> bool:
        """Whether a worker has answered the last abort and holds the step to end at, or does not hold the run any more.

        Args:
            has_failed: its code raised, so it may not come so far.
        """
        generation, last = self._aborted.get(rank, (-1, -1))
        if rank not in self.at:
            return True
        return self.generation_of.get(rank, -1) >= generation and (has_failed or self.at[rank] >= last)

    def take_back(self, step: int) -> None:
        """Note that the steps after this one count no more: they were undone where they were applied, or are lost there."""
        self.step = step
        self.at = {rank: at for rank, at in self.at.items() if at <= step}
        self._hashes.clear()
        self._learning_rates.clear()

    def go_back(self, step: int) -> None:
        """Forget who holds what, and what was reported of the steps after this one: they will be done again, by others."""
        self.take_back(step)
        self._ahead_to.clear()
        self.at.clear()
        self._sent.clear()  # a step of the same number that a worker comes back with is another one

    def note_rate(self, step: int, learning_rate: float | None) -> None:
        """Note the learning rate with which a step is taken."""
        if learning_rate is not None:
            self._learning_rates[step] = learning_rate
            self._learning_rates.pop(step - 8, None)

    def learning_rate(self, step: int) -> float | None:
        """Return the learning rate with which a step was taken, None where it is not known yet."""
        return self._learning_rates.get(step)
