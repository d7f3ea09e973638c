"""What a worker was asked, told by what it was sent: written anew, so that it does not share an error with the product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from guava_nb.protocol import messages as m
from guava_nb.protocol.messages import Message

__all__ = ["ANSWERS", "TAINTING", "is_answer"]

#: Whether a record answers one of those that its sender was sent.
Rule = Callable[[Sequence[Message], Any], bool]


def _to(question: type[Message] | tuple[type[Message], ...], *fields: str) -> Rule:
    """An answer to a question in which these fields have the same values."""

    def rule(sent: Sequence[Message], answer: Any) -> bool:
        return any(
            isinstance(one, question) and all(getattr(one, name) == getattr(answer, name) for name in fields)
            for one in sent
        )

    return rule


def _applied(sent: Sequence[Message], answer: Any) -> bool:
    step = (m.BatchShard, m.StepWithoutShard, m.SumBucket, m.ParameterBucket, m.CommitStep, m.LoadState)
    return _to(step, "run_id", "step")(sent, answer) or _to(m.Abort, "run_id", "generation")(sent, answer)


def _failed(sent: Sequence[Message], answer: Any) -> bool:
    if answer.kind in (m.FailureKind.GROUP, m.FailureKind.TORN):  # a further run may go on with the group that stands
        return _to(m.FormGroup, "generation")(sent, answer)
    return _to(m.Prepare, "run_id", "generation")(sent, answer)


def _always(sent: Sequence[Message], answer: Any) -> bool:
    return True


#: Every record that a worker may send, and when it is an answer. "_always": it is about its sender alone.
ANSWERS: dict[type[Message], Rule] = {
    m.Hello: _always,
    m.Leave: _always,
    m.Log: _always,
    m.Energy: _always,
    m.StoreAsk: _always,
    m.OpenGroup: _always,
    m.LeaveGroup: _always,
    m.Piece: _always,
    m.Parcel: _always,
    m.Expire: _always,
    m.Prepared: _to(m.Prepare, "run_id", "generation"),
    m.StateLoaded: _to(m.LoadState, "run_id", "generation"),
    m.State: _to(m.FetchState, "run_id", "request_id"),
    m.GradientBucket: _to(m.BatchShard, "run_id", "generation", "step", "shard"),
    m.ShardReport: _to(m.BatchShard, "run_id", "generation", "step", "shard"),
    m.StepApplied: _applied,
    m.GroupFormed: _to(m.FormGroup, "run_id", "generation"),
    m.Evaluated: _to(m.Evaluate, "run_id", "request_id"),
    m.Predicted: _to((m.Evaluate, m.Predict), "run_id", "request_id"),
    m.Generated: _to(m.Predict, "run_id", "request_id"),
    m.StepChecked: _to(m.CheckStep, "run_id", "request_id"),
    m.Failure: _failed,
    m.CacheHeld: _to(m.Prepare, "run_id"),
    m.RowList: _to(m.ListRows, "run_id"),
    m.RowsWanted: _to((m.BatchShard, m.Evaluate, m.Prepare), "run_id"),
    m.DataFacts: _to(m.AskData, "request_id"),
    m.LineMeasured: _to(m.MeasureLine, "measuring_id"),
    m.CodeValues: _to(m.RunCode, "request_id"),
    m.CodeRan: _to((m.RunCode, m.RunProgram, m.InstallPackages, m.PlaceFiles), "request_id"),
    m.ProbeListening: _to(m.ProbeListen, "probe_id"),
    m.ProbeReport: _to(m.ProbeDial, "probe_id"),
}
#: Answers that a liar can put wrong numbers into, so that the weights are not those of plain PyTorch.
TAINTING = (m.GradientBucket, m.ShardReport, m.StepApplied, m.State)


def is_answer(sent: Sequence[Message], message: Message) -> bool:
    """Whether a record answers what its sender was sent, or is about its sender alone."""
    rule = ANSWERS.get(type(message))
    return rule is not None and rule(sent, message)
