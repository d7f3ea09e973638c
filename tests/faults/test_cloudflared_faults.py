"""Training through a quick tunnel whose program is killed in mid-run and comes back under another name."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from guava_nb.tunnels.cloudflared import CloudflaredTunnel
from tests.support.cloudflared import FakeCloudflared
from tests.support.processes import ROOT, PlainTraining, Session, eventually, loader

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="the stand-in is started by its first line"),
]


class AtStep:
    """A callback that acts once, between two steps."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_step(self, run: Any, record: dict[str, Any]) -> None:
        if record["step"] == self.step:
            self.action()


def test_a_program_that_is_killed_comes_back_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCloudflared(tmp_path)
    for name, value in {**fake.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(CloudflaredTunnel, "settle_s", 0.0)
    tunnel = f"cloudflared:{fake.program}"
    session = Session(tmp_path, num_workers=2, tunnel=tunnel, heartbeat_s=0.5, silence_s=4.0, grace_s=4.0)
    try:
        workers, old = session.ensure(2), session.orch.join_code
        assert old.scheme == "wss" and old.fingerprint, "our TLS is inside"
        (first,) = fake.alive()
        killing = AtStep(2, lambda: os.kill(first, signal.SIGKILL))
        run = session.train(loader(), callbacks=[killing], detach=True)
        eventually(lambda: session.orch.join_code != old, 60, "the new name is known")
        for worker in workers:
            worker.handle.redirect(session.orch.join_code)
        session.assert_undisturbed(run, PlainTraining(session.folder, loader()).epochs(2))
        eventually(lambda: len(session.ready()) == 2, 20, "both are back")
        assert session.orch._listener is not None
        assert session.orch._listener.stats.accepted <= 10, "two a worker, twice, and hardly more"
    finally:
        session.close()
    assert fake.alive() == []
