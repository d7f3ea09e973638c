"""The stand-in for cloudflared (`fake_cloudflared.py`) as tests use it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from guava_nb.tunnels.cloudflared import CloudflaredTunnel
from tests.support.nginx import certify
from tests.support.processes import ROOT


class FakeCloudflared:
    """The stand-in as a program in a folder, and its switches.

    Attributes:
        environment: variables that it needs, and by which its public side is trusted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.plan = folder, folder / "plan.json"
        self.program = folder / "cloudflared"
        self.program.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/support/fake_cloudflared.py "$@"\n')
        self.program.chmod(0o700)
        self.environment = {"FAKE_CLOUDFLARED": str(self.plan), "SSL_CERT_FILE": str(folder / "authority.pem")}
        certify(folder)
        (folder / "both.pem").write_bytes((folder / "server.pem").read_bytes() + (folder / "server.key").read_bytes())
        self.set()

    def set(self, **switches: Any) -> None:
        self.plan.write_text(json.dumps({"certificate": str(self.folder / "both.pem"), **switches}))

    def tunnel(self) -> CloudflaredTunnel:
        return CloudflaredTunnel(str(self.program))

    def started(self) -> list[int]:
        return [int(path.stem) for path in self.folder.glob("*.json") if path.stem.isdigit()]

    def alive(self) -> list[int]:
        return [pid for pid in self.started() if runs(pid)]


@contextmanager
def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloudflared]:
    """The stand-in on PATH's terms, without a wait until it has settled; what it leaves running is ended, and fails the test."""
    made = FakeCloudflared(folder)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(CloudflaredTunnel, "settle_s", 0.0)
    yield made
    left = made.alive()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def runs(pid: int) -> bool:
    """Whether it runs: one that only waits to be asked how it ended does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
