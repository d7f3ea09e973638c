"""The one-step check: before batches are cut, one worker computes the first one whole and in pieces, and compares.

Only a loss or a model in which samples depend on each other can make them differ, and no arithmetic of ours can mend that;
so it is told, or refused, before the first step. No gradient crosses the line, and the samples stay those of that step.

A few samples are enough to find such a loss, so few are sent. Where they show a difference, or cannot be computed without
the rest of their batch, the whole batch decides.
"""

from __future__ import annotations

import hashlib
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from guava_nb.cluster.job import Job
from guava_nb.config.units import show_bytes
from guava_nb.data.codec import pack
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.loader_wrappers import Unread
from guava_nb.data.split import RowSplitter, share_ranges
from guava_nb.errors import ConfigError
from guava_nb.nested import leaves
from guava_nb.protocol.messages import CheckStep, ParallelSpec, RunSpec, StepChecked
from guava_nb.replica.one_step_check.whole_against_cut import BATCH_STATISTICS, COUPLED, RANDOMNESS, WEIGHTS
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.training.budget_gate import BudgetGate
from guava_nb.training.membership import Membership
from guava_nb.training.plan import TrainingPlan
from guava_nb.training.run import Run

__all__ = ["FirstStepCheck", "Question", "digest_of", "first_rows", "found_before", "weights_of_pieces"]

#: Samples that are sent first; a batch of at most twice as many is sent whole.
_FEW_ROWS = 8
#: Bytes that are sent at most: for several samples, and for two samples or a whole batch.
_FEW_BYTES, _MOST_BYTES = 16 << 20, 64 << 20
_OUT_OF_MEMORY = "memory"
_FAILED = ("whole failed", "piece failed")


def weights_of_pieces(spec: RunSpec, weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights of the two pieces that are compared, the first one and all others; fewer where nothing is cut.

    Args:
        spec: of the run.
        weights: of its workers, in order of rank.
    """
    shape = spec.parallel or ParallelSpec()
    # A replica of several ranks takes the share of its first one, and a pipeline cuts that into micro-batches.
    pieces = [w / shape.micro_batches for w in weights[:: shape.pp * shape.tp] for _ in range(shape.micro_batches) if w]
    return (pieces[0], sum(pieces[1:])) if len(pieces) > 1 else tuple(pieces)


def first_rows(rows: int) -> int:
    """Return how many samples of a batch are looked at first."""
    return rows if rows <= 2 * _FEW_ROWS else _FEW_ROWS


@dataclass(frozen=True)
class Question:
    """Asks for a batch, or its first samples.

    Attributes:
        batch: of the loader.
        content: what the loader gave; of samples that lie at the workers their ids.
        weights: of the pieces.
        splitter: cuts it.
    """

    batch: LoadedBatch
    content: Any
    weights: tuple[float, ...]
    splitter: RowSplitter

    def message(self, run_id: str, request: int, rows: int, fine: bool) -> tuple[CheckStep, Sequence[memoryview]]:
        """Return the record that asks about the first `rows` samples, with their bytes; `fine`: in pieces of two samples.

        Small pieces show what depends on other samples where two large ones may come to the same by chance.
        """
        ranges = [part for part in share_ranges(rows, self.weights) if part[1] > part[0]]
        if fine and rows >= 4:
            edges = [*range(0, rows - 1, 2), rows]
            ranges = list(pairwise(edges))
        batches = [self.content] if rows == self.batch.rows else self._cut([(0, rows)])
        if not self.batch.source:  # a worker that has the samples cuts what it loads
            batches += self._cut(ranges)
        tree, buffers = pack(batches)
        counts = (rows, *(stop - start for start, stop in ranges))
        record = CheckStep(run_id=run_id, request_id=request, rows=counts, batch=tree, source=self.batch.source)
        return record, buffers

    def _cut(self, ranges: Sequence[tuple[int, int]]) -> list[Any]:
        cutter = RowSplitter() if self.batch.source else self.splitter
        return cutter.split(self.content, ranges, self.batch.rows)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What a check has come to: its record for the report, a sentence, and whether pieces give what the whole gives."""

    record: dict[str, Any]
    sentence: str
    is_clean: bool


class FirstStepCheck:
    """Checks one batch before the first step that is cut.

    Args:
        job, members, plan, run, gate: of the run.
    """

    def __init__(self, job: Job, members: Membership, plan: TrainingPlan, run: Run, gate: BudgetGate) -> None:
        """Nothing is checked yet."""
        self._job, self._members, self._plan, self._run, self._gate = job, members, plan, run, gate
        self._splitter = RowSplitter(plan.split_fn, plan.feed.reading)
        self._settled = plan.check == "off"
        self._answers = job.collect(StepChecked, self._is_asked)
        self._request = -1

    def before(self, group: Sequence[LoadedBatch]) -> bool:
        """Check a step that is about to be issued, if nothing like it was checked before.

        Returns:
            Whether a worker was asked: time has passed.

        Raises:
            ConfigError: a piece of the batch cannot be computed; or the run is strict, and the pieces come to something else
                or could not be compared.
        """
        batch = next((batch for batch in group if batch.rows > 1), None)
        if self._settled or batch is None or self._splitter.problem:  # what cannot be cut is refused before it is sent
            return False
        replicas = self._members.replica_set
        team = list(getattr(replicas, "team", ())) or self._members.available()
        weights = weights_of_pieces(replicas.spec, self._plan.weights(team))
        if len(weights) < 2:
            return False
        self._settled = True
        content = batch.batch.read() if isinstance(batch.batch, Unread) else batch.batch
        digest = digest_of(replicas, content, weights)
        data = self._plan.feed.data_set
        verdict = known = found_before(replicas, digest, data)
        if verdict is None:
            verdict = self._judge(Question(batch, content, weights, self._splitter), team[0])
            replicas.checks[digest] = (_reference(data), verdict)
        self._tell(verdict, known is not None)
        return known is None

    def _tell(self, verdict: _Verdict, known: bool) -> None:
        self._run.check = {**verdict.record, "seconds": 0.0 if known else verdict.record["seconds"], "known": known}
        if not verdict.is_clean and (self._plan.check == "strict" or verdict.record["outcome"] == "piece failed"):
            raise ConfigError(verdict.sentence)
        if not (known and verdict.is_clean):
            self._members.cluster.notice(verdict.sentence)
        if {WEIGHTS, COUPLED} & set(verdict.record.get("causes", ())):  # a notice is seen where somebody looks for it
            warnings.warn(verdict.sentence, stacklevel=2)

    # ------------------------------------------------------------------------------------------------------- asking

    def _is_asked(self, answer: StepChecked) -> bool:
        return answer.run_id == self._members.replica_set.run_id and answer.request_id == self._request

    def _judge(self, question: Question, rank: int) -> _Verdict:
        started, total = time.monotonic(), question.batch.rows
        rows, earlier, fine = first_rows(total), None, True
        while True:
            answer, problem = self._ask(question, rank, rows, fine)
            fits = answer is None or answer.outcome != _OUT_OF_MEMORY
            if answer is not None and not fits and earlier is None and rows >= 4:
                rows //= 2
                continue
            if answer is not None and fine and _is_doubtful(answer):  # the shares of the whole batch are what counts
                earlier, rows, fine = (answer, rows), total, False
                continue
            missing = answer is None or not fits
            by_chance = answer is not None and not _is_doubtful(answer)
            if earlier is not None and (missing or (by_chance and earlier[0].outcome not in _FAILED)):
                (answer, rows), problem = earlier, ""  # what few samples gave holds
            seconds = time.monotonic() - started
            return _verdict(self._members.replica_set.spec, question, self._name(rank), rows, answer, problem, seconds)

    def _name(self, rank: int) -> str:
        return self._members.cluster.name(rank)

    def _ask(self, question: Question, rank: int, rows: int, fine: bool = False) -> tuple[StepChecked | None, str]:
        """Ask a worker; without an answer, why there is none. It is asked once: code that ends one worker may end all."""
        replicas, cluster = self._members.replica_set, self._members.cluster
        self._request = replicas.next_request()
        self._answers.clear()
        message, buffers = question.message(replicas.run_id, self._request, rows, fine)
        nbytes = sum(buffer.nbytes for buffer in buffers)
        if nbytes > (_FEW_BYTES if 2 < rows < question.batch.rows else _MOST_BYTES):
            if rows <= 2 or rows == question.batch.rows > first_rows(rows):
                return (
                    None,
                    f"{rows} samples, whole and cut, have {show_bytes(nbytes)}, and at most {show_bytes(_MOST_BYTES)} are sent",
                )
            return self._ask(question, rank, 2)
        if not self._gate.affords(nbytes):
            return None, f"its {show_bytes(nbytes)} have no room in the budget"
        with self._gate.aside():
            cluster.send(rank, message, buffers)
            self._job.pump(lambda: rank in self._answers or rank not in self._job.ready or rank not in replicas.at)
        answer = self._answers.get(rank)
        return answer, "" if answer is not None else f"{self._name(rank)} was lost, or broke off, meanwhile"


def _is_doubtful(answer: StepChecked) -> bool:
    """Whether samples of the same batch that were left out may change the finding."""
    return answer.outcome in _FAILED or WEIGHTS in answer.causes or COUPLED in answer.causes


def digest_of(replicas: ReplicaSet, content: Any, weights: Sequence[float]) -> bytes:
    """Return what a finding depends on: model and loss, their source, the form of a batch, and how it is shared."""
    spec = replicas.spec
    record = (spec.model, spec.criterion, spec.step, spec.preprocess, spec.augment, spec.precision, spec.parallel,
              spec.sync_batchnorm, replicas.cells)  # fmt: skip
    form = [(str(getattr(leaf, "dtype", type(leaf))), getattr(leaf, "shape", ())[1:]) for leaf in leaves(content)]
    ratio = weights[0] / sum(weights)
    return hashlib.blake2b(msgspec.msgpack.encode(record) + repr((form, ratio)).encode()).digest()


def found_before(replicas: ReplicaSet, digest: bytes, data: Any) -> _Verdict | None:
    """Return what a check of the same has come to for the same data set: another one may pad or mask otherwise."""
    reference, verdict = replicas.checks.get(digest, (None, None))
    return verdict if reference is not None and reference() is data else None


def _reference(data: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(data)
    except TypeError:  # lists and tuples know no such references
        return lambda: data


# --------------------------------------------------------------------------------------------------------------- words


def _verdict(
    spec: RunSpec, question: Question, name: str, rows: int, answer: StepChecked | None, problem: str, seconds: float
) -> _Verdict:
    total = question.batch.rows
    record: dict[str, Any] = {"worker": name, "samples": rows, "batch_samples": total, "seconds": seconds}
    if answer is None or answer.outcome in (_OUT_OF_MEMORY, "large", "whole failed") or RANDOMNESS in answer.causes:
        why = problem or _why_not(name, rows, answer)
        sentence = (
            f"The one-step check was not made ({seconds:.2g} s): {why}. A loss that couples samples would not be seen"
        )
        return _Verdict({**record, "outcome": "not checked", "reason": why}, sentence, False)
    record |= {
        "outcome": answer.outcome, "causes": list(answer.causes), "loss_whole": answer.loss[0], "loss_cut": answer.loss[1],
        "loss_difference": answer.loss_difference, "gradient_difference": answer.gradient_difference,
        "parameter": answer.parameter, "buffers": list(answer.buffers), "replaced_by_constants": list(answer.drawn),
        "precision": answer.precision,
    }  # fmt: skip
    some = f"{rows} samples" if rows == total else f"{rows} of the {total} samples"
    begin = f"One-step check: {some} of the first batch, whole and in pieces on {name} ({seconds:.2g} s)"
    if answer.outcome == "same" and not (_is_pipeline(spec) and answer.moved):
        drawn = f"; without {', '.join(answer.drawn)}, whose draws depend on the shares" if answer.drawn else ""
        return _Verdict(record, f"{begin}: loss and gradient are equal{drawn}", True)
    return _Verdict(record, f"{begin}: {'. '.join(_findings(spec, question, answer))}", False)


def _why_not(name: str, rows: int, answer: StepChecked | None) -> str:
    assert answer is not None
    if answer.outcome == _OUT_OF_MEMORY:
        return f"{rows} samples and a copy of the whole model do not fit the memory of {name}"
    if answer.outcome == "large":
        return f"the model is too large for {name} to hold a second, whole one"
    if answer.outcome == "whole failed":
        return f"{name} could not compute {rows} samples at once: {answer.problem}"
    return (
        f"the whole batch alone gives unlike losses on {name}: what the forward, the loss or the step keeps outside the model's "
        "parameters and buffers (Python attributes, counters, globals) changes with each call, or random numbers are not "
        "torch's. Each worker has its own of these; keep in a buffer (register_buffer) what must be alike"
    )


def _findings(spec: RunSpec, question: Question, answer: StepChecked) -> Iterator[str]:
    """Say what differs, why, and what to do, one sentence for each cause."""
    if answer.outcome == "piece failed":
        yield (
            f"a piece cannot be computed without the rest of the batch ({answer.problem}){_whole_parts(question)}. Where parts "
            "refer to positions in the batch, give a function that cuts it (split_fn), or make a list with one entry per sample"
        )
        return
    measured = (
        f"the loss is {answer.loss[0]:.6g} whole and {answer.loss[1]:.6g} cut, the gradient differs by "
        f"{answer.gradient_difference:.2g} of its size, most in {answer.parameter}"
    )
    if answer.causes:
        yield measured
    pipeline = _is_pipeline(spec)
    if BATCH_STATISTICS in answer.causes:
        cure = "use GroupNorm or LayerNorm" if pipeline else (
            "set_mode(..., sync_batchnorm=True) (%guava_mode --sync-batchnorm on) lets them see all samples"
        )  # fmt: skip
        yield f"Batch norms see their own piece of a batch only: {cure}"
    if WEIGHTS in answer.causes:
        yield (
            "The gradients of the pieces are right, but they count with wrong weights: return (loss_sum, count) instead of a "
            "mean, where count is what the mean divides by, such as the targets that are not ignored"
        )
    if COUPLED in answer.causes:
        yield from _about_coupling(question, "take a mode without stages, or --micro-batches 1" if pipeline else "")
    if pipeline and answer.moved:
        assert spec.parallel is not None
        yield (
            f"The forward changes the buffers {', '.join(answer.moved[:3])}, and a pipeline runs it for each of the "
            f"{spec.parallel.micro_batches} micro-batches of a step: take --micro-batches 1, or a mode without stages"
        )
    elif answer.buffers:
        yield (
            f"Buffers {', '.join(answer.buffers[:3])} would have other values than after the whole batch: workers average "
            "what a forward leaves in them"
        )


def _is_pipeline(spec: RunSpec) -> bool:
    return spec.parallel is not None and spec.parallel.pp > 1 and spec.parallel.micro_batches > 1


def _about_coupling(question: Question, way: str) -> Iterator[str]:
    if whole := _whole_parts(question):
        yield (
            f"{whole[2:-1].capitalize()}: where they refer to positions in the batch, give a function that cuts them with their "
            "samples (split_fn), or make a list with one entry per sample"
        )
    way = way or (
        "gather what it compares (from guava_nb import gather_batch; z = gather_batch(z)), or have one worker do each batch "
        "whole: shares=[1, 0] (--shares 1,0)"
    )
    begin = "Or the" if whole else "The"
    yield f"{begin} loss couples the samples of a batch, and this run trains on other numbers than plain PyTorch: {way}"


def _whole_parts(question: Question) -> str:
    """Name the parts of a batch that every worker gets whole."""
    rows = question.batch.rows
    if question.batch.source or rows < 2:
        return ""
    piece = question.splitter.split(question.content, [(0, 1)], rows)[0]
    pairs = zip(leaves(question.content), leaves(piece), strict=False)
    shapes = [f"{[*a.shape]}" for a, b in pairs if a.ndim and a.shape == b.shape]
    return f" (parts of shape {', '.join(shapes[:3])} go to every worker whole)" if shapes else ""
