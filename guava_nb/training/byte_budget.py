"""The most bytes that a run may send and receive: what is used, what is under way, and whether more has room.

Told what happens and asked before anything is sent; knows no sessions and sends nothing. What is kept in reserve: the state
that must come back for the checkpoint, one more time of everything under way (a connection that breaks sends it again),
and a little for unplanned traffic: acknowledgements, heartbeats, lines that workers print.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guava_nb.config import DistributedConfig
from guava_nb.config.units import parse_bytes, show_bytes
from guava_nb.data.codec import pack
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.loader_wrappers import Unread
from guava_nb.data.sizes import size_of
from guava_nb.errors import ConfigError
from guava_nb.nested import children

__all__ = ["Budget", "BudgetSpent", "Costs", "Limit", "chosen_limit", "slack_bytes"]

#: Kept for unplanned traffic.
_SLACK_BYTES, _SLACK_PER_WORKER = 16 << 10, 8 << 10
#: Estimated sizes may be too small by this factor.
_MARGIN = 1.05
#: Of a batch's record, for every worker: numbers, places of tensors, headers of frames.
_RECORD_BYTES, _TENSOR_BYTES, _ROW_BYTES = 256, 48, 20
_ITEM_BYTES = 16  # of an element of a list, which travels by itself where workers keep samples


class BudgetSpent(Exception):  # noqa: N818 - not an error: the user set the limit
    """The next thing to do has no room; unwinds a job to its end."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What the user asked for: most bytes of the run, and where the checkpoint goes (None: a name is made)."""

    limit_bytes: int
    save_path: Path | None


def chosen_limit(
    config: DistributedConfig,
    budget_bytes: int | str | None,
    save_path: str | Path | None,
    folder: str | Path | None = None,
) -> Limit | None:
    """Return the budget of a run; None: it has none.

    Args:
        folder: of checkpoints without a path; None takes the configuration's.

    Raises:
        ConfigError: it is no number of bytes, or the checkpoint cannot be written where it should go.
    """
    limit: Any = config.budget_bytes if budget_bytes is None else budget_bytes
    if isinstance(limit, str):
        limit = parse_bytes(limit)
    if type(limit) is not int or limit < 0:
        raise ConfigError(
            f"budget_bytes is {limit!r}; give a whole number of bytes, such as 900_000_000, or 0 for no limit"
        )
    if not limit:
        if save_path is not None:
            raise ConfigError(
                "save_path (--save) is where the checkpoint goes when a budget is used up: give --budget with it"
            )
        return None
    path = None if save_path is None else Path(save_path).expanduser()
    _check_writable(path or Path(folder or config.checkpoint_dir) / "checkpoint.pt")
    return Limit(limit, path)


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"--save {path} is a folder: give the name of a file in it")
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"the checkpoint of a run that uses up its budget cannot be written to {path}: {folder} takes no files; choose "
            "another place with --save (save_path=)"
        )


def _lists(value: Any, rows: int) -> int:
    """How many lists with an element per sample a batch may hold."""
    own = isinstance(value, list | tuple) and len(value) == rows
    return own + sum(_lists(child, rows) for _, child in children(value) or ())


def slack_bytes(workers: int) -> int:
    """Return what is kept for acknowledgements, heartbeats and printed lines."""
    return _SLACK_BYTES + _SLACK_PER_WORKER * workers


@dataclass(frozen=True, slots=True)
class Costs:
    """The most bytes that each thing takes.

    Attributes:
        start: to bring one worker into the run: source and state.
        state: the whole state, once back.
        step: an optimizer step without its batches and without what a group exchanges.
        exchanged: that, where it goes by way of the orchestrator; validation_exchanged likewise.
        batch_times: how often the bytes of a batch travel: to several workers that share it, or in part to each.
        validation: a pass.
        workers: how many there were at the start.
    """

    start: float
    state: float
    step: float
    batch_times: float
    validation: float
    workers: int
    exchanged: float = 0.0
    validation_exchanged: float = 0.0


@dataclass(slots=True)
class Budget:
    """The budget of one run.

    Attributes:
        used: tells the bytes that were sent and received so far.
        stopped: it ended the run.
    """

    limit: Limit
    costs: Costs
    used: Callable[[], int] = lambda: 0
    stopped: bool = False
    _under_way: dict[int, float] = field(default_factory=dict)
    _row_bytes: float = 0.0
    # Since something else than steps was done: bytes that were used then, batch bytes and steps that were sent.
    _since: tuple[float, float, int] = (0.0, 0.0, 0)
    _exchanged_here: float = 1.0  # part of what a group exchanges that goes by way of the orchestrator
    _counted_step: float = 0.0
    _counted_validation: float = 0.0

    def goes_by(self, path: str) -> None:
        """Note the path of the group, "relay" or "direct": what workers exchange directly does not pass here."""
        self._exchanged_here = 0.0 if path == "direct" else 1.0

    # ------------------------------------------------------------------------------------------------- what things take

    @property
    def reserve(self) -> float:
        """Bytes that must be left at the end."""
        return self.costs.state * _MARGIN + slack_bytes(self.costs.workers)

    def batches_cost(self, group: Sequence[LoadedBatch]) -> float:
        """Return the most bytes that these batches take, however they are shared out."""
        return sum(self._batch_cost(batch) for batch in group)

    def _batch_cost(self, batch: LoadedBatch) -> float:
        each = self.costs.workers * _RECORD_BYTES + batch.rows * (
            _ROW_BYTES + _ITEM_BYTES * _lists(batch.batch, batch.rows)
        )
        if isinstance(batch.batch, Unread):  # held by the workers, or loaded and sent after all
            return each + batch.rows * self._row_bytes
        tree, buffers = pack(batch.batch)
        structure = len(tree.structure) + self.costs.workers * _TENSOR_BYTES * len(tree.tensors)
        payload = max(sum(buffer.nbytes for buffer in buffers), size_of(batch.batch)) * self.costs.batch_times
        self._row_bytes = max(self._row_bytes, (payload + structure) / max(1, batch.rows))
        return each + (structure * max(1.0, self.costs.batch_times) + payload) * _MARGIN

    def step_cost(self, batches: float) -> float:
        """Return the most bytes of a step whose batches take `batches`: as estimated, or as measured so far if larger."""
        used, sent, steps = self._since
        if steps:
            self._counted_step = max(self._counted_step, (self.used() - used - sent) / steps)
        reckoned = (self.costs.step + self.costs.exchanged * self._exchanged_here) * _MARGIN
        return max(reckoned, self._counted_step) + batches

    @property
    def validation_cost(self) -> float:
        """Most bytes of a validation pass: the estimate, or the largest so far."""
        reckoned = self.costs.validation + self.costs.validation_exchanged * self._exchanged_here
        return max(reckoned * _MARGIN, self._counted_validation)

    # ----------------------------------------------------------------------------------------------------- what has room

    def fits(self, cost: float) -> bool:
        """Whether something of this cost may be begun: with it, and with all under way sent once more, the reserve is left."""
        waiting = sum(self._under_way.values()) + cost
        return self.used() + 2 * waiting + self.reserve <= self.limit.limit_bytes

    def can_send_again(self) -> bool:
        """Whether what is under way could be sent again in full, when a connection broke."""
        return self.fits(0.0)

    # ---------------------------------------------------------------------------------------------------- what happened

    def issued(self, step: int, cost: float, batches: float) -> None:
        """A step was sent."""
        self._under_way[step] = cost
        used, sent, steps = self._since
        self._since = (used, sent + batches, steps + 1)

    def applied(self, step: int) -> None:
        """All members have applied the steps up to this one: nothing of them is under way any more."""
        for known in [known for known in self._under_way if known <= step]:
            del self._under_way[known]

    def gave_up(self) -> None:
        """Nothing is under way any more; what of it was sent is counted."""
        self._under_way.clear()

    def measure(self, before: int, validated: bool = False) -> None:
        """Something other than steps was done since `before` bytes were used; its bytes do not count for steps."""
        now = self.used()
        used, sent, steps = self._since
        self._since = (used + now - before, sent, steps)
        if validated:
            self._counted_validation = max(self._counted_validation, float(now - before))

    def begin(self, path: str) -> None:
        """The first step of an epoch is about to be sent; `path` as for `goes_by`."""
        self.goes_by(path)
        self._since = (float(self.used()), 0.0, 0)

    # ---------------------------------------------------------------------------------------------------------- the end

    def path(self, folder: Path, run_id: str, step: int) -> Path:
        """Return where the checkpoint goes; a name that is made holds the step, so that no older file is lost."""
        return self.limit.save_path or folder / f"{run_id}-step-{step}.pt"

    def sentence(self, step: int, total: int | None, saved: Path | None, before: int = 0, lacks: str = "") -> str:
        """Say why the run ended, and how to go on.

        Args:
            step, total: of this run.
            before: steps of earlier runs that it went on from: checkpoints are named by all steps.
            lacks: what had no room at the end of an epoch.
        """
        of = "" if total is None else f" of {before + total}"
        if saved is not None:
            left = f"go on with %guava_resume {saved}, then your %guava_train line with a new --budget"
        elif step:
            left = "no checkpoint was saved; %guava_save does it, at the cost of its bytes"
        else:
            left = "nothing was learned: train again with a larger --budget"
        spent = f"budget {show_bytes(self.limit.limit_bytes)}, used {show_bytes(self.used())}"
        return f"{spent}, step {before + step}{of}{lacks}; {left}"

    def end(self, used: int) -> None:
        """The run has ended; what is sent from now on is not its own."""
        self.used = lambda: used

    def record(self) -> dict[str, Any]:
        """Return it for a report."""
        return {"limit_bytes": self.limit.limit_bytes, "used_bytes": self.used(), "stopped": self.stopped}


def refuse_small(limit: Limit, start: float, step: float, state: float, workers: int) -> None:
    """Refuse a budget in which not even one step and its checkpoint have room.

    Args:
        limit: what was allowed.
        start, step, state: bytes to begin, of one step, and of the state that comes back.
        workers: how many: each needs some bytes for all else.

    Raises:
        ConfigError: with the numbers.
    """
    needed = start + 2 * step * _MARGIN + state * _MARGIN + slack_bytes(workers)
    if needed <= limit.limit_bytes:
        return
    parts: Iterable[tuple[str, float]] = (
        ("to start", start),
        ("for the first step, which may have to be sent twice,", 2 * step * _MARGIN),
        ("for the state that must come back for the checkpoint,", state * _MARGIN),
        ("for all else", slack_bytes(workers)),
    )
    told = ", ".join(f"{show_bytes(round(nbytes))} {what}" for what, nbytes in parts).replace(",,", ",")
    raise ConfigError(
        f"a budget of {show_bytes(limit.limit_bytes)} is too small: {told}; that is {show_bytes(round(needed))} before anything "
        "is learned. Nothing was started; give more (--budget), or a smaller model"
    )
