"""Two machines that cannot reach each other and one that both reach: gloo cannot start between them, guava trains.

First with the hub on the common one; then with a notebook on each of the two, and on the common one nothing but sshd.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support import sshd
from tests.support.kernels import Kernel
from tests.support.namespaces import Island, enter, ip, islands, why_not
from tests.support.processes import eventually

pytestmark = pytest.mark.timeout(150)

PROGRAMS = ["-m", "tests.support.namespace_programs"]


@pytest.fixture(autouse=True)
def _permitted() -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)


def text(folder: Path) -> str:
    return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(folder.glob("*.log")))


def test_gloo_cannot_start_where_guava_trains(tmp_path: Path) -> None:
    with islands(2) as (hub, others):
        hub.start([*PROGRAMS, "store", str(tmp_path)], tmp_path / "store.log")
        port = eventually(lambda: (tmp_path / "port").exists() and (tmp_path / "port").read_text(), 40, "the store")
        ranks = [
            island.start(
                [*PROGRAMS, "gloo", island.hub, port, str(rank), island.interface], tmp_path / f"gloo{rank}.log"
            )
            for rank, island in enumerate(others)
        ]
        for rank in ranks:
            rank.wait(70)
        for rank in (0, 1):
            said = (tmp_path / f"gloo{rank}.log").read_text()
            assert "met at the store" in said, text(tmp_path)
            assert "gloo failed" in said, text(tmp_path)
            assert "gloo started" not in said, text(tmp_path)


def test_guava_trains_between_workers_that_only_reach_the_hub(tmp_path: Path) -> None:
    jobs = [("zero", {"zero_stage": 2}), ("pipeline", {"micro_batches": 2}), ("tensor", {"tp": 2})]
    with islands(2) as (hub, others):
        orchestrator = hub.start([*PROGRAMS, "orchestrate", str(tmp_path), json.dumps(jobs)], tmp_path / "hub.log")
        eventually(lambda: (tmp_path / "code.json").exists(), 40, f"a join code {text(tmp_path)}")
        for k, (island, code) in enumerate(zip(others, json.loads((tmp_path / "code.json").read_text()), strict=True)):
            words = ["-m", "guava_nb", "worker", code, "--device", "cpu", "--name", f"w{k + 1}"]
            island.start(words, tmp_path / f"worker{k}.log")
        orchestrator.wait(110)
        assert (tmp_path / "results.json").exists(), text(tmp_path)
        results = json.loads((tmp_path / "results.json").read_text())
    assert [result["mode"] for result in results] == ["zero", "pipeline", "tensor"]
    for result in results:
        assert result["gap"] <= 1e-9, result
        assert result["path"]["path"] == "relay", result
        assert "cannot reach w" in result["path"]["reason"], result
        told = [note for note in result["notes"] if "the group goes through the orchestrator" in note]
        assert len(told) == 1, "told once a run, and forgotten with the run"


SHARE = """%%guava_share --name model
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return self.body(x.double() / 16)
"""
DATA = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from guava_nb.datasets.digits import split_digits
train = DataLoader(TensorDataset(*split_digits(0)[0]), 128)

def distance(run):
    "Largest difference of any weight from a plain loop over the same batches."
    torch.manual_seed(0)
    plain = Net().double()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.005)
    for inputs, targets in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
    with torch.no_grad():
        return max(float((a - b).abs().max()) for a, b in zip(plain.parameters(), run.model().parameters()))
"""
TRAIN = "%guava_train --model Net --loss CrossEntropyLoss --data train --optimizer Adam --lr 0.005 --precision fp64"
REACH = """
import socket
for address in {addresses}:
    try:
        socket.create_connection(address, 2).close()
        print("reached", address)
    except OSError as problem:
        print("not reached", address, problem)
"""


def test_two_notebooks_meet_at_an_ssh_host_that_is_all_that_both_reach(tmp_path: Path) -> None:
    if sshd.why_not():
        pytest.skip(sshd.why_not())
    with islands(2) as (hub, (laptop, gpu)):
        # The one address of the relay's machine by which both know it; nothing is forwarded there.
        ip("-n", gpu.name, "route", "add", f"{laptop.hub}/32", "via", gpu.hub)
        server = sshd.Sshd(tmp_path / "server", laptop.hub, prefix=enter(hub))
        server.start("GatewayPorts clientspecified")
        try:
            train_behind_ssh(server, laptop, gpu)
        finally:
            server.stop()


def train_behind_ssh(server: sshd.Sshd, laptop: Island, gpu: Island) -> None:
    here, there = Kernel(*enter(laptop), PATH=server.path), Kernel(*enter(gpu))
    try:
        for kernel in (here, there):
            kernel.run("%load_ext guava_nb")
        shown = here.run("%guava_up --tunnel ssh:relay --workers 1")
        found = re.search(r"guava1:[\w-]+", shown)
        assert found and f"open at {laptop.hub}:" in shown and "tunnel" in shown, shown
        sockets = [(laptop.address, server.port), (laptop.hub, server.port)]
        reached = there.run(REACH.format(addresses=sockets))
        assert reached.count("not reached") == 1 and f"reached ('{laptop.hub}'" in reached, reached
        working = there.start(f"%guava_worker {found[0]} --device cpu --name gpu")
        here.run(DATA)
        here.run(SHARE)
        assert "gpu" in here.run(f"{TRAIN} --out run")
        assert float(here.run("distance(run)")) <= 1e-9

        # Another address in the open session: the worker waits, gives its cell back, and goes on by the new code.
        moved = re.search(r"guava1:[\w-]+", here.run(f"%guava_up --tunnel ssh:relay:{sshd.free_port()}"))
        assert moved and moved[0] != found[0]
        there.wait_for("a new join code may be needed")
        there.interrupt()
        status, text = working()
        assert status == "ok" and "%guava_worker NEWCODE" in text and "Traceback" not in text, text
        working = there.start(f"%guava_worker {moved[0]}")
        eventually(lambda: "gpu: connection is back" in here.run("%guava_status"), 30, "it is back")
        assert "gpu" in here.run(f"{TRAIN} --fresh --out run")
        assert float(here.run("distance(run)")) <= 1e-9
        assert here.run("run.report()['lost_samples'], run.report()['duplicated_samples']").strip() == "(0, 0)"
        here.run("%guava_down")
        status, text = working()
        assert status == "ok" and "closed the session" in text, text
        assert not [child for child in here.children() if child.name() == "ssh"]
    finally:
        for kernel in (here, there):
            kernel.close()
