"""Workers as a person starts them: `NetworkWorker` in a plain script, and the `guava worker` command."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from guava_nb import DistributedConfig, NetworkWorker, Orchestrator, Run
from guava_nb.errors import AuthenticationError, ConfigError, GuavaError, JoinCodeError
from guava_nb.protocol.joincode import JoinCode
from guava_nb.telemetry import Board, Sensor
from tests.support.console import Console
from tests.support.processes import ROOT, eventually, loader
from tests.support.relay import Relay
from tests.support.training import SmallNet
from tests.support.training import difference as difference_of_modules

ARGUMENTS: dict[str, Any] = {
    "optimizer": "AdamW", "optimizer_args": {"lr": 0.01}, "precision": "fp64", "progress": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def orch() -> Iterator[Orchestrator]:
    with Orchestrator(DistributedConfig(num_workers=1, precision="fp64", grace_s=5)) as made:
        yield made


@pytest.fixture(autouse=True)
def no_run_is_left(orch: Orchestrator) -> Iterator[None]:
    yield
    orch.stop()


@pytest.fixture(scope="module")
def script() -> Iterator[Console]:
    with Console() as console:
        console.run("import os, threading, torch\nfrom guava_nb import NetworkWorker\n")
        yield console


def plain(model: torch.nn.Module, batches: Any, epochs: int) -> torch.nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


def trained_there(script: Console, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The model object of the script, after its worker has ended."""
    script.run(f"torch.save(worker.model.state_dict(), {str(tmp_path / 'model.pt')!r})")
    found: dict[str, torch.Tensor] = torch.load(tmp_path / "model.pt", weights_only=True)
    return found


def test_a_script_s_own_model_is_trained_in_place(orch: Orchestrator, script: Console, tmp_path: Path) -> None:
    """Its constructor is known to the script alone; the orchestrator's instance is where the training starts."""
    start = SmallNet(norm=True).double()
    mine = SmallNet(norm=True).double()
    mine.load_state_dict(start.state_dict())
    code = orch.join_code.encode()
    script.run(f"os.environ['GUAVA_JOIN_CODE'] = {code!r}")
    script.start(
        "from tests.support.training import SmallNet\n"
        "worker = NetworkWorker(model_ctor=lambda: SmallNet(norm=True), name='script')\n"
        "before = worker.model\n"
        "answer = [worker.connect_and_train(), worker.model is before]\n"
    )
    orch.wait_for_workers(1, timeout=60)
    orch.register_model(start, {"norm": True})
    run = orch.start_training(loader(rows=96), num_epochs=2, **ARGUMENTS)
    plain(mine, loader(rows=96), 2)
    assert difference_of_modules(run.model(), mine) <= 1e-9
    [worker] = [w for w in run.report()["workers"] if w["worker"] == "script"]
    assert worker["samples"] == 2 * 96
    assert difference_of_modules(start, mine) > 1e-3  # the orchestrator's instance is a starting point, not the result
    cluster = orch._open_cluster()
    cluster.session(cluster.roster.alive()[0]).close("the lesson is over")  # type: ignore[union-attr]
    assert script.finish(30) == [f"{orch.join_code.address} ended the session: the lesson is over", True]
    there = trained_there(script, tmp_path)
    assert all(torch.equal(there[name], value) for name, value in run.model().state_dict().items())


def test_host_and_port_with_the_code_in_the_environment_and_an_interrupt(orch: Orchestrator, script: Console) -> None:
    elsewhere = orch.join_code.with_address("192.0.2.1", 9)  # as when a tunnel has another address meanwhile
    script.run(f"os.environ['GUAVA_JOIN_CODE'] = {elsewhere.encode()!r}")
    script.start(
        f"worker = NetworkWorker(master_ip='127.0.0.1', master_port={orch.join_code.port}, gpu_id=0, name='by-address')\n"
        "answer = worker.connect_and_train()\n"
    )
    orch.wait_for_workers(1, timeout=60)
    orch.register_model(SmallNet)
    run = orch.start_training(loader(), num_epochs=500, detach=True, fresh=True, **ARGUMENTS)
    eventually(lambda: len(run.history) > 2, 30, "it trains")
    script.interrupt()
    assert script.finish(20) == "it was asked to leave"
    eventually(lambda: run.state == "waiting", 20, "the run waits for somebody")
    run.stop()
    states = [w.state for w in orch.status().workers if w.name == "by-address"]
    assert states == ["left"]
    assert run.lost_samples == run.duplicated_samples == 0


def test_two_joins_with_one_code_are_two_workers_with_names_of_their_own(orch: Orchestrator) -> None:
    workers = [NetworkWorker(orch.join_code, gpu_id="cpu", name="twin") for _ in range(2)]
    threads = [threading.Thread(target=worker.connect_and_train) for worker in workers]
    for thread in threads:
        thread.start()
    assert sorted(orch.wait_for_workers(2, timeout=30)) == ["twin", "twin-2"]
    for worker, thread in zip(workers, threads, strict=True):
        worker.leave()
        thread.join(20)
        assert not thread.is_alive()
    eventually(lambda: not [w for w in orch.status().workers if w.state == "ready"], 10, "both have left")


class Dying(Sensor):
    """Counts joules for some readings; then its driver is gone, by an error or by never answering again."""

    board, method, counts = Board("host/GPU-1", "a GPU"), "NVML energy counter", True

    def __init__(self, hangs: bool) -> None:
        self.readings, self.dead, self.let_go = 0, threading.Event(), threading.Event()
        self._hangs = hangs

    def read(self) -> float:
        self.readings += 1
        if self.readings > 4:
            self.dead.set()
            if self._hangs:
                self.let_go.wait(60)
            raise RuntimeError("GPU is lost")
        return 10.0 * self.readings


@pytest.mark.parametrize("hangs", [False, True])
def test_nvml_that_dies_in_mid_run_costs_its_figure_and_nothing_else(
    orch: Orchestrator, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    sensor, seen = Dying(hangs), list[int]()
    monkeypatch.setattr("guava_nb.telemetry.meter.sensors_of", lambda devices: ([sensor], ()))

    class Watch:
        def on_epoch(self, run: Run, record: dict[str, Any]) -> None:
            assert sensor.dead.wait(30)
            seen.append(record["epoch"])

    start = SmallNet().double()
    worker = NetworkWorker(orch.join_code, gpu_id="cpu", name="measured", model_ctor=SmallNet)
    thread = threading.Thread(target=worker.connect_and_train)
    thread.start()
    orch.wait_for_workers(1, timeout=30)
    orch.register_model(start)
    expected = plain(SmallNet().double(), loader(), 0)
    expected.load_state_dict(start.state_dict())
    run = orch.start_training(loader(), num_epochs=2, callbacks=[Watch()], fresh=True, **ARGUMENTS)
    assert run.state == "done" and seen == [1, 2]
    assert difference_of_modules(run.model(), plain(expected, loader(), 2)) <= 1e-9
    row = run.energy_record()["workers"][0]
    if hangs:
        # What it had told before it hung; of a window of two readings a counter's joules are told by power and time.
        assert row["joules"] in (None, 10.0, 20.0, 30.0) or row["method"].endswith("by power and time")
    else:
        assert row["joules"] == 30.0 and "GPU is lost" in row["problem"] and row["uncovered_s"] > 0
    sensor.let_go.set()
    worker.leave()
    thread.join(20)
    assert not thread.is_alive()


def test_what_is_wrong_with_a_code_is_one_sentence(orch: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GUAVA_JOIN_CODE", raising=False)
    text = orch.join_code.encode()
    with pytest.raises(JoinCodeError):
        NetworkWorker(text[:-6])
    with pytest.raises(ConfigError, match="GUAVA_JOIN_CODE"):
        NetworkWorker(master_ip="127.0.0.1", master_port=orch.join_code.port)
    with pytest.raises(ConfigError, match="device 'cuda:7'|device '7'"):
        NetworkWorker(text, gpu_id="7")
    code = orch.join_code
    other = JoinCode(code.host, code.port, code.fingerprint, bytes(16), code.scheme)
    with pytest.raises(AuthenticationError):
        NetworkWorker(other, gpu_id="cpu").connect_and_train()
    nobody = code.with_address("127.0.0.1", 1)
    with pytest.raises(GuavaError, match=r"127\.0\.0\.1:1"):
        NetworkWorker(nobody, gpu_id="cpu").connect_and_train()


# ---------------------------------------------------------------------------------------------------- guava worker


def command(code: str | None, *words: str, out: int = subprocess.PIPE, **variables: str) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TERM": "xterm",
        **variables,
    }
    env.pop("GUAVA_JOIN_CODE", None)
    if code is not None:
        env["GUAVA_JOIN_CODE"] = code
    return subprocess.Popen(
        [sys.executable, "-m", "guava_nb", "worker", "--device", "cpu", *words], stdin=subprocess.DEVNULL,
        stdout=out, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT, start_new_session=True,
    )  # fmt: skip


class Terminal:
    """What a program writes on a terminal of its own."""

    def __init__(self) -> None:
        self._ours, self.theirs = os.openpty()
        self.text = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # how a terminal ends that nobody has open any more
            while data := os.read(self._ours, 65536):
                self.text += data.decode(errors="replace")

    def close(self) -> str:
        """Return all of it, without carriage returns."""
        os.close(self.theirs)
        self._thread.join(10)
        os.close(self._ours)
        return self.text.replace("\r", "")


def test_the_command_joins_trains_and_leaves_on_an_interrupt(orch: Orchestrator) -> None:
    terminal = Terminal()
    # A process that was forked would not show its environment.
    process = command(orch.join_code.encode(), "--name", "box", out=terminal.theirs, GUAVA_TEST_COLD="1")
    try:
        assert orch.wait_for_workers(1, timeout=60) == ["box"]
        if sys.platform == "linux":  # no process list shows the secret, and the child has it nowhere but in memory
            [child] = psutil.Process(process.pid).children()
            told = "\0".join([*psutil.Process(process.pid).cmdline(), *child.cmdline(), *child.environ().values()])
            assert orch.join_code.encode().removeprefix("guava1:") not in told
        orch.register_model(SmallNet)
        run = orch.start_training(loader(), num_epochs=500, detach=True, fresh=True, **ARGUMENTS)
        eventually(lambda: len(run.history) > 2, 40, "it trains")
        eventually(lambda: "of each batch" in terminal.text, 20, "what it does is shown")
        os.killpg(process.pid, signal.SIGINT)  # what a terminal sends: to the command's whole group
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        out = terminal.close()
    assert process.returncode == 0, (out, err)
    assert "leaving after this step" in out and "box: left" in out
    assert re.search(r"\x1b\[\d+A\x1b\[J.*\n?worker box: working on cpu", out), "drawn over what was drawn before"
    assert re.search(r"\n +work +\d+ samples", out[out.rindex("box: left") :]), "what it did stays"
    assert "Traceback" not in out + err
    assert "Python code on this machine" in err
    run.stop()
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)


@pytest.mark.parametrize("damage", ["cut", "secret", "none", "gone"])
def test_a_code_that_does_not_fit_gives_a_line_and_a_status(orch: Orchestrator, damage: str) -> None:
    code = orch.join_code
    text = {
        "cut": code.encode()[:-6],
        "secret": JoinCode(code.host, code.port, code.fingerprint, bytes(16), code.scheme).encode(),
        "none": None,
        "gone": code.with_address("127.0.0.1", 1).encode(),
    }[damage]
    process = command(text)
    out, err = process.communicate(timeout=80)
    assert process.returncode == {"cut": 2, "none": 2}.get(damage, 1)
    told = [line for line in (out + err).splitlines() if re.search(r"^guava: |: failed", line)]
    assert len(told) == 1, (out, err)
    wanted = {
        "cut": "cut|checksum",
        "secret": "does not know this join code",
        "none": "GUAVA_JOIN_CODE",
        "gone": r"127\.0\.0\.1:1",
    }
    assert re.search(wanted[damage], told[0]), told
    assert "Traceback" not in out + err


def test_it_goes_on_by_a_new_code_and_says_that_it_waits_for_one(
    orch: Orchestrator, caplog: pytest.LogCaptureFixture
) -> None:
    code, ends = orch.join_code, []
    with Relay(code.port) as relay:
        worker = NetworkWorker(code.with_address("127.0.0.1", relay.port), gpu_id="cpu", model_ctor=SmallNet)
        thread = threading.Thread(target=lambda: ends.append(worker.connect_and_train()))
        thread.start()
        try:
            orch.wait_for_workers(1, timeout=30)
            orch.register_model("tests.support.training:SmallNet")
            run = orch.start_training(loader(), num_epochs=30, detach=True, fresh=True, **ARGUMENTS)
            eventually(lambda: len(run.history) > 5, 30, "it trains")
            relay.refuse()
            relay.cut_all()
            eventually(lambda: "dials again for up to 330 s" in caplog.text, 20, "it says so")
            with pytest.raises(JoinCodeError, match="another session"):
                worker.redirect(JoinCode.new("127.0.0.1", code.port, code.fingerprint))
            worker.redirect(code)
            assert run.wait(40) and run.result() is run and len(run.history) == 120
            assert (run.lost_samples, run.duplicated_samples) == (0, 0) and worker.code == code
        finally:
            worker.leave()
            thread.join(20)
    assert ends == ["it was asked to leave"]
    waits = [record.getMessage() for record in caplog.records if record.name == "guava_nb.worker.network_worker"]
    assert len(waits) == 1, "the new code that it dials then is no further sentence"
