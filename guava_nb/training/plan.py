"""What a run is asked to do, beyond what its workers need to know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from guava_nb.config import DistributedConfig
from guava_nb.config.units import parse_seconds
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.errors import ConfigError
from guava_nb.evaluation.validation import Validation
from guava_nb.spec.training_options import TrainingOptions, listed, same_named
from guava_nb.sync.beginning import Beginning
from guava_nb.training.byte_budget import Budget

if TYPE_CHECKING:
    from guava_nb.training.run import Run

__all__ = ["Best", "Callback", "Logged", "NotePlace", "Position", "Snapshot", "TrainingPlan"]

# Which validation was the best so far: by which figure, and whether more of it or less is better.

#: What is better of the figures that every validation has; of a user's metric only the user knows.
_DIRECTIONS = {"loss": "min", "perplexity": "min", "accuracy": "max"}


class Best(NamedTuple):
    """A figure of the validations and its better direction, "min" or "max"."""

    metric: str
    direction: str

    @classmethod
    def of(cls, text: str, metrics: Iterable[str], has_accuracy: bool = True) -> Best:
        """Read an option such as "accuracy" or "f1:max".

        Args:
            metrics: names of the run's own.
            has_accuracy: validations measure it.

        Raises:
            ConfigError: no validation gives it, or its direction is not known.
        """
        metric, _, given = text.partition(":")
        known = [name for name in ("loss", "accuracy", "perplexity", *metrics) if name != "accuracy" or has_accuracy]
        if metric not in known:
            raise ConfigError(
                f"save_best is {text!r}, which no validation of this run gives; it gives {', '.join(known)}"
            )
        direction = given or ("" if metric in metrics else _DIRECTIONS.get(metric, ""))
        if direction not in ("min", "max"):
            raise ConfigError(
                f"save_best is {text!r}, and only you know what is better of {metric}: write {metric}:max where more is better, "
                f"{metric}:min where less is"
            )
        return cls(metric, direction)

    def since(self, validations: Sequence[Mapping[str, Any]]) -> int:
        """Return how many validations followed the best one; those without such a number are worse than any."""
        bests = [k for k in range(len(validations)) if self.is_newest(validations[: k + 1])]
        return len(validations) - 1 - (bests[-1] if bests else -1)

    def is_newest(self, validations: Sequence[Mapping[str, Any]]) -> bool | None:
        """Return whether the last validation is better than all before it; None: it has no such number."""
        sign = 1 if self.direction == "max" else -1
        figures = [sign * one[self.metric] for one in validations if isinstance(one.get(self.metric), int | float)]
        if not validations or not isinstance(validations[-1].get(self.metric), int | float):
            return None
        newest = figures[-1]
        before = [figure for figure in figures[:-1] if figure == figure]  # NaN is worse than any number
        return bool(newest == newest and all(newest > figure for figure in before))


class Callback:
    """Base of callbacks: override what you need; return True to stop the run after the current step.

    `start_training(callbacks=[...])`, or `%guava_train --callbacks NAMES` with names of the notebook. `on_step` costs most: with
    one a lone worker waits for each commit, so its steps take a round trip longer. `on_epoch` and `on_validation` cost their own
    time only. To write figures down, `log="csv"` (`--log csv`) costs no step anything.

    Plain objects that have some of these methods serve as well. They run on the run's own thread, between steps: what
    `save_checkpoint` saves and `run.model()` returns in one of them is the state of the step, or the moment, it was called
    for, and after `run.stop()` no other step follows. For that a run with an `on_step` commits step by step: a lone worker
    waits for each commit.

    Workers train models of their own: what a callback changes in the registered instance, or in the copy that `run.model()`
    gives, has no effect, and is told. Batches are read ahead: what `on_step` changes in the data set shows some batches later
    only; what `on_epoch` changes is in time for the next epoch.
    """

    def on_step(self, run: Run, record: dict[str, Any]) -> bool | None:
        """Called after each committed step with its history record."""

    def on_epoch(self, run: Run, record: dict[str, Any]) -> bool | None:
        """Called after each epoch with `{"epoch", "loss", "samples"}`."""

    def on_validation(self, run: Run, record: dict[str, Any]) -> bool | None:
        """Called after each validation with `{"step", "loss", "accuracy", "samples"}` and the metrics."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far the data has been committed.

    Attributes:
        epoch: the epoch in work; one that has ended counts as the next one's beginning.
        batches: loader batches of it that are committed.
        samples: samples of it that are committed.
        feed: where the loader has to go on, see `guava_nb.data.loader_feed.LoaderFeed.position`; its "validation" is what
            `walks` of the validation loader gave. None at the very beginning.
    """

    epoch: int = 0
    batches: int = 0
    samples: int = 0
    feed: dict[str, Any] | None = None

    def rewind(self, feed: LoaderFeed, val_feed: LoaderFeed | None) -> None:
        """Let the next epochs of the feeds, to train and to validate with, go on from here.

        Raises:
            CheckpointError: `feed` is of another version or damaged.
        """
        if self.feed is None:
            return
        if val_feed is not None and (walks := self.feed.get("validation")) is not None:
            val_feed.walk_on(walks)
        feed.restore(self.feed)
        if self.feed["epoch"] < self.epoch:  # taken at an epoch's end: walk over it, so that the next one follows
            for _ in feed.epoch():
                break


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state to go back to when no worker holds a newer one, and where it lies."""

    step: int
    position: Position
    kept: Beginning

    @property
    def state(self) -> dict[str, Any]:
        """The state itself."""
        return self.kept.state()


class Logged(NamedTuple):
    """A log that a run goes on from, or that a checkpoint's run has.

    Attributes:
        name: how the names of its files begin.
        steps, epochs: what the log counts and the run does not, because they were of the runs that it went on from.
        up_to: the step, as the log counts, after which nothing of it holds.
    """

    name: str
    steps: int = 0
    epochs: int = 0
    up_to: int = 0


#: Takes the number of a step or round, how far the data is committed, batches and samples of the step, what gives the loader's
#: place, and how many optimizer steps are committed.
NotePlace = Callable[[int, Position, int, int, Callable[[], dict[str, Any]], int], None]


@dataclass(slots=True)
class TrainingPlan:
    """Everything the training job follows.

    Attributes:
        num_epochs: passes over the data, counted from the very beginning; no more than `max_steps` needs.
        max_steps: optimizer steps after which the run ends, counted likewise; None sets no limit.
        val_interval: validate after each so many optimizer steps, counted from the very beginning; None validates at the end of
            each epoch, and of the run.
        accumulation_steps: loader batches per optimizer step.
        sync_every: optimizer steps between two exchanges: 1, or those of a round of local steps.
        batch: how the user says that batches are read; the feeds have it.
        split_fn: cuts batches; None cuts them as the feed reads them.
        shares: relative share of each worker that was here when the run began; one that joins later gets the least of them.
            None shares equally; "measured" deals the local batches of a round by the workers' pace.
        seats: ranks that these shares belong to; () for those from 0.
        prefetch_steps: steps that are issued ahead of the one in work at least; more as `guava_nb.sync.send_credit` allows.
        prefetch_bytes: batch bytes that a worker was sent and has not worked on; 0 issues by `prefetch_steps` alone.
        snapshot_every_steps: 0 takes none; None takes them by time, as their cost allows, where the
            state is on one worker only, or in parts on several.
        snapshot_place: "orchestrator": they come here; "worker": a lone one keeps them on its disk, and differences of the
            weights come here; "auto": on its disk where the line would need more than ten seconds for one.
        cache_static: samples do not change between epochs: those that workers hold are not loaded again.
        save_every_steps, save_every_s: a checkpoint after so many steps, or seconds; 0 saves none by itself.
        save_best: a checkpoint after each validation that is the best so far; None saves none.
        patience: validations in a row without a better one, by that figure or the loss, that end the run; None: any number.
        keep: how many checkpoints of a period stay; None keeps all.
        log: where steps, validations and epochs are logged: words of the option.
        logged: the log that the run goes on from, if there is one.
        base: digests of frozen parameters, which checkpoints then leave out; None saves the whole model.
        start: where the data begins; from a checkpoint.
        save_folder, save_name: where a checkpoint goes that the user gave no path for, and how its name begins, so that no
            run of any session overwrites another's; "" takes the run's.
        budget: most bytes that the run may take; None sets no limit.
        check: "warn" tells where a batch in pieces gives other numbers than whole, "strict" refuses, "off" does not look.
        validation: makes what each validation asks: loss, accuracy and the user's metrics.
        log_step_every: steps between lines in Python's log.
        note_place: keeps where the data stands after each step, for a process that follows this one; None keeps nothing.
        scheduler_metric: which figure of it a scheduler follows that follows one; None: the loss.
    """

    feed: LoaderFeed
    val_feed: LoaderFeed | None
    num_epochs: int
    max_steps: int | None = None
    val_interval: int | None = None
    accumulation_steps: int = 1
    sync_every: int = 1
    shares: Sequence[float] | str | None = None
    seats: Sequence[int] = ()
    callbacks: Sequence[Any] = ()
    batch: str | None = None
    split_fn: Callable[[Any, Sequence[tuple[int, int]]], list[Any]] | None = None
    prefetch_steps: int = 1
    prefetch_bytes: int = 64 << 20
    interrupt_grace_s: float = 5.0
    rejoin_timeout_s: float = 300.0
    snapshot_every_steps: int | None = None
    snapshot_place: str = "auto"
    save_every_steps: int = 0
    save_every_s: float = 0.0
    save_best: Best | None = None
    patience: int | None = None
    keep: int | None = None
    cache_static: bool = False
    log: Sequence[str] = ()
    logged: Logged | None = None
    base: Mapping[str, str] | None = None
    start: Position = field(default_factory=Position)
    save_folder: Path = Path("checkpoints")
    save_name: str = ""
    budget: Budget | None = None
    check: str = "warn"
    validation: Callable[[], Validation] = Validation
    scheduler_metric: str | None = None
    log_step_every: int = 100
    note_place: NotePlace | None = None

    @property
    def batches_per_exchange(self) -> int:
        """Loader batches between two exchanges: those that are issued, committed and counted together."""
        return self.accumulation_steps * self.sync_every

    def __post_init__(self) -> None:
        """Know how many epochs the most steps take."""
        each = self.steps_per_epoch
        if self.max_steps is not None and each:
            self.num_epochs = min(self.num_epochs, -(-self.max_steps // each))

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of an epoch; None where the data has no length."""
        batches = self.feed.batches_per_epoch
        return None if batches is None else -(-batches // self.accumulation_steps)

    @property
    def steps_done(self) -> int:
        """Optimizer steps before the run begins, of those that it goes on from; 0 where the data has no length."""
        each = self.steps_per_epoch or 0
        return each * self.start.epoch + (-(-self.start.batches // self.accumulation_steps) if each else 0)

    def steps_left(self, step: int) -> int | None:
        """Return how many optimizer steps follow the one of this number; None where the data has no length."""
        each = self.steps_per_epoch
        return None if each is None else self._to_limit(each * self.num_epochs) - (step + 1)

    def _to_limit(self, steps: int) -> int:
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def is_out_of_patience(self, validations: Sequence[Mapping[str, Any]]) -> str:
        """Return why the run shall end after the last of these validations; "" where it shall not."""
        followed = self.save_best or Best("loss", "min")
        if self.patience is None or (worse := followed.since(validations)) < self.patience:
            return ""
        return f"patience: no validation was better in {followed.metric} for {worse} of them"

    def has_step_after(self, steps: int) -> bool:
        """Whether so many optimizer steps, from the very beginning, are less than the most of them."""
        return self.max_steps is None or steps < self.max_steps

    def epochs_left(self) -> tuple[float, ...]:
        """Return which part of each epoch from the start on is to be done; the first and the last may be less than 1."""
        each = self.steps_per_epoch
        done = self.start.batches / self.feed.batches_per_epoch if self.feed.batches_per_epoch else 0.0
        ends = [1.0] * (self.num_epochs - self.start.epoch)
        if each and self.max_steps is not None and self.max_steps < each * self.num_epochs:
            ends[-1] = (self.max_steps - each * (self.num_epochs - 1)) / each
        return tuple(max(0.0, end - (done if place == 0 else 0.0)) for place, end in enumerate(ends))

    def epoch_ends_left(self) -> int | None:
        """Return how many epochs will be ended; None where that cannot be known."""
        each = self.steps_per_epoch
        if self.max_steps is None:
            return self.num_epochs - self.start.epoch
        return None if each is None else self._to_limit(each * self.num_epochs) // max(1, each) - self.start.epoch

    @classmethod
    def of(
        cls,
        options: TrainingOptions,
        config: DistributedConfig,
        feeds: tuple[LoaderFeed, LoaderFeed | None],
        validation: Callable[[], Validation],
        measured: tuple[Sequence[str], bool] = ((), True),
    ) -> TrainingPlan:
        """Return the plan of a run; its fields come from the options of the same names, else from the configuration.

        Args:
            options: settled.
            feeds: to train and to validate with.
            validation: as for the class.
            measured: names of its metrics, and whether it has an accuracy.

        Raises:
            ConfigError: `save_best` names what it does not measure.
        """
        every = options.save_every or 0
        steps, seconds = (every, 0.0) if isinstance(every, int) else (0, parse_seconds(every))
        return cls(
            **{
                **same_named([one.name for one in fields(cls)], config, options),
                "feed": feeds[0],
                "val_feed": feeds[1],
                "validation": validation,
                "log": listed(options.log),
                "save_every_steps": steps,
                "save_every_s": seconds,
                "save_best": None if options.save_best is None else Best.of(options.save_best, *measured),
                "save_folder": Path(options.checkpoint_dir or config.checkpoint_dir),
            }
        )

    @property
    def reading_text(self) -> str:
        """How batches are read, in words; "" before the first, or where only ids of samples travel."""
        if self.split_fn is not None:
            return "shared out by split_fn"
        return "" if self.feed.gives_ids else self.feed.reading.text

    @property
    def log_mark(self) -> tuple[str, int, int] | None:
        """What a run that goes on from this one has to know of its log: see `Extras.log`; None where nothing is logged."""
        before = self.logged or Logged("")
        return (self.save_name, before.steps, before.epochs) if self.log else None

    def weights(self, team: Sequence[int]) -> list[float]:
        """Return what part of the work each of these ranks gets, relative to the others."""
        if self.shares is None or isinstance(self.shares, str):
            return [1.0] * len(team)
        given = dict(zip(self.seats or range(len(self.shares)), map(float, self.shares), strict=True))
        least = min(given.values())
        weights = [given.get(rank, least) for rank in team]
        # Where those who were to do the work are gone, one does it all: that is right for every loss.
        return weights if any(weights) else [float(place == 0) for place in range(len(team))]
