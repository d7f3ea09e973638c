"""The one-step check: before batches are cut, one worker computes the first one whole and in pieces, and compares.

Only a loss or a model in which samples depend on each other can make them differ, and no arithmetic of ours can mend that;
so it is told, or refused, before the first step. No gradient crosses the line, and the samples stay those of that step.

A few samples are enough to find most of these losses, so few are sent. Where they show a difference, or cannot be computed
without the rest of their batch, the whole batch decides; and the first time all of it is looked at in any case, since what
takes a fixed number of samples (the 16 hardest) does nothing odd to fewer.

What couples samples may begin later: a schedule of the loss, targets that are ignored, weights that differ, a term of each tenth
step, a share that parts what belongs together. So batches are checked again before steps 4, 8, 16 and so on, before steps 10,
60, 600 and so on, before the last one, and where a batch has what none before it had or is cut as none before it was.
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from torch import Tensor

from guava_nb.cluster.job import Job
from guava_nb.cluster.owed_answers import OwedAnswer
from guava_nb.config.units import show_bytes, show_time
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.loader_wrappers import Unread
from guava_nb.data.split import RowSplitter, share_ranges
from guava_nb.errors import ConfigError
from guava_nb.nested import leaves
from guava_nb.protocol.messages import Finding, ParallelSpec, RunSpec, StepChecked
from guava_nb.replica.one_step_check.causes import BACKWARD, COUNT, COUPLED, FREQUENCY, SUM, TREATED, WEIGHTS
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.training.budget_gate import BudgetGate
from guava_nb.training.membership import Membership
from guava_nb.training.plan import TrainingPlan
from guava_nb.training.run import Run
from guava_nb.training.step_check.batch_traits import BatchTraits
from guava_nb.training.step_check.findings import OUT_OF_MEMORY, Question, Verdict, about_hooks, verdict_on
from guava_nb.training.step_check.first_step import can_be_compared, difference, sentence_on
from guava_nb.training.step_check.left_behind import LeftBehind

__all__ = [
    "FirstStepCheck", "digest_of", "first_rows", "found_before", "has_whole_twin", "is_looked_at_whole", "is_round",
    "later_checks", "weights_of_pieces", "weights_to_send",
]  # fmt: skip

#: Samples that are sent first; a batch of at most twice as many is sent whole.
_FEW_ROWS = 8
#: Bytes that are sent at most: for several samples, and for two samples or a whole batch.
_FEW_BYTES, _MOST_BYTES = 16 << 20, 64 << 20
#: The first later step, from 1, whose batch is checked again; then every one with twice the number.
_FIRST_AGAIN = 4
#: Batches that are checked because of what is new in them, at most.
_MOST_NEWS = 8
#: What a record says of differences.
_FOUND = ("causes", "buffers", "unlike_in_python")
_FAILED = ("whole failed", "piece failed")


def weights_of_pieces(spec: RunSpec, weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights of the pieces that a batch is cut into; one where nothing is cut.

    Args:
        spec: of the run.
        weights: of its workers, in order of rank.
    """
    shape = spec.parallel or ParallelSpec()
    # A replica of several ranks takes the share of its first one, and a pipeline cuts that into micro-batches.
    return tuple(
        w / shape.micro_batches for w in weights[:: shape.pp * shape.tp] for _ in range(shape.micro_batches) if w
    )


def first_rows(rows: int) -> int:
    """Return how many samples of a batch are looked at first."""
    return rows if rows <= 2 * _FEW_ROWS else _FEW_ROWS


def is_looked_at_whole(step: int) -> bool:
    """Whether all samples of the batch of this step, from 0, are looked at when it is checked again: a power of 4 from 256 on."""
    number = step + 1
    return number >= 256 and number.bit_count() == 1 and number.bit_length() % 2 == 1


def is_round(number: int) -> bool:
    """Whether a step of this number, from 1, is one of 10, 60, 600, ...: what comes every few steps falls on one of them."""
    while number >= 600 and number % 10 == 0:
        number //= 10
    return number in (10, 60)


def later_checks(steps: int | None) -> int:
    """Return how many of so many steps are checked again by their number; None: as of a few thousand."""
    steps = 4096 if steps is None else steps
    doubled = max(0, steps.bit_length() - _FIRST_AGAIN.bit_length() + 1)
    is_extra = steps > _FIRST_AGAIN and steps & (steps - 1) != 0 and not is_round(steps)
    round_ones = (10, *(60 * 10**k for k in range(20)))  # a run may have millions of steps
    return doubled + sum(is_round(number) for number in round_ones if _FIRST_AGAIN <= number <= steps) + is_extra


_AGAIN = ". It is made again before steps 4, 8, 16, ... and where a batch has what none before it had"
_DRAWS = (
    "The forward draws random numbers ({}, as {} saw in {}): they come from the run's seed, the same in each run with it, and "
    "are others than those of a loop of plain PyTorch"
)
#: Weights that are sent for a check, at most.
_MOST_WEIGHTS_BYTES = 16 << 20


def _is_in_parts(spec: RunSpec) -> bool:
    """Whether no worker has all weights of the model."""
    shape = spec.parallel
    return shape is not None and (shape.zero_stage >= 2 or shape.tp > 1 or shape.pp > 1)


def has_whole_twin(replicas: ReplicaSet) -> bool:
    """Whether the model lies in parts, and a worker is to compute the first step with the whole one, too."""
    is_known = (replicas.from_seed and replicas.step == -1) or _has_small_model(replicas)
    return is_known and _is_in_parts(replicas.spec) and not replicas.spec.sync_batchnorm


def _has_small_model(replicas: ReplicaSet) -> bool:
    return replicas.master.model_bytes <= _MOST_WEIGHTS_BYTES


def weights_to_send(replicas: ReplicaSet) -> dict[str, Any] | None:
    """Return the weights that the orchestrator has, for a worker that has a part and would take those that it builds.

    None: a worker has all, it builds the same, or they are too large to be sent.
    """
    is_built = replicas.from_seed and replicas.master_step == -1
    if is_built or replicas.master_step < -1 or not _is_in_parts(replicas.spec) or not _has_small_model(replicas):
        return None
    return replicas.master.state(optimizer=False)


class FirstStepCheck:
    """Checks a batch before the first step that is cut, and later ones: what couples samples may begin later.

    Args:
        job, members, plan, run, gate: of the run.
        drain: waits until no step is in flight.
    """

    def __init__(
        self, job: Job, members: Membership, plan: TrainingPlan, run: Run, gate: BudgetGate, drain: Callable[[], None]
    ) -> None:
        """Nothing is checked yet."""
        self._job, self._members, self._plan, self._run, self._gate = job, members, plan, run, gate
        self._drain = drain
        self._splitter = RowSplitter(plan.split_fn, plan.feed.reading)
        is_local = members.replica_set.spec.rounds is not None  # a step has no whole batch there
        self._is_over, self._has_begun = plan.check == "off" or is_local, False
        self._traits, self._told = BatchTraits(), set[str]()
        self._sizes, self._kept_together = set[int](), 0  # of batches; samples that lay in one share so far, at least
        self._step, self._news_left, self._next = -1, _MOST_NEWS, _FIRST_AGAIN
        self._answers = job.collect(StepChecked, self._is_asked, lambda rank: rank == self._asked)
        self._policies: dict[str, str] = {}  # of buffers
        self._request, self._asked, self._behind = -1, -1, LeftBehind(members, plan, run)
        self._has_twin = False
        self._weights: dict[str, Any] | None = None  # with which the run began, where they are sent along

    def before(self, group: Sequence[LoadedBatch]) -> bool:
        """Check a step that is about to be issued, if nothing like it was checked before.

        Returns:
            Whether a worker was asked: time has passed.

        Raises:
            ConfigError: a piece of the batch cannot be computed; or the run is strict, and the pieces come to something else
                or could not be compared.
        """
        self._step += 1
        self._behind.look(group, self._step)
        batch = next((batch for batch in group if batch.rows > 1), None)
        if self._is_over or batch is None or self._splitter.problem:  # what cannot be cut is refused before it is sent
            return False
        replicas = self._members.replica_set
        team = list(getattr(replicas, "team", ())) or self._members.available()
        weights = weights_of_pieces(replicas.spec, self._plan.weights(team))
        if len(weights) < 2:
            return self._look_at_whole(batch, weights, team[0])
        news, odd = self._news_in(group), self._cut_as_none_before(group, weights)
        if self._has_begun and not news and not self._is_due() and odd is None:
            return False
        content = batch.batch.read() if isinstance(batch.batch, Unread) else batch.batch
        if not self._has_begun:
            self._has_begun = True
            question = Question(
                batch, content, weights, self._splitter, self._step, is_validated=self._plan.val_feed is not None,
                is_whole=True,
            )  # fmt: skip
            return self._first(question, team[0])
        if news is not None:
            batch, text, row = news
            content = batch.batch
            self._news_left -= 1
        elif odd is not None:
            batch, text, row = odd, f"its {odd.rows} samples are cut as those of no batch before", 0
            content = batch.batch.read() if isinstance(batch.batch, Unread) else batch.batch
        else:
            text, row = "", 0
        self._drain()
        is_whole = odd is batch or is_looked_at_whole(self._step)
        question = Question(batch, content, weights, self._splitter, self._step, text, row, is_whole=is_whole)
        self._again(question, team[0])
        return True

    def _news_in(self, group: Sequence[LoadedBatch]) -> tuple[LoadedBatch, str, int] | None:
        """Look at what came; what lies at the workers, or was kept there, is not looked at here."""
        for batch in group:
            if self._news_left and batch.rows > 1 and not batch.source and not isinstance(batch.batch, Unread):
                news = self._traits.see(batch.batch, batch.rows)
                if news is not None and self._has_begun:
                    return batch, news.text, news.row
        return None

    def _cut_as_none_before(self, group: Sequence[LoadedBatch], weights: Sequence[float]) -> LoadedBatch | None:
        """Return a batch whose shares part pairs, or larger groups of samples, that no share before did; None for none."""
        for batch in group:
            if batch.rows > 1 and batch.rows not in self._sizes:
                self._sizes.add(batch.rows)
                kept = math.gcd(self._kept_together, *(start for start, _ in share_ranges(batch.rows, weights)))
                self._kept_together, before = kept, self._kept_together
                if kept != before and self._has_begun:
                    return batch
        return None

    def _is_due(self) -> bool:
        """Whether a step's turn has come: each time after twice as many steps, at round numbers, and before the last one."""
        number, total = self._step + 1, self._run.total_steps
        if number >= self._next:
            self._next = 2 * number
            return True
        return number >= _FIRST_AGAIN and (number == total or is_round(number))

    def _first(self, question: Question, rank: int) -> bool:
        replicas, data = self._members.replica_set, self._plan.feed.data_set
        self._has_twin = has_whole_twin(replicas)
        self._weights = weights_to_send(replicas)
        digest = digest_of(replicas, question.content, question.weights)
        verdict = known = found_before(replicas, digest, data)
        if verdict is None:
            self._take_present_weights()
            verdict = self._judge(question, rank)
            verdict = verdict if verdict.is_refused else self._of_last(question, rank) or verdict
            replicas.checks[digest] = (_reference(data), verdict)
        self._note(verdict)
        if replicas.spec.optimizer_site == "orchestrator":  # elsewhere a worker tells it with its state
            replicas.kept = tuple(verdict.record.get("kept_in_python", ()))
        self._tell(verdict, known is not None)
        if known is None and (hooked := about_hooks(replicas.master.model)):
            self._members.cluster.notice(hooked)
        return known is None

    def _of_last(self, question: Question, rank: int) -> Verdict | None:
        """Refuse a run whose last batch of an epoch leaves a worker one sample that cannot be computed alone; None: it can."""
        feed, total, started = self._plan.feed, self._run.total_steps, time.monotonic()
        rows = (feed.samples_per_epoch or 0) % (feed.batch_size or 1)
        is_reached = total is None or total >= (feed.batches_per_epoch or 0)
        if not (is_reached and 1 < rows < question.batch.rows and question.leaves_one(rows)):
            return None
        answer, problem, looked = self._ask(question, rank, rows)
        if answer is None or answer.outcome != "piece failed":
            return None
        spent, spec = time.monotonic() - started, self._members.replica_set.spec
        verdict = verdict_on(spec, question, self._name(rank), looked, answer, problem, spent)
        return replace(verdict, sentence=f"The last batch of an epoch has only {rows} samples. {verdict.sentence}")

    def _look_at_whole(self, batch: LoadedBatch, weights: tuple[float, ...], rank: int) -> bool:
        """Have a worker compute the first batch with the whole model, where nothing but the model is cut."""
        replicas = self._members.replica_set
        if self._has_begun or not has_whole_twin(replicas):
            return False
        self._has_begun = self._has_twin = True
        self._take_present_weights()
        content = batch.batch.read() if isinstance(batch.batch, Unread) else batch.batch
        question, started = Question(batch, content, weights, self._splitter, self._step), time.monotonic()
        answer, problem, rows = self._ask(question, rank, batch.rows)
        if answer is not None and answer.outcome == "same":
            seconds = time.monotonic() - started
            name = self._name(rank)
            self._run.check = {
                **verdict_on(replicas.spec, question, name, rows, answer, problem, seconds).record, "known": False,
            }  # fmt: skip
            if answer.drawn:
                self._members.cluster.notice(_DRAWS.format(", ".join(answer.drawn), name, show_time(seconds)))
        return True

    def after(self, step: dict[str, Any]) -> None:
        """Compare the run's first step with what the whole model gave, where its workers have parts of the model.

        Args:
            step: its record in the history.

        Raises:
            ConfigError: they differ, and the run is strict.
        """
        check = self._run.check
        is_first = len(self._run.history) == 1 and self._step >= 0
        if check is None or not (is_first and self._has_twin) or not can_be_compared(check, step):
            return
        check["first_step_difference"] = unlike = difference(check, step)
        text = sentence_on(check, step, self._run.mode)
        if unlike and self._plan.check == "strict":
            raise ConfigError(f"{text}. That step is kept")
        if unlike:
            warnings.warn(text, stacklevel=2)
        if unlike or self._run.mode == "tensor":  # elsewhere the check has told that it was made
            self._members.cluster.notice(text)

    def _take_present_weights(self) -> None:
        replicas, is_free = self._members.replica_set, self._plan.budget is None
        is_sent = _is_in_parts(replicas.spec) and _has_small_model(replicas)
        if is_free and is_sent and replicas.master_step != replicas.step:
            self._members.fetch()
        self._weights = weights_to_send(replicas)

    def _again(self, question: Question, rank: int) -> None:
        """Check another step. What is known already is not told again."""
        verdict = self._judge(question, rank)
        record, told = verdict.record, set(self._told)
        first = self._run.check or {}
        again = first.get("again", {"steps": [], "seconds": 0.0})
        again = {"steps": [*again["steps"], self._step + 1], "seconds": again["seconds"] + record["seconds"]}
        # A piece that fails here may be smaller than any worker's; where a worker's own fails, the step says so.
        is_told = record["outcome"] not in ("not checked", "piece failed")
        is_new = is_told and (bool(self._note(verdict) - told) or verdict.is_refused)
        if is_new:
            self._run.check = {**record, "known": False, "step": self._step + 1, "again": again}
            self._say(verdict)
        else:
            self._run.check = {**first, "again": again}

    def _note(self, verdict: Verdict) -> set[str]:
        """Remember what was found; returns it. What nothing more can be found in is not asked about again."""
        record = verdict.record
        found = {name for key in _FOUND for name in record.get(key, ())}
        found |= self._policies.keys() & record.get("buffers", ())
        for name, way in record.get("policies", {}).items():
            if self._policies.get(name) != way:
                self._policies[name] = way
                found.add(f"{name}={way}")
        self._members.replica_set.found_policies = ",".join(f"{name}={way}" for name, way in self._policies.items())
        self._told |= found
        self._behind.note(record.get("kept_in_python", ()), record.get("moved", ()))
        self._traits.compare_with(verdict.compared)
        self._is_over = self._is_over or record["outcome"] == "not checked" or COUPLED in found
        return found

    def _tell(self, verdict: Verdict, known: bool) -> None:
        self._run.check = {**verdict.record, "seconds": 0.0 if known else verdict.record["seconds"], "known": known}
        if not (known and verdict.is_clean):
            total = self._run.total_steps
            again = _AGAIN + self._with_which_weights()
            self._say(verdict, again if verdict.is_clean and (total is None or total >= _FIRST_AGAIN) else "")

    def _with_which_weights(self) -> str:
        replicas = self._members.replica_set
        if not _is_in_parts(replicas.spec):
            return ""
        begun = "with which the run began" if _has_small_model(replicas) else "as the model is built"
        return (
            f", with the weights {begun}, since no worker has all of the present ones: what couples samples only in "
            "a trained model (an early exit, a threshold) is found at once in data mode and with zero_stage=1 (--zero 1)"
        )

    def _say(self, verdict: Verdict, again: str = "") -> None:
        if verdict.is_refused or (not verdict.is_clean and self._plan.check == "strict"):
            kept = f". The {self._step} steps before it are kept" if self._step else ""
            raise ConfigError(verdict.sentence + kept)
        self._members.cluster.notice(verdict.sentence + again)
        # Notices stand in the status only; these findings are worth a warning in the cell, too.
        if {BACKWARD, COUNT, FREQUENCY, SUM, TREATED, WEIGHTS, COUPLED} & set(
            verdict.record.get("causes", ())
        ) or verdict.record.get("unlike_in_python"):
            warnings.warn(verdict.sentence, stacklevel=2)

    # ------------------------------------------------------------------------------------------------------- asking

    def _is_asked(self, answer: StepChecked) -> bool:
        return answer.run_id == self._members.replica_set.run_id and answer.request_id == self._request

    def _judge(self, question: Question, rank: int) -> Verdict:
        started, total = time.monotonic(), question.batch.rows
        rows, earlier, fine, unseen = first_rows(total), None, True, ""
        while True:
            answer, problem, looked = self._ask(question, rank, rows, fine)
            fits = answer is None or answer.outcome != OUT_OF_MEMORY
            if answer is not None and not fits and earlier is None and rows >= 4:
                rows //= 2
                continue
            # The shares of the whole batch are what counts, and what begins with more samples is seen in it only.
            is_more = question.is_whole and rows == first_rows(total) and question.is_cut_finer(rows)
            if (
                answer is not None
                and fits
                and fine
                and (_is_doubtful(answer) or answer.buffers or answer.fits or is_more)
            ):
                earlier, rows, fine = (answer, looked), total, False
                continue
            missing = answer is None or not fits
            if missing and question.is_whole:
                unseen = problem or "it does not fit the memory"
            by_chance = (
                answer is not None and earlier is not None and not _is_doubtful(answer) and _is_doubtful(earlier[0])
            )
            if earlier is not None and (missing or (by_chance and earlier[0].outcome not in _FAILED)):
                # What few samples gave holds; what becomes of buffers goes by the samples of each share.
                last = earlier[0] if answer is None or missing else answer
                found = msgspec.structs.replace(earlier[0], buffers=last.buffers, fits=last.fits)
                answer, looked, problem = found, earlier[1], ""
            if (
                answer is not None and self._step and question.are_lone(looked)
            ):  # a count of samples looks like one of steps
                unsure = {name: policy for name, policy in answer.fits.items() if policy != "sum"}
                answer = msgspec.structs.replace(answer, fits=unsure)
            seconds = time.monotonic() - started
            return verdict_on(
                self._members.replica_set.spec, question, self._name(rank), looked, answer, problem, seconds, unseen
            )

    def _name(self, rank: int) -> str:
        return self._members.cluster.name(rank)

    def _ask(self, question: Question, rank: int, rows: int, fine: bool = False) -> tuple[Finding | None, str, int]:
        """Ask a worker once, for code that ends one worker may end all; about fewer samples where these have many bytes.

        Returns:
            Its answer; without one, why there is none; and about how many samples it was asked.
        """
        replicas, cluster = self._members.replica_set, self._members.cluster
        self._request, self._asked = replicas.next_request(), rank
        self._answers.clear()
        message, buffers = question.message(replicas.run_id, self._request, rows, fine, self._weights)
        sent_bytes = sum(buffer.nbytes for buffer in buffers)
        nbytes = sent_bytes - _bytes_of(self._weights)
        if nbytes > (_FEW_BYTES if 2 < rows < question.batch.rows else _MOST_BYTES):
            if rows <= 2 or rows == question.batch.rows > first_rows(rows):
                return (
                    None,
                    f"{rows} samples, whole and cut, have {show_bytes(nbytes)}, and at most {show_bytes(_MOST_BYTES)} are sent",
                    rows,
                )
            return self._ask(question, rank, 2)
        if not self._gate.affords(sent_bytes):
            return None, f"its {show_bytes(sent_bytes)} have no room in the budget", rows
        with self._gate.aside():
            cluster.send(rank, message, buffers)
            owed = OwedAnswer(rank, f"check of {rows}", self._request, "it compares a batch with its pieces")
            with self._job.waiting_for(lambda: [] if rank in self._answers else [owed]):
                self._job.pump(lambda: rank in self._answers or rank not in self._job.ready or rank not in replicas.at)
        came = self._answers.get(rank)
        answer = None if came is None else came.finding
        return answer, "" if answer is not None else f"{self._name(rank)} was lost, or broke off, meanwhile", rows


def _bytes_of(weights: Mapping[str, Any] | None) -> int:
    return sum(one.nbytes for part in (weights or {}).values() for one in leaves(part) if isinstance(one, Tensor))


def _is_doubtful(answer: Finding) -> bool:
    """Whether samples of the same batch that were left out may change the finding."""
    return answer.outcome in _FAILED or bool({WEIGHTS, COUPLED, TREATED} & set(answer.causes))


def digest_of(replicas: ReplicaSet, content: Any, weights: Sequence[float]) -> bytes:
    """Return what a finding depends on: model and loss, their source, the form of a batch, and how it is shared."""
    spec = replicas.spec
    record = (spec.model, spec.criterion, spec.step, spec.preprocess, spec.augment, spec.precision, spec.parallel,
              spec.sync_batchnorm, spec.optimizer_site, replicas.cells)  # fmt: skip
    form = [(str(getattr(leaf, "dtype", type(leaf))), getattr(leaf, "shape", ())[1:]) for leaf in leaves(content)]
    ratios = [weight / sum(weights) for weight in weights]
    return hashlib.blake2b(msgspec.msgpack.encode(record) + repr((form, ratios)).encode()).digest()


def found_before(replicas: ReplicaSet, digest: bytes, data: Any) -> Verdict | None:
    """Return what a check of the same has come to for the same data set: another one may pad or mask otherwise."""
    reference, verdict = replicas.checks.get(digest, (None, None))
    return verdict if reference is not None and reference() is data else None


def _reference(data: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(data)
    except TypeError:  # lists and tuples know no such references
        return lambda: data
