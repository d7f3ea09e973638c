"""A group that is not formed leaves no member blocked in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from guava_nb.errors import PreparationError
from guava_nb.protocol.messages import Abort, FormGroup, GroupFormed, ParallelSpec
from guava_nb.sync import group_replica_set
from guava_nb.sync.group_replica_set import GroupReplicaSet
from tests.support.training import replica, spec


class Job:
    """Three members, of which the second refuses its part while the others are still at it."""

    def __init__(self) -> None:
        members = [SimpleNamespace(rank=rank) for rank in range(3)]
        roster = SimpleNamespace(members=members, generation=0)
        self.sent: list[tuple[int, Any]] = []
        self.ready, self.suspects, self.handlers = {0, 1, 2}, set[int](), dict[type, Any]()
        self.cluster = SimpleNamespace(
            roster=roster, relay=None, findings=None, send=self._send, name=lambda rank: f"w{rank}",
            send_all=lambda ranks, message: [self._send(rank, message) for rank in ranks],
        )  # fmt: skip

    def _send(self, rank: int, message: Any, buffers: Any = ()) -> None:
        self.sent.append((rank, message))

    def on(self, kind: type, handler: Any) -> None:
        self.handlers[kind] = handler

    def pump(self, until: Any, timeout_s: float | None = None) -> bool:
        orders = [message for _, message in self.sent if isinstance(message, FormGroup)]
        answer = GroupFormed(
            run_id=orders[0].run_id, generation=orders[0].generation, ok=False, problem="it cannot be cut"
        )
        self.handlers[GroupFormed](1, answer, memoryview(b""))
        assert until()
        return True


def orders(run_id: str, generation: int, members: Any, *_: Any) -> list[tuple[int, FormGroup, tuple[()]]]:
    names = tuple(f"w{rank}" for rank in members)
    return [
        (
            rank,
            FormGroup(
                run_id=run_id,
                generation=generation,
                name="group",
                rank=rank,
                members=names,
                backend="guava",
                timeout_s=9.0,
            ),
            (),
        )
        for rank in members
    ]


def test_members_that_are_still_at_a_group_which_one_refuses_are_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, made in (("side_by_side", lambda members, chosen: sorted(chosen)), ("machines_for", lambda *_: ((), ""))):
        monkeypatch.setattr(group_replica_set, name, made)
    monkeypatch.setattr(group_replica_set, "group_orders", orders)
    parallel = ParallelSpec(mode="tensor", dp=1, pp=1, tp=3)
    replicas, job = GroupReplicaSet("run", spec(parallel=parallel), (), replica(spec())), Job()
    replicas._relay_only = "the test"
    monkeypatch.setattr(replicas, "check", lambda job: None)
    job.on(GroupFormed, replicas._on_formed)
    with pytest.raises(PreparationError, match="w1 cannot take its part of the model: it cannot be cut"):
        replicas.load(job, {0, 1, 2}, dict, -1)  # type: ignore[arg-type]
    formed = max(message.generation for _, message in job.sent if isinstance(message, FormGroup))
    woken = {rank for rank, message in job.sent if isinstance(message, Abort) and message.generation > formed}
    assert woken == {0, 1, 2}
