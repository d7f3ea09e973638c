"""A question about a batch, and what the answer says to its reader.

Knows findings and batches; sends nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from msgspec.structs import replace
from torch import nn

from guava_nb.config.units import show_time
from guava_nb.data.codec import pack
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.split import RowSplitter, share_ranges
from guava_nb.nested import Range, leaves
from guava_nb.protocol.messages import CheckStep, Finding, RunSpec
from guava_nb.replica.one_step_check.causes import (
    BACKWARD,
    BATCH_STATISTICS,
    COUNT,
    COUPLED,
    FREQUENCY,
    RANDOMNESS,
    STATE,
    SUM,
    TERM,
    TREATED,
    WEIGHTS,
)
from guava_nb.spec.own_code import is_own, users_function

__all__ = ["OUT_OF_MEMORY", "Question", "Verdict", "about_hooks", "verdict_on"]

OUT_OF_MEMORY = "memory"


@dataclass(frozen=True)
class Question:
    """Asks for a batch, or its first samples.

    Attributes:
        batch: of the loader.
        content: what the loader gave; of samples that lie at the workers their ids.
        weights: of the pieces.
        splitter: cuts it.
        step: the batch is of this one, from 0 in the run.
        news: what the batch has that those before it had not, in words.
        row: the sample that shows it.
        is_validated: the run has validations.
        is_whole: all samples are looked at, also where few show nothing.
    """

    batch: LoadedBatch
    content: Any
    weights: tuple[float, ...]
    splitter: RowSplitter
    step: int = 0
    news: str = ""
    row: int = 0
    is_validated: bool = False
    is_whole: bool = False

    @property
    def about(self) -> str:
        """Which batch this is, in words."""
        why = f", because {self.news}" if self.news else ""
        return "the first batch" if not self.step else f"the batch of step {self.step + 1}{why}"

    def message(
        self, run_id: str, request: int, rows: int, fine: bool, weights: Mapping[str, Any] | None = None
    ) -> tuple[CheckStep, Sequence[memoryview]]:
        """Return the record that asks about `rows` samples, with their bytes; `fine`: in pieces of two samples.

        `weights` are those to compare with, as `Replica.state` gives the model; None: those that the worker has or builds.

        They are the first ones, or those around the one that shows what is new.

        Small pieces show what depends on other samples where two large ones may come to the same by chance.
        """
        ranges = self._in_pairs(rows) if fine and rows >= 4 else self._in_shares(rows)
        first = max(0, min(self.row - 1, self.batch.rows - rows))
        batches = [self.content] if rows == self.batch.rows else self._cut([(first, first + rows)])
        if not self.batch.source:  # a worker that has the samples cuts what it loads
            batches += self._cut([(first + start, first + stop) for start, stop in ranges])
        tree, buffers = pack(batches if weights is None else [*batches, weights])
        counts = (rows, *(stop - start for start, stop in ranges))
        record = CheckStep(
            run_id=run_id, request_id=request, rows=counts, batch=tree, source=self.batch.source,
            has_weights=weights is not None,
        )  # fmt: skip
        return record, buffers

    def are_lone(self, rows: int) -> bool:
        """Whether each worker gets one of so many samples, or none."""
        return all(stop - start == 1 for start, stop in self._in_shares(rows))

    def leaves_one(self, rows: int) -> bool:
        """Whether some worker gets one of so many samples."""
        return any(stop - start == 1 for start, stop in self._in_shares(rows))

    def is_cut_finer(self, rows: int) -> bool:
        """Whether pieces of two samples say less than the shares of all would: there are more, or these part other samples."""
        begins = ({start for start, _ in ranges} for ranges in (self._in_shares(rows), self._in_pairs(rows)))
        return rows < self.batch.rows or (rows >= 4 and not next(begins) <= next(begins))

    def _in_shares(self, rows: int) -> list[Range]:
        return [part for part in share_ranges(rows, self.weights) if part[1] > part[0]]

    def _in_pairs(self, rows: int) -> list[Range]:
        return list(pairwise([*range(0, rows - 1, 2), rows]))

    def _cut(self, ranges: Sequence[tuple[int, int]]) -> list[Any]:
        cutter = RowSplitter() if self.batch.source else self.splitter
        return cutter.split(self.content, ranges, self.batch.rows)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check has come to: its record for the report, a sentence, and whether pieces give what the whole gives.

    Attributes:
        compared: whole numbers that the loss compares targets with.
        is_refused: the run cannot go on, strict or not.
    """

    record: dict[str, Any]
    sentence: str
    is_clean: bool
    compared: tuple[int, ...] = ()
    is_refused: bool = False


#: What a loss needs that compares samples.
_ON_ONE = "have one worker do each batch whole: shares=[1, 0] (--shares 1,0; a 0 for each further worker)"
_TOGETHER = f"gather what it compares (from guava_nb import gather_batch; z = gather_batch(z)), or {_ON_ONE}"
_TOGETHER_IN_STAGES = "take a mode without stages, or --micro-batches 1"
_WRONG_WEIGHTS = (
    "The gradients of the pieces are right, but they count with wrong weights: return (loss_sum, count) instead of a mean, where "
    "count is what the mean divides by, such as the targets that are not ignored. A loss that is no sum over a count (the root "
    "of a mean, say) needs its samples together:"
)
_WRONG_SUM = (
    "The loss adds up its samples, and what a step or an own criterion returns is taken for a mean over them, so each piece "
    "counts by its share only: return (loss_sum, count) for a mean, or (loss, None) for this sum as it is"
)
_WRONG_COUNT = (
    "The counts that the step returns for the pieces do not add up to that of the whole batch, as where each is clamped "
    "(clamp(min=1)), and the loss is the sum of the losses by that of the counts: return the count as it is, 0 where "
    "nothing counts"
)
_REPEATED_TERM = (
    "A term of the loss is no sum over samples (a penalty on weights, say) and stands beside one that is, so each piece adds it "
    "once more: return the mean of the losses plus that term, or (loss_sum + count * term, count), or"
)
_BY_FREQUENCY = (
    "An embedding with scale_grad_by_freq divides its gradient by how often an index stands in the batch, and each piece counts "
    "its own: leave scale_grad_by_freq out, or"
)
#: Modules that a message names.
_MOST_HOOKED = 3


def verdict_on(
    spec: RunSpec,
    question: Question,
    name: str,
    rows: int,
    answer: Finding | None,
    problem: str,
    seconds: float,
    unseen: str = "",
) -> Verdict:
    """Return what an answer, or its absence, comes to.

    Args:
        spec: of the run.
        question: that was asked.
        name: of the worker.
        rows: samples that were looked at.
        answer: None where there is none; then `problem` says why.
        problem: in words.
        seconds: that it took.
        unseen: why the whole batch was not looked at.
    """
    total = question.batch.rows
    if (
        answer is not None and answer.fits and spec.parallel is not None and spec.parallel.pp > 1
    ):  # stages keep their own rules
        buffers = (*answer.buffers, *answer.fits)
        answer = replace(answer, buffers=buffers, fits={}, outcome=answer.outcome.replace("same", "differs"))
    record: dict[str, Any] = {"worker": name, "samples": rows, "batch_samples": total, "seconds": seconds}
    if (
        answer is None
        or answer.outcome in (OUT_OF_MEMORY, "large", "whole failed")
        or {RANDOMNESS, STATE} & set(answer.causes)
    ):
        why = problem or _why_not(name, rows, answer)
        sentence = f"The one-step check was not made ({show_time(seconds)}): {why}. A loss that couples samples would not be seen"
        return Verdict({**record, "outcome": "not checked", "reason": why}, sentence, False)
    record |= {
        "outcome": answer.outcome, "causes": list(answer.causes), "loss_whole": answer.loss[0], "loss_cut": answer.loss[1],
        "loss_difference": answer.loss_difference, "gradient_difference": answer.gradient_difference,
        "parameter": answer.parameter, "buffers": list(answer.buffers), "replaced_by_constants": list(answer.drawn),
        "precision": answer.precision, "kept_in_python": list(answer.kept),
        "unlike_in_python": list(answer.unlike or _looked(question, answer)), "written": list(answer.written),
        "moved": list(answer.moved), "policies": dict(answer.fits),
        "gradient_norm": answer.gradient_norm, "run_precision": spec.precision, "wire": spec.wire,
    }  # fmt: skip
    some = f"{rows} samples" if rows == total else f"{rows} of the {total} samples"
    begin = f"One-step check: {some} of {question.about}, whole and in pieces on {name} ({show_time(seconds)})"
    if refusal := _about_writes(spec, answer):
        return Verdict({**record, "outcome": "writes"}, f"{begin}: {refusal}", False, answer.compared, is_refused=True)
    runs_often = _is_pipeline(spec) and (answer.moved or answer.kept)
    if answer.outcome == "same" and not runs_often and not _looked(question, answer):
        drawn = f", apart from {', '.join(answer.drawn)}, whose draws depend on the shares" if answer.drawn else ""
        few = f". Not all of the batch was looked at ({unseen}), so what begins with more samples was not seen"
        equal = f"loss and gradient are equal{drawn}{''.join(_about_fits(answer, '; '))}{few if unseen else ''}"
        return Verdict(record, f"{begin}: {equal}", True, answer.compared)
    failed = answer.outcome == "piece failed" or (rows == total and not math.isfinite(answer.loss[1]))
    return Verdict(record, f"{begin}: {'. '.join(_findings(spec, question, answer))}", False, answer.compared, failed)


def _why_not(name: str, rows: int, answer: Finding | None) -> str:
    assert answer is not None
    if answer.outcome == OUT_OF_MEMORY:
        return f"{rows} samples and a copy of the whole model do not fit the memory of {name}"
    if answer.outcome == "large":
        return f"the model is too large for {name} to hold a second, whole one"
    if answer.outcome == "whole failed":
        return f"{name} could not compute {rows} samples at once: {answer.problem}"
    if STATE in answer.causes:
        return (
            f"the whole batch alone, computed twice on {name} with the same random numbers, gives different losses: what the "
            "model, the loss or the step keeps outside parameters, buffers and plain Python attributes changes with each call. "
            "Each worker has its own of it, and these tries have moved it there and could not put it back: keep it in a buffer "
            "(register_buffer), or start again with check='off' (--check off)"
        )
    streams = [one for one in answer.drawn if not one.isidentifier()]
    which = f" ({', '.join(streams)})" if streams else ""
    return (
        f"the loss depends on random numbers that are not drawn by torch's own functions{which}, or by some that are not known "
        "here, so they cannot be held still, "
        "and each worker draws its own: draw them with torch (torch.rand), or before the batch is made"
    )


def _findings(spec: RunSpec, question: Question, answer: Finding) -> Iterator[str]:
    """Say what differs, why, and what to do, one sentence for each cause."""
    pipeline = _is_pipeline(spec)
    if answer.outcome == "piece failed" or not math.isfinite(answer.loss[1]):
        yield from _about_failed(question, answer, _TOGETHER_IN_STAGES if pipeline else _ON_ONE)
        return
    measured = (
        f"the loss is {answer.loss[0]:.6g} whole and {answer.loss[1]:.6g} cut, the gradient differs by "
        f"{answer.gradient_difference:.2g} of its size, most in {answer.parameter}"
    )
    if answer.causes:
        yield measured
    if BATCH_STATISTICS in answer.causes:
        cure = "use GroupNorm or LayerNorm" if pipeline else (
            "set_mode(..., sync_batchnorm=True) (%guava_mode --sync-batchnorm on) lets them see all samples"
        )  # fmt: skip
        yield f"Batch norms see their own piece of a batch only: {cure}"
    together = _TOGETHER_IN_STAGES if pipeline else _TOGETHER
    if WEIGHTS in answer.causes:
        yield f"{_WRONG_WEIGHTS} {together}"
    yield from (sentence for cause, sentence in ((SUM, _WRONG_SUM), (COUNT, _WRONG_COUNT)) if cause in answer.causes)
    for cause, sentence in ((TERM, _REPEATED_TERM), (FREQUENCY, _BY_FREQUENCY)):
        if cause in answer.causes:
            yield f"{sentence} {_TOGETHER_IN_STAGES if pipeline else _ON_ONE}"
    if BACKWARD in answer.causes:
        yield (
            "The step calls backward() by itself, and that gradient counts in full for each piece, not by its share of the "
            "samples, so this run trains on other numbers than plain PyTorch: add that loss to the one that the step returns, "
            "and leave its backward() out"
        )
    if COUPLED in answer.causes:
        if other := question.splitter.reading.on_second_axis(question.content):
            yield other
        yield from _about_coupling(question, together, () if pipeline else answer.moved)
    yield from _about_treated(spec, answer)
    yield from _about_python(spec, question, answer)
    yield from _about_buffers(spec, answer)
    yield from (one[0].upper() + one[1:] for one in _about_fits(answer))


def _about_treated(spec: RunSpec, answer: Finding) -> Iterator[str]:
    """Say what augments or prepares a batch by its samples together."""
    if TREATED in answer.causes:
        names = " and ".join(f"{name}=" for name in ("augment", "preprocess") if getattr(spec, name) is not None)
        yield (
            f"{names} compares the samples of a batch, and on each worker it sees its share only: let the collate function do "
            f"that (collate_fn=), which has the whole batch, or {_ON_ONE}"
        )


def _about_failed(question: Question, answer: Finding, together: str) -> Iterator[str]:
    """Say why a piece has no loss, or one that is no number."""
    if answer.outcome != "piece failed":
        yield (
            f"the loss is {answer.loss[0]:.6g} whole and {answer.loss[1]} cut: some piece has too few samples for what model or "
            "loss computes over them, such as a standard deviation of one sample or a mean of none. Give larger batches "
            f"(drop_last=True, if it is the last one), fewer workers or micro-batches, or {together}"
        )
    elif "got one value per channel" in answer.problem:
        yield f"a piece cannot be computed: {answer.problem.partition(': ')[2]}"
    else:
        yield (
            f"a piece cannot be computed without the rest of the batch ({answer.problem}){_whole_parts(question)}. Where parts "
            "refer to positions in the batch, give a function that cuts it (split_fn), or make a list with one entry per sample"
        )
        if guess := question.splitter.reading.guess:
            yield guess


def _about_writes(spec: RunSpec, answer: Finding) -> str:
    """Say why a run whose forward writes into trained parameters cannot be right; "" where it can."""
    if not answer.written:
        return ""
    name = (answer.written_unlike or answer.written)[0]
    if spec.parallel is not None and spec.parallel.zero_stage >= 2:
        return (
            f"the forward itself changes parameter {name!r}, and with ZeRO 2 and 3 that is a gathered copy, which is thrown "
            "away: use data mode or zero_stage=1 (--zero 1)"
        )
    if not answer.written_unlike:
        return ""
    if _is_pipeline(spec):
        return (
            f"the forward itself changes parameter {name!r}, and a pipeline runs it for each micro-batch: take --micro-batches "
            "1, or a mode without stages"
        )
    return (
        f"the forward itself changes parameter {name!r} by the samples that it sees, as nn.Embedding with max_norm does, so "
        "workers would go on with different weights: change all of the parameter, whatever the samples, or train with one worker"
    )


def _about_buffers(spec: RunSpec, answer: Finding) -> Iterator[str]:
    if _is_pipeline(spec) and answer.moved:
        assert spec.parallel is not None
        yield (
            f"The forward changes the buffers {', '.join(answer.moved[:3])}, and a pipeline runs it for each of the "
            f"{spec.parallel.micro_batches} micro-batches of a step: take --micro-batches 1, or a mode without stages"
        )
    elif answer.buffers:
        yield (
            f"Buffers {', '.join(answer.buffers[:3])} would have other values than after the whole batch: what workers change in "
            "them is averaged, or added up where it counts samples. Where each changes them by the whole batch (gather_batch), "
            f"take one worker's change: buffers='{answer.buffers[0]}=first' (--buffers)"
        )


def _about_fits(answer: Finding, before: str = "") -> Iterator[str]:
    if answer.fits:
        policies = ", ".join(f"{name}={policy}" for name, policy in [*answer.fits.items()][:3])
        yield (
            f"{before}buffers come to what the whole batch makes of them by {policies}, so this run takes that, as buffers= "
            "(--buffers) would"
        )


def _about_python(spec: RunSpec, question: Question, answer: Finding) -> Iterator[str]:
    if names := answer.unlike or (answer.kept if _is_pipeline(spec) else ()):
        yield _about_state(names[:3], spec)
    elif looked := _looked(question, answer):
        yield (
            f"Each forward changes {', '.join(looked[:3])}, in a validation too, and the next one depends on it. Workers "
            "validate different numbers of batches, and in data mode buffers go back to those of the last step, so it may differ "
            "from plain PyTorch from there on: let only a forward in training change it (if self.training:)"
        )


def _looked(question: Question, answer: Finding) -> tuple[str, ...]:
    return answer.kept_looking if question.is_validated else ()


def _about_state(names: Sequence[str], spec: RunSpec) -> str:
    what = f"{', '.join(names)}, which {'is' if len(names) == 1 else 'are'} no buffer of the model"
    if _is_pipeline(spec):
        assert spec.parallel is not None
        return (
            f"Each forward changes {what}, and one after it may depend on it: a pipeline runs the forward for each of the "
            f"{spec.parallel.micro_batches} micro-batches of a step: take --micro-batches 1, or a mode without stages"
        )
    return (
        f"Each forward changes {what}, by the samples that it sees, and the next one depends on it: every worker goes on with "
        "its own values, and this run trains on other numbers than plain PyTorch. Make it a buffer of the model "
        "(self.register_buffer), which workers keep alike"
    )


def _is_pipeline(spec: RunSpec) -> bool:
    return spec.parallel is not None and spec.parallel.pp > 1 and spec.parallel.micro_batches > 1


def _about_coupling(question: Question, way: str, moved: Sequence[str]) -> Iterator[str]:
    if whole := _whole_parts(question):
        yield (
            f"{whole[2:-1].capitalize()}: where they refer to positions in the batch, give a function that cuts them with their "
            "samples (split_fn), or make a list with one entry per sample"
        )
    begin = "Or the" if whole else "The"
    yield f"{begin} loss couples the samples of a batch, and this run trains on other numbers than plain PyTorch: {way}"
    if moved:
        yield (
            f"Or it depends on what the same forward has changed in the buffers {', '.join(moved[:3])} by its own samples: let "
            "the forward read them first and change them afterwards"
        )


def _whole_parts(question: Question) -> str:
    """Name the parts of a batch that every worker gets whole."""
    rows = question.batch.rows
    if question.batch.source or rows < 2:
        return ""
    # A part that is not cut is the same memory in both pieces; the entries of a list are of two samples.
    first, second = question.splitter.split(question.content, [(0, 1), (1, 2)], rows)
    pairs = zip(leaves(first), leaves(second), strict=False)
    shapes = [
        f"{[*a.shape]}"
        for a, b in pairs
        if a.ndim and a.numel() and a.shape == b.shape and a.data_ptr() == b.data_ptr()
    ]
    return f" (parts of shape {', '.join(shapes[:3])} go to every worker whole)" if shapes else ""


def about_hooks(model: nn.Module) -> str:
    """Say which modules have hooks of the user's own, since these see one worker's samples; "" for none."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    names = [
        name or type(module).__name__ for name, module in model.named_modules()
        if any(_is_users(hook) for kind in kinds for hook in getattr(module, kind, {}).values())
    ]  # fmt: skip
    if not names:
        return ""
    more = f" and {len(names) - _MOST_HOOKED} more modules" if len(names) > _MOST_HOOKED else ""
    return (
        f"The hooks on {', '.join(names[:_MOST_HOOKED])}{more} are called by each worker with its own samples, so what they "
        "compute over a batch is of a part of it, and what they keep stays at that worker"
    )


def _is_users(hook: object) -> bool:
    function = users_function(hook)
    return is_own(getattr(function, "__globals__", vars(sys.modules.get(type(function).__module__, sys))))
