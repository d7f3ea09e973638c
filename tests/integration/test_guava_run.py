"""`guava run`: unchanged programs in processes that reach nothing but the hub, which is any open session's."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from guava_nb import Orchestrator
from guava_nb.cli.main import main
from tests.support.processes import ROOT, eventually

PROGRAMS = ROOT / "tests" / "support" / "programs"
LAUNCH_S = 90.0  # two processes import torch on a busy machine
HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None
needs_accelerate = pytest.mark.skipif(not HAS_ACCELERATE, reason="accelerate is part of the extra test")

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def hub() -> Iterator[Orchestrator]:
    with Orchestrator(num_workers=1) as orchestrator:
        yield orchestrator


class Started:
    """A process whose output is read as it comes."""

    def __init__(self, words: list[str], code: str = "", **variables: str) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        environment.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **variables)
        environment.update({"GUAVA_JOIN_CODE": code} if code else {})
        words = words if words[0] == "-m" else ["-m", "tests.support.script", *words]
        self.process = subprocess.Popen(
            [sys.executable, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def end(self, timeout_s: float = LAUNCH_S) -> int:
        """Wait for its end; gives the exit status."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {timeout_s} s:\n{self.output}") from None
        self._reader.join(5)
        return status

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # torchrun's children are of its session
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def start() -> Iterator[type[Started]]:
    started: list[Started] = []

    def begin(words: list[str], code: str = "", **variables: str) -> Started:
        started.append(Started(words, code, **variables))
        return started[-1]

    yield begin  # type: ignore[misc]
    for process in started:
        process.close()


def words(rank: int, size: int, *program: str) -> list[str]:
    return ["-m", "guava_nb", "run", "--rank", str(rank), "--world-size", str(size), *program]


def run_two(start, hub: Orchestrator, *program: str, size: int = 2) -> list[Started]:
    code = hub.join_code.encode()
    both = [start(words(rank, size, *program), code) for rank in range(size)]
    for one in both:
        assert one.end() == 0, "\n---\n".join(other.output for other in both)
    return both


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)


def assert_equal(first: Path, second: Path) -> None:
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) <= 1e-9


PLAIN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def test_a_tutorial_script_trains_as_in_one_process(start, hub: Orchestrator, tmp_path: Path) -> None:
    script = str(PROGRAMS / "ddp.py")
    alone = start([script, "--save", str(tmp_path / "one.pt")], **PLAIN)
    assert alone.end() == 0, alone.output
    both = run_two(start, hub, script, "--save", str(tmp_path / "two.pt"))
    assert_equal(tmp_path / "one.pt", tmp_path / "two.pt")
    assert "epoch 1: loss" in both[0].output
    assert "local rank 1" in both[1].output
    notices = " | ".join(hub.status().notes)
    assert "a program joined as rank 0 of 2" in notices and "a program joined as rank 1 of 2" in notices
    assert not hub.status().workers, "a program's ranks are no workers"


def test_two_models_and_two_backwards_a_step_train_as_in_one_process(start, hub: Orchestrator, tmp_path: Path) -> None:
    script = str(PROGRAMS / "gan.py")
    alone = start([script, "--save", str(tmp_path / "one.pt")], **PLAIN)
    assert alone.end() == 0, alone.output
    run_two(start, hub, script, "--save", str(tmp_path / "two.pt"))
    assert_equal(tmp_path / "one.pt", tmp_path / "two.pt")


def losses_in(output: str) -> dict[int, float]:
    lines = [line.split() for line in output.splitlines() if line.startswith("step ")]
    return {int(words[1].rstrip(":")): float(words[-1]) for words in lines}


@pytest.mark.whole  # eight processes of torch; conformance/test_process_group.py saves and loads in fully_sharded
@pytest.mark.parametrize("saves", ["at_once", "asynchronously"])
def test_a_sharded_checkpoint_is_resumed_by_another_number_of_ranks(
    saves: str, start, hub: Orchestrator, tmp_path: Path
) -> None:
    """FSDP2 and torch.distributed.checkpoint: two ranks, then three, then two train as one process."""
    script, how = str(PROGRAMS / "sharded.py"), ["--asynchronous"] if saves == "asynchronously" else []
    alone = start([script, "--steps", "9"], **PLAIN)
    folders, found, resume = [str(tmp_path / name) for name in "ab"], dict[int, float](), list[str]()
    for size, folder in zip((2, 3, 2), (*folders, ""), strict=True):
        save = ["--checkpoint", folder, *how] if folder else []
        found |= losses_in(run_two(start, hub, script, "--steps", "3", *resume, *save, size=size)[0].output)
        resume = ["--resume", folder]
    assert alone.end() == 0, alone.output
    plain = losses_in(alone.output)
    assert sorted(plain) == sorted(found) == list(range(9))
    assert max(abs(plain[step] - found[step]) for step in plain) <= 1e-9


@needs_accelerate
def test_an_accelerate_script_trains_as_in_one_process(start, hub: Orchestrator, tmp_path: Path) -> None:
    script = str(PROGRAMS / "accelerated.py")
    alone = start([script, "--save", str(tmp_path / "one.pt")])
    assert alone.end() == 0, alone.output
    both = run_two(start, hub, script, "--save", str(tmp_path / "two.pt"))
    assert_equal(tmp_path / "one.pt", tmp_path / "two.pt")
    assert "epoch 1: 256 samples" in both[0].output


@needs_accelerate
@pytest.mark.parametrize(
    "program", [[str(PROGRAMS / "accelerate_sync.py")], ["-m", "accelerate.test_utils.scripts.test_script"]]
)
def test_the_scripts_that_accelerate_ships(program: list[str], start, hub: Orchestrator) -> None:
    both = run_two(start, hub, *program)
    if "-m" in program:  # it goes through as a single process too, and says so
        assert all("DistributedType.MULTI_CPU" in one.output and "Num processes: 2" in one.output for one in both)


def test_a_killed_rank_ends_the_other_with_its_name(start, hub: Orchestrator) -> None:
    code = hub.join_code.encode()
    first, second = (start(words(rank, 2, str(PROGRAMS / "waits.py")), code) for rank in (0, 1))
    eventually(lambda: "pid" in first.output and "pid" in second.output, LAUNCH_S, "both are in their loop")
    second.process.send_signal(signal.SIGKILL)
    assert first.end(15) == 1
    assert "GroupBroken" in first.output and "rank 1 (" in first.output.splitlines()[-1]


def test_what_a_program_leaves_running_keeps_its_group(start, hub: Orchestrator) -> None:
    for one in run_two(start, hub, str(PROGRAMS / "lingers.py")):
        last = [line for line in one.output.splitlines() if not line.startswith("guava:")]
        assert last == ["last line", "thread 32.0", "left"]


def test_an_interrupt_ends_it_and_the_others(start, hub: Orchestrator) -> None:
    code = hub.join_code.encode()
    first, second = (start(words(rank, 2, str(PROGRAMS / "waits.py")), code) for rank in (0, 1))
    eventually(lambda: "pid" in first.output and "pid" in second.output, LAUNCH_S, "both are in their loop")
    first.process.send_signal(signal.SIGINT)
    assert first.end(15) == 130
    assert first.output.splitlines()[-1] == "guava: interrupted"
    assert second.end(15) == 1
    assert "its program was interrupted" in second.output.splitlines()[-1]


def test_a_rank_that_does_not_come_is_named(start, hub: Orchestrator) -> None:
    code = hub.join_code.encode()
    missing = [
        start(
            ["-m", "guava_nb", "run", "--rank", rank, "--world-size", "2", "--wait", "1", "--job", job, __file__], code
        )
        for rank, job in (("0", "a"), ("1", "b"))
    ]
    for one, other in zip(missing, (1, 0), strict=True):
        assert one.end() == 1
        last = one.output.splitlines()[-1]
        assert last.startswith(f"guava: CollectiveTimeout: rank {other} of 2 did not come within 1 s")


def test_ranks_that_disagree_are_told(start, hub: Orchestrator) -> None:
    code = hub.join_code.encode()
    both = [start(words(rank, size, __file__), code) for rank, size in ((0, 2), (1, 3))]
    for one in both:
        assert one.end() == 2
        assert "give all the same world size" in one.output.splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "status", "sentence"),
    [
        (["--rank", "0", "--world-size", "2", "nowhere.py"], 2, "there is no program 'nowhere.py'"),
        (["--rank", "0", "--world-size", "2", "-m", "no.where"], 2, "there is no module 'no.where'"),
        (["--rank", "2", "--world-size", "2", __file__], 2, "there is no rank 2 among 2 processes"),
        (["--rank", "0", "--world-size", "0", __file__], 2, "the world size is 0"),
        (["--world-size", "2", __file__], 2, "--rank is missing"),
        (["--rank", "0", "--world-size", "2", "--join", "guava1:abc", __file__], 2, "JoinCodeError"),
    ],
)
def test_wrong_lines_are_one_clear_line(
    line: list[str],
    status: int,
    sentence: str,
    hub: Orchestrator,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GUAVA_JOIN_CODE", hub.join_code.encode())
    assert main(["run", *line]) == status
    (shown,) = capfd.readouterr().err.splitlines()
    assert sentence in shown


def test_a_code_with_another_secret_is_refused(hub: Orchestrator, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = dataclasses.replace(hub.join_code, secret=bytes(16)).encode()
    assert main(["run", "--join", wrong, "--rank", "0", "--world-size", "2", __file__]) == 1
    (shown,) = capfd.readouterr().err.splitlines()
    assert shown.startswith("guava: AuthenticationError")
    assert wrong not in shown


def test_a_closed_session_is_asked_about(capfd: pytest.CaptureFixture[str]) -> None:
    with Orchestrator(num_workers=1) as orchestrator:
        code = orchestrator.join_code.encode()
    assert main(["run", "--join", code, "--rank", "0", "--world-size", "2", __file__]) == 1
    (shown,) = capfd.readouterr().err.splitlines()
    assert "connection refused" in shown and shown.endswith("Is the session (%guava_up) still open?")


def test_a_program_of_ones_own_asks_for_the_backend_by_name(start, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "import torch, torch.distributed as dist, guava_nb.backend\n"
        "dist.init_process_group('guava')\n"
        "value = torch.ones(3) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(value)\n"
        "print('sum', value.tolist(), dist.get_backend(), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    both = start(
        [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "tests.support.script",
            str(script),
        ]
    )
    assert both.end(150) == 0, both.output
    assert both.output.count("[3.0, 3.0, 3.0]") == 2


def test_under_torchrun_no_code_is_needed(start, tmp_path: Path) -> None:
    script, saved = str(PROGRAMS / "ddp.py"), str(tmp_path / "two.pt")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "guava_nb"]
    both = start([*launcher, "run", script, "--save", saved])
    assert both.end(150) == 0, both.output
    assert "epoch 1: loss" in both.output
    assert "backend: guava (the script asked for gloo)" in both.output
    assert weights(Path(saved))
