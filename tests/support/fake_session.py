"""Stand-ins for the orchestrator, its run and a worker: same names as the real ones, no network, no training, no clock.

A fake run commits one step per `wait`, so a test decides by counting, never by sleeping.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from guava_nb.cluster.traffic import Traffic
from guava_nb.config import DistributedConfig, check_plan, mode_settings
from guava_nb.errors import GuavaError, RendezvousTimeout, SourceError
from guava_nb.forecast.forecast import Forecast
from guava_nb.orchestrator.past_runs import PastRuns
from guava_nb.protocol.joincode import JoinCode
from guava_nb.status import OwnFigures, RunStatus, Status, WorkerStatus
from tests.support.energy import record

SECRET_CODE = JoinCode.new("127.0.0.1", 4242, b"f" * 16, b"secret of 16 b..").encode()
#: Of a session in another notebook.
OTHER_CODE = JoinCode.new("127.0.0.1", 4343, b"g" * 16, b"secret of others").encode()


@dataclass
class FakeCode:
    """A join code that hides itself unless asked."""

    text: str = SECRET_CODE

    def encode(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return "JoinCode(127.0.0.1:4242, secret hidden)"


@dataclass
class FakeRun:
    """Ends after `num_steps` waits; sends real interrupts to this process before the waits in `interrupt_at`."""

    num_steps: int = 5
    interrupt_at: Sequence[int] = ()
    raise_at: Sequence[int] = ()
    error: GuavaError | None = None
    step: int = 0
    waits: int = 0
    interrupts: int = 0
    state: str = "training"
    run_id: str = "run-1"

    @property
    def done(self) -> bool:
        return self.state in ("done", "stopped", "failed")

    def wait(self, timeout_s: float | None = None) -> bool:
        if self.waits in self.interrupt_at:
            signal.raise_signal(signal.SIGINT)
        self.waits += 1
        if self.waits - 1 in self.raise_at:
            raise KeyboardInterrupt
        self.step += 0 if self.done else 1
        if self.interrupts:
            self.state = "stopped"
        elif self.step >= self.num_steps:
            self.state = "failed" if self.error else "done"
        return self.done

    def interrupt(self) -> None:
        self.interrupts += 1
        self.state = "stopping"

    def status(self) -> RunStatus:
        losses = tuple((step, 2.0 / step) for step in range(1, self.step + 1))
        return RunStatus(
            "run-1", self.state, "data", 1, 1, self.step, self.num_steps, self.step * 32, 0.5 * self.step, 64.0,
            losses[-1][1] if losses else None, losses, ((self.step, 0.5, 0.9),) if self.done else (),
        )  # fmt: skip

    def energy_record(self, grams_per_kwh: float | None = None, price_per_kwh: float | None = None) -> Any:
        return record(grams_per_kwh=grams_per_kwh, price_per_kwh=price_per_kwh)

    def result(self) -> FakeRun:
        if self.error:
            raise self.error
        return self

    def report(self) -> dict[str, Any]:
        return {"steps": self.step}


@dataclass
class FakeOrchestrator:
    """Remembers what it was asked to do, in order, in `calls`."""

    late: ClassVar[int] = 0  # of workers that a launcher starts

    settings: dict[str, Any]
    next_run: FakeRun = field(default_factory=FakeRun)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    cells: dict[str, str] = field(default_factory=dict)
    printed: dict[str, list[str]] = field(default_factory=dict)
    local: list[FakeWorker] = field(default_factory=list)
    run: FakeRun | None = None
    state: str = "closed"
    here: list[str] = field(default_factory=list)
    coming: list[str] = field(default_factory=list)
    newcomers: list[str] = field(default_factory=list)
    too_few: bool = False
    log_folder: Path | None = Path("/tmp/lines")
    refused: GuavaError | None = None  # by the look at a run before workers are waited for
    goes_on: bool = False
    tunnel: str = ""
    tunnel_note: str = ""
    config: DistributedConfig = field(default_factory=DistributedConfig)
    results: Any = None
    code: str = SECRET_CODE
    past_runs: PastRuns = field(default_factory=lambda: PastRuns(lambda: None))
    waiting: Callable[[], None] = lambda: None  # noqa: E731 - what happens while a call waits

    @property
    def expected_workers(self) -> int:
        return int(self.settings.get("num_workers", 1))

    def expect_workers(self, count: int) -> None:
        self.settings["num_workers"] = count

    def worker_cell(self) -> str:
        return f"guava_nb_cell()\n%load_ext guava_nb\n%guava_worker {self.join_code.encode()}"

    @property
    def join_code(self) -> FakeCode:
        return FakeCode(self.code)

    def open(self, tunnel: str | None = None, ask: Any = None) -> FakeCode:
        self.state = "open"
        if tunnel is not None:
            self.tunnel = tunnel
            self.calls.append(("open", (tunnel, ask)))
        return self.join_code

    def connect(self, *codes: str) -> list[str]:
        self.state = "open"
        self.calls.append(("connect", codes))
        self.here += [f"listener-{len(self.here) + number}" for number in range(1, len(codes) + 1)]
        return self.here[-len(codes) :]

    def launch_workers(self, count: int, device: str = "cpu") -> list[FakeWorker]:
        self.calls.append(("launch", count))
        names = [f"worker-{len(self.local) + number}" for number in range(count)]
        self.local += [FakeWorker("", device, name) for name in names]
        self.coming += names
        return self.local[-count:]

    def launched(self, text: str) -> Any:
        return next((value for name, value in self.calls if name == "launch_on" and value.text == text), None)

    def launch_on(self, text: str) -> Any:
        launcher = SimpleNamespace(text=text, count=2, is_prompt=text.startswith("ssh"))
        self.calls.append(("launch_on", launcher))
        return launcher

    def wait_for_launched(self, count: int, limit_s: float) -> int:
        self.calls.append(("wait_for_launched", count))
        return count - self.late

    def wait_for_workers(
        self, count: int | None = None, timeout: float | None = None, on_wait: Any = lambda there: None
    ) -> None:
        self.calls.append(("wait", count))
        self.waiting()
        on_wait(len(self.here))
        if self.too_few:
            raise RendezvousTimeout("1 of 2 workers joined within 180 s; look at %guava_log")
        while len(self.here) < (count or 0):
            arriving = self.newcomers or self.coming  # a stranger is always faster
            if not arriving:
                raise RendezvousTimeout(f"{len(self.here)} of {count} workers joined; nobody else is coming")
            self.here.append(arriving.pop(0))
            if on_wait is not None:
                on_wait(len(self.here))

    def share(self, source: str, name: str | None = None) -> None:
        if "!pip" in source:
            raise SourceError(f"cell {name}, line 1: notebook syntax cannot run on a worker")
        self.cells[str(name)] = source

    def unshare(self, name: str) -> None:
        del self.cells[name]

    def set_mode(self, mode: str, **settings: Any) -> None:
        self.calls.append(("mode", (mode, dict(settings))))
        check_plan(settings.pop("tensor_plan", {}))
        self.config = self.config.replace(**mode_settings(mode, **settings))

    def register_model(self, model: Any, args: dict[str, Any] | None = None) -> None:
        self.calls.append(("model", (model, args)))

    def check_training(self, train_loader: Any, **options: Any) -> None:
        if self.refused is not None:
            raise self.refused

    def forecast(self, **options: Any) -> Forecast:
        self.calls.append(("forecast", options))
        part = Traffic.going("sample", 4_000_000)
        budget = options.get("budget_bytes") or 0
        return Forecast("data", 2, 10, 10, part, part, None, part, (part,), part, budget_bytes=budget)

    def start_training(self, train_loader: Any, val_loader: Any = None, **options: Any) -> FakeRun:
        self.calls.append(("train", {"train_loader": train_loader, "val_loader": val_loader, **options}))
        self.run = self.next_run
        return self.run

    def validate(self, loader: Any, progress: Any = None, **options: Any) -> dict[str, Any]:
        self.calls.append(("validate", {"loader": loader, **options}))
        self.waiting()
        progress(0, len(loader))
        return {"loss": 0.25, "accuracy": 0.75, "samples": len(loader)}

    def predict(self, loader: Any, progress: Any, **options: Any) -> Any:
        self.calls.append(("predict", {"loader": loader, **options}))
        self.waiting()
        for done in (1, len(loader)):
            progress(done, len(loader))
        return self.results

    def run_code(self, text: str, on: Any = None, cell: str = "px", on_output: Any = None) -> dict[str, Any]:
        self.calls.append(("run_code", (text, on, cell)))
        self.waiting()
        for name in on or self.here:
            on_output(name, self.printed.get(name, ["printed there"]))
        return dict.fromkeys(on or self.here, self.results)

    def run_program(self, text: str, *arguments: str, on_output: Any, on_wait: Any, **settings: Any) -> None:
        self.calls.append(("run_program", (text, arguments, settings)))
        self.waiting()
        for number, name in enumerate(settings["on"] or self.here):
            on_output(name, [f"rank {number} printed"])
        on_wait()

    def generate(self, prompts: Any, on_done: Any, on_tokens: Any, progress: Any, **settings: Any) -> Any:
        self.calls.append(("generate", (prompts, settings)))
        for number in reversed(range(len(prompts))):
            on_tokens(number, self.results[:1])
        for number in range(len(prompts)):
            on_done(number, self.results)
            progress(number + 1, len(prompts))
        return [self.results for _ in prompts]

    def push(self, values: dict[str, Any], on: Any = None, on_output: Any = None) -> list[str]:
        self.calls.append(("push", (values, on)))
        return on or self.here

    def pull(self, *names: str, on: Any = None, on_output: Any = None) -> dict[str, dict[str, Any]]:
        self.calls.append(("pull", (names, on)))
        return {worker: {name: f"{name} of {worker}" for name in names} for worker in on or self.here}

    def install(self, *packages: str, on: Any = None, on_output: Any = None) -> dict[str, str]:
        self.calls.append(("install", (packages, on)))
        return dict.fromkeys(on or self.here, "installed einops 0.8")

    def send_files(self, *paths: str, on: Any = None, on_output: Any = None) -> dict[str, str]:
        self.calls.append(("send_files", (paths, on)))
        return dict.fromkeys(on or self.here, "1 new")

    def save_checkpoint(self, path: Path) -> Path:
        Path(path).write_bytes(b"x" * 1500)
        return Path(path)

    def load_checkpoint(self, path: Path) -> dict[str, int]:
        self.calls.append(("load", Path(path)))
        return {"step": 46, "epoch": 2}

    def status(self) -> Status:
        workers = tuple(WorkerStatus(name, rank, "ready", "cpu", "CPU", "host") for rank, name in enumerate(self.here))
        run = self.run.status() if self.run else None
        address = "" if ("connect" in [name for name, _ in self.calls]) else "127.0.0.1:4242"  # it dialled
        return Status(
            self.state, address, "data", self.expected_workers, workers, run, tuple(self.cells), tunnel=self.tunnel,
            tunnel_note=self.tunnel_note,
        )  # fmt: skip

    def log(self, worker: str | None = None, n: int = 50) -> list[str]:
        if worker is not None:
            return self.printed.get(worker, [])[-n:]
        return [f"{name} | {line}" for name, lines in self.printed.items() for line in lines[-n:]]

    def close(self) -> None:
        self.state = "closed"


@dataclass
class FakeWorkerStatus:
    state: str
    name: str
    step: int | None
    device: str
    address: str
    detail: str = ""
    lines: tuple[str, ...] = ()
    joined: bool = True
    error: str = ""
    figures: OwnFigures = field(default_factory=OwnFigures)


@dataclass
class FakeWorker:
    """Ends after `num_waits` waits, or when it was told to leave or killed."""

    code: str
    device: str = "auto"
    name: str | None = None
    num_waits: int = 3
    interrupt_at: Sequence[int] = ()
    stubborn: bool = False
    last_state: str = "left"
    waits: int = 0
    calls: list[str] = field(default_factory=list)
    alive: bool = True
    away: bool = False  # its session is
    away_because: str = "it broke; a new join code may be needed"
    back_at: int = -1  # number of the wait at which its session comes back
    detail: str = ""
    joined: bool = True
    error: str = ""
    figures: OwnFigures = field(default_factory=OwnFigures)

    def wait(self, timeout_s: float | None = None) -> bool:
        if self.waits in self.interrupt_at:
            signal.raise_signal(signal.SIGINT)
        self.away = self.away and self.waits != self.back_at
        self.waits += 1
        left = "leave" in self.calls and not self.stubborn
        if left or "kill" in self.calls or self.waits >= self.num_waits:
            self.alive = False
        return not self.alive

    def leave(self) -> None:
        self.calls.append("leave")

    def redirect(self, code: JoinCode) -> None:
        self.calls.append(f"redirect {code.address}")
        self.away = False

    def kill(self) -> None:
        self.calls.append("kill")
        self.alive = False

    def status(self) -> FakeWorkerStatus:
        state = ("reconnecting" if self.away else "working") if self.alive else self.last_state
        detail = {"crashed": "exit status -9", "reconnecting": self.away_because}.get(
            state, "" if self.alive else self.detail
        )
        name = self.name or ("worker-0" if self.joined else "")
        return FakeWorkerStatus(
            state, name, self.waits, "cpu", "127.0.0.1:4242", detail, ("hello",), self.joined, self.error, self.figures
        )
