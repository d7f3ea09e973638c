"""A session, a run and a worker to show."""

from __future__ import annotations

from guava_nb.status import RunStatus, Status, WireBytes, WorkerStatus

WORKER = WorkerStatus("gpu <1>", 0, "working", "cuda:0", "T4 & co", "host", 0.5, 0.0123, None, None, 320, 1_000_000, 12)
RUN = RunStatus(
    "r", "training", "data", 1, 3, 5, 69, 320, 12.3, 500.0, 0.25, ((1, 2.3), (5, 0.25)), ((5, 0.3, 0.91),), 1e-3,
    "waits for <worker>", WireBytes(10_000_000, 1_000_000, 5_000_000, 100, 2_000),
)  # fmt: skip
STATUS = Status("open", "127.0.0.1:4242", "data", 2, (WORKER,), RUN, ("model",), ("a note",))
