"""Workers that listen and an orchestrator that dials: the same training, the same proof, the same resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from guava_nb import ClusterError, DistributedConfig, NetworkWorker, Orchestrator
from guava_nb.errors import AuthenticationError, GuavaError, JoinCodeError, LinkTimeout
from guava_nb.protocol.joincode import JoinCode
from tests.support.console import Console
from tests.support.processes import ROOT, eventually, loader
from tests.support.relay import Relay
from tests.support.training import SmallNet
from tests.support.training import difference as difference_of_modules

ARGUMENTS: dict[str, Any] = {
    "optimizer": "AdamW", "optimizer_args": {"lr": 0.01}, "precision": "fp64", "progress": False,
}  # fmt: skip
CONFIG = DistributedConfig(precision="fp64", grace_s=20, silence_s=5, heartbeat_s=0.5)


@pytest.fixture(scope="module")
def scripts() -> Iterator[list[Console]]:
    """Two processes whose workers listen, each for one orchestrator after another."""
    consoles = [Console(), Console()]
    for k, console in enumerate(consoles):
        console.start(
            "from guava_nb import DistributedConfig, NetworkWorker\n"
            f"worker = NetworkWorker.listen(gpu_id='cpu', name='listener-{k}', config=DistributedConfig(grace_s=20))\n"
            "answer = worker.join_code.encode()\n"
        )
    yield consoles
    for console in consoles:
        console.process.kill()  # it serves for ever, and would be waited for
        console.__exit__()


@pytest.fixture(scope="module")
def codes(scripts: list[Console]) -> list[JoinCode]:
    found = [JoinCode.decode(console.finish()) for console in scripts]
    for console in scripts:
        console.start("answer = worker.serve()\n")
    return found


def plain(batches: Any, epochs: int) -> torch.nn.Module:
    torch.manual_seed(0)
    model = SmallNet().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


def test_an_orchestrator_dials_two_workers_and_the_result_is_plain_pytorch(codes: list[JoinCode]) -> None:
    with Orchestrator.dialling(*codes, config=CONFIG) as orch:
        assert orch.connect(*codes) == ["listener-0", "listener-1"]  # again: nothing changes
        with pytest.raises(ClusterError, match="does not listen"):
            _ = orch.join_code
        orch.register_model(SmallNet)
        run = orch.start_training(loader(rows=96), num_epochs=2, **ARGUMENTS)
        assert difference_of_modules(run.model(), plain(loader(rows=96), 2)) <= 1e-9
        assert [w["samples"] for w in run.report()["workers"]] == [96, 96]
        assert orch.validate(loader(rows=96))["samples"] == 96


def test_a_cut_connection_is_dialled_again_and_nothing_is_lost(codes: list[JoinCode]) -> None:
    with Relay(codes[0].port) as relay:
        through = codes[0].with_address("127.0.0.1", relay.port)
        with Orchestrator.dialling(through, config=CONFIG) as orch:
            orch.register_model(SmallNet)
            run = orch.start_training(loader(rows=96), num_epochs=60, detach=True, **ARGUMENTS)
            eventually(lambda: len(run.history) > 3, 40, "it trains")
            for link in list(relay.links):
                link.cut(reset=True)
            run.wait(60)
            assert run.result() is run
            assert len(relay.links) >= 4
            assert (run.lost_samples, run.duplicated_samples) == (0, 0)
            assert difference_of_modules(run.model(), plain(loader(rows=96), 60)) <= 1e-9


def test_one_orchestrator_at_a_time_and_a_dead_one_s_place_is_free_at_once(codes: list[JoinCode]) -> None:
    with Console() as other:
        other.run(
            "from guava_nb import Orchestrator\n"
            f"orch = Orchestrator.dialling({codes[0].encode()!r})\n"
        )  # fmt: skip
        second = Orchestrator(CONFIG)
        with pytest.raises(GuavaError, match="works for another orchestrator"):
            second.connect(codes[0])
        os.kill(other.process.pid, signal.SIGKILL)
        other.process.wait(10)

        def connected() -> bool:
            try:
                return bool(second.connect(codes[0]))
            except GuavaError:
                return False

        eventually(connected, 15, "the place is free, long before the grace period is over")
        second.register_model(SmallNet)
        assert len(second.start_training(loader(rows=64), **ARGUMENTS).history) == 2
        second.close()


def test_who_does_not_know_the_code_stays_out(codes: list[JoinCode]) -> None:
    code = codes[1]
    orch = Orchestrator(CONFIG)
    try:
        with pytest.raises(JoinCodeError):
            orch.connect(code.encode()[:-5])
        with pytest.raises(AuthenticationError):
            orch.connect(JoinCode(code.host, code.port, code.fingerprint, bytes(16), code.scheme))
        with pytest.raises(GuavaError, match=r"127\.0\.0\.1:1\b"):
            orch.connect(code.with_address("127.0.0.1", 1))
        assert orch.connect(code) == ["listener-1"]
    finally:
        orch.close()


def test_a_listening_worker_leaves_on_request_and_leaves_nothing_behind() -> None:
    before = threading.active_count()
    with NetworkWorker.listen(gpu_id="cpu") as worker:
        answer: list[str] = []
        thread = threading.Thread(target=lambda: answer.append(worker.serve()))
        thread.start()
        with Orchestrator.dialling(worker.join_code, config=CONFIG) as orch:
            worker.leave()
            thread.join(20)
            assert answer == ["it was asked to leave"]
            eventually(lambda: orch.status().workers[0].state == "left", 10, "the orchestrator hears of it")
    eventually(lambda: threading.active_count() <= before, 10, "no thread is left")


def test_once_returns_when_the_orchestrator_closed() -> None:
    with NetworkWorker.listen(gpu_id="cpu") as worker, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(worker.serve, once=True)
        Orchestrator.dialling(worker.join_code, config=CONFIG).close()
        assert "the orchestrator closed the session" in answer.result(30)


def test_who_dials_before_anybody_serves_is_told() -> None:
    config = CONFIG.replace(connect_timeout_s=1.0)
    with NetworkWorker.listen(gpu_id="cpu") as worker, pytest.raises(LinkTimeout, match="no worker serves there now"):
        Orchestrator.dialling(worker.join_code, config=config)


def test_the_command_listens_keeps_its_code_in_a_file_and_serves_one_session_after_another(tmp_path: Path) -> None:
    kept = {"XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    env = {**os.environ, **kept, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "guava_nb", "worker", "--device", "cpu", "--listen", "--name", "box"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env, cwd=ROOT,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if "its join code is in" in line)
        file = Path(line.split(" is in ")[1].split(", for you alone")[0])
        code = file.read_text(encoding="utf-8").strip()
        assert "%guava_up --connect asks for it" in line and "guava1:" not in line
        for epochs in (1, 2):
            with Orchestrator.dialling(code, config=CONFIG) as orch:
                orch.share("def shout():\n    print('over here')\n\nshout()")
                orch.register_model(SmallNet)
                run = orch.start_training(loader(rows=64), num_epochs=epochs, **ARGUMENTS)
                assert difference_of_modules(run.model(), plain(loader(rows=64), epochs)) <= 1e-9
                eventually(lambda: any("over here" in text for text in orch.log("box")), 20, "its lines arrive")  # noqa: B023
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0 and "box: left" in out and "guava1:" not in out, out
    assert not file.exists()
    assert "guava1:" not in "".join(
        path.read_text() for path in Path(tempfile.gettempdir()).glob("guava_nb-*/worker-box-*.log")
    )
