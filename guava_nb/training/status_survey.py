"""Gathers what a status shows from the cluster, the sessions and the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.roster import Member
from guava_nb.cluster.seat_sessions import Counted
from guava_nb.cluster.traffic import KINDS, collectives_of, kind_of
from guava_nb.config import DistributedConfig
from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import Channel, RunSpec
from guava_nb.status import Status, WireBytes, WorkerStatus
from guava_nb.telemetry.machine import device_now
from guava_nb.training.run import Run

__all__ = ["note_workers", "note_waits", "survey", "total_bytes", "wire_bytes", "wire_meter"]


def survey(
    cluster: Cluster | None,
    where: tuple[str, str, str],
    config: DistributedConfig,
    run: Run | None,
    cells: tuple[str, ...],
    notes: tuple[tuple[int, str], ...],
) -> Status:
    """Return a snapshot of a session.

    Args:
        where: its address, how the tunnel that leads there stands, and what has to be done for it; "" for nothing.
        notes: numbered.
    """
    workers = () if cluster is None else tuple(_worker(m, cluster, run) for m in cluster.members())
    return Status(
        state="closed" if cluster is None else "open",
        address=where[0],
        mode=_mode(config, cluster),
        expected_workers=config.num_workers,
        workers=workers,
        run=None if run is None else run.status(),
        cells=cells,
        notes=tuple(sentence for _, sentence in notes),
        tunnel=where[1],
        tunnel_note=where[2],
        note_numbers=tuple(number for number, _ in notes),
    )


def _mode(config: DistributedConfig, cluster: Cluster | None) -> str:
    try:
        return config.mode((len(cluster.roster.ready()) or None) if cluster is not None else None)
    except ConfigError as error:  # too few are here so far, say: the sentence is what a person needs
        return f"cannot be made of the workers that are here: {error}"


def _worker(member: Member, cluster: Cluster, run: Run | None) -> WorkerStatus:
    session, total, before = cluster.session(member.rank), cluster.seats.total_bytes(member.rank), member.bytes_before
    rates = cluster.rates(member.rank)
    queued = (0, 0) if run is None else run.feeding().in_flight.get(member.rank, (0, 0))
    busy = run is not None and not run.done and member.state == "ready"
    return WorkerStatus(
        name=member.name,
        rank=member.rank,
        state="working" if busy else member.state,
        device=member.hello.device,
        device_name=member.hello.device_name,
        hostname=member.hello.hostname,
        share=member.share,
        step_s=member.step_s,
        wait_s=member.wait_s,
        round_trip_s=session.round_trip_s if session is not None else None,
        samples=member.samples,
        out_bytes=total[0] - before[0],
        in_bytes=total[1] - before[1],
        detail=member.detail,
        queued_batches=queued[0],
        queued_bytes=queued[1],
        rate_out_bytes_s=rates[0],
        rate_in_bytes_s=rates[1],
        worker_waits=member.waits.worker_waits,
        data_waits=member.waits.data_waits,
        awaited_s=session.patience_s(time.monotonic()) if session is not None and member.state == "suspect" else None,
        **_device_now(cluster, member, busy),
    )


def _device_now(cluster: Cluster, member: Member, at_work: bool) -> dict[str, Any]:
    told = cluster.energy.newest(member.rank)
    return {} if told is None else device_now(told, member.hello.device == "cpu", at_work)


def wire_bytes(sessions: Iterable[Counted], parameters_come_down: bool, collectives: str = "gradient") -> WireBytes:
    """Add up the counters of sessions by kind of traffic; see `guava_nb.cluster.traffic.kind_of`."""
    kinds = dict.fromkeys(KINDS, 0)
    out_bytes = in_bytes = 0
    for session in sessions:
        wire = session.wire
        for outwards, counted in ((True, wire.out_bytes), (False, wire.in_bytes)):
            for channel, nbytes in counted.items():
                kinds[kind_of(Channel(channel), outwards, parameters_come_down, collectives)] += nbytes
        out_bytes += sum(wire.out_bytes.values())
        in_bytes += sum(wire.in_bytes.values())
    return WireBytes(out_bytes, in_bytes, **{f"{kind}_bytes": nbytes for kind, nbytes in kinds.items()})


def wire_meter(cluster: Cluster, spec: RunSpec) -> Callable[[], WireBytes]:
    """Return a function that counts the bytes since now, of workers that are gone too."""
    down = spec.optimizer_site == "orchestrator"
    kind = collectives_of(spec)
    start = wire_bytes(cluster.seats.counted(), down, kind)

    def read() -> WireBytes:
        now = wire_bytes(cluster.seats.counted(), down, kind)
        return WireBytes(**{name: getattr(now, name) - getattr(start, name) for name in WireBytes.__slots__})

    return read


def total_bytes(wire: WireBytes) -> int:
    """Return the bytes of both directions."""
    return wire.out_bytes + wire.in_bytes


def note_waits(members: Iterable[Member]) -> list[dict[str, Any]]:
    """Return for each member that has worked the parts of the time, 0 to 1, in which GPU or data waited for the other."""
    return [
        {
            "worker": member.name,
            "gpu_waits_for_data": member.waits.worker_waits,
            "data_waits_for_gpu": member.waits.data_waits,
            "seconds": member.waits.watched_s,
        }
        for member in members
        if member.waits.worker_waits is not None
    ]


def note_workers(run: Run, members: Iterable[Member]) -> None:
    """Note in a run the workers that are here or took part, those included that are gone by its end."""
    for member in members:
        if not (member.alive or member.samples):
            continue
        device = member.hello.device_name
        run.workers.append({"worker": member.name, "device": device, "state": member.state, "samples": member.samples})
