"""All records by number, and the channels under which they travel and are counted."""

from __future__ import annotations

from guava_nb.protocol.messages import (
    code_records,
    collective_records,
    connection_records,
    group_records,
    measure_records,
    pass_records,
    report_records,
    row_records,
    run_records,
    step_records,
)
from guava_nb.protocol.messages.pass_records import CheckStep, Evaluate, Predict
from guava_nb.protocol.messages.step_records import BatchShard, SchedulerStep, StepWithoutShard
from guava_nb.protocol.messages.wire_types import Channel, Message

__all__ = ["FROM_WORKERS", "KIND_OF", "MESSAGE_KINDS", "channel_of", "counted_as"]

_SECTIONS = (
    *(connection_records, run_records, group_records, step_records, pass_records),
    *(row_records, collective_records, measure_records, report_records, code_records),
)
#: The records by number. 0 goes on with a payload and is no record.
MESSAGE_KINDS: dict[int, type[Message]] = {
    record.NUMBER: record
    for section in _SECTIONS
    for record in vars(section).values()
    if isinstance(record, type) and issubclass(record, Message) and record is not Message
}
KIND_OF: dict[type[Message], int] = {record: kind for kind, record in MESSAGE_KINDS.items()}

#: What a session may bring to an orchestrator: all else is its own to say, or belongs to a connection or a visit.
FROM_WORKERS: frozenset[type[Message]] = frozenset(
    {
        *(run_records.Hello, run_records.Prepared, run_records.Leave),
        *(step_records.StateLoaded, step_records.State, step_records.GradientBucket, step_records.ShardReport),
        step_records.StepApplied,
        *(group_records.GroupFormed, group_records.ProbeListening, group_records.ProbeReport),
        *(pass_records.Evaluated, pass_records.Predicted, pass_records.Generated, pass_records.StepChecked),
        *(row_records.CacheHeld, row_records.RowList, row_records.RowsWanted, row_records.DataFacts),
        *(code_records.CodeRan, code_records.CodeValues),
        *(report_records.Log, report_records.Failure, report_records.Energy, measure_records.LineMeasured),
        *(
            collective_records.StoreAsk,
            collective_records.OpenGroup,
            collective_records.LeaveGroup,
            collective_records.Piece,
        ),
        *(collective_records.Parcel, collective_records.Expire),
    }
)


def channel_of(message: Message) -> Channel:
    """Return the channel on which a sequenced record travels."""
    return message.CHANNEL


def counted_as(message: Message, payload_bytes: int) -> Channel:
    """Return the channel under which a record's bytes are reported: BATCH is for samples, not for orders about them."""
    channel = channel_of(message)
    if channel is not Channel.BATCH:
        return channel
    if isinstance(message, StepWithoutShard | SchedulerStep):
        return Channel.CONTROL
    if not isinstance(message, BatchShard | Evaluate | Predict | CheckStep):
        return channel
    if message.source:
        return Channel.CONTROL
    if isinstance(message, CheckStep):
        return channel
    if payload_bytes or not message.cached or any(not c.keys or c.states.strip(b"\0") for c in message.cached):
        return channel
    return Channel.CONTROL
