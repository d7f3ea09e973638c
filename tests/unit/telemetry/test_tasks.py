"""Time and energy by task: exact on any device, whatever the readings, and of no cost to who is not measured."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.errors import ConfigError
from guava_nb.telemetry import EnergyMeter, energy_task
from guava_nb.telemetry import tasks as tasks_module
from guava_nb.telemetry.cuda_events import CudaEvents
from guava_nb.telemetry.tasks import MOST_NAMES, TaskBook
from tests.support.sensors import Clock, Scripted
from tests.unit.telemetry.test_meter import meter_of, pass_time


@pytest.fixture(autouse=True)
def _device_of_other_tests_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks are made up here; a real device, once another test of this process used it, would tell real times."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


def by_name(window):
    return {task.task: (task.seconds, task.joules, task.times) for task in window.tasks}


def test_a_task_has_the_energy_of_its_time_and_one_within_counts_for_both() -> None:
    clock = Clock()
    meter = meter_of(Scripted(lambda s: 100.0 if s < 4 else 300.0, clock), clock=clock)
    with meter:
        with meter.task("epoch"):
            with energy_task("attention"):
                pass_time(meter, clock, 2.0)
            pass_time(meter, clock, 2.0)
            with energy_task("attention"), energy_task("attention"):  # itself within itself counts once
                pass_time(meter, clock, 1.0)
        pass_time(meter, clock, 1.0)
    assert meter.window is not None
    found = by_name(meter.window)
    assert found["epoch"] == (pytest.approx(5), pytest.approx(4 * 100 + 300, rel=0.03), 1)
    assert found["attention"] == (pytest.approx(3), pytest.approx(2 * 100 + 300, rel=0.03), 2)
    assert meter.window.to_dict()["tasks"][0]["task"] in found


def test_a_task_between_two_readings_has_its_part_of_the_time() -> None:
    clock = Clock()
    meter = meter_of(Scripted(lambda s: 100 * s, clock, counts=True), clock=clock)
    with meter:
        clock.wait(0.25)
        with energy_task("short"):
            clock.wait(0.5)
        clock.wait(0.25)
    assert meter.window is not None and by_name(meter.window)["short"] == (0.5, pytest.approx(50), 1)


@pytest.mark.parametrize("sensors", [(), (lambda s: None,)])
def test_where_nothing_measures_a_task_has_time_and_no_joules(sensors) -> None:
    clock = Clock()
    with meter_of(*(Scripted(at, clock) for at in sensors), clock=clock) as meter, energy_task("x"):
        clock.wait(1.0)
    assert meter.window is not None and by_name(meter.window) == {"x": (1.0, None, 1)}


def test_windows_have_the_tasks_that_ended_in_them() -> None:
    clock = Clock()
    meter = meter_of(Scripted(lambda s: 10.0, clock), clock=clock)
    meter.begin("run")
    for name in ("a", "b"):
        meter.begin(name)
        with meter.task("x"):
            pass_time(meter, clock, 1.0)
        assert meter.so_far(name).tasks == meter.end(name).tasks
        assert meter.window is not None and by_name(meter.window)["x"] == (pytest.approx(1), pytest.approx(10), 1)
    assert by_name(meter.end("run"))["x"] == (pytest.approx(2), pytest.approx(20), 2)
    meter.close()


def test_without_a_window_a_task_is_refused_or_nothing() -> None:
    meter = meter_of(clock=Clock())
    with pytest.raises(ConfigError, match="no window is open"):
        meter.task("x")
    with energy_task("x"):
        pass
    assert tasks_module._listening == ()
    for bad in ("", " ", 3, None):
        with pytest.raises(ConfigError, match="name for a task"):
            energy_task(bad)  # type: ignore[arg-type]


def test_a_task_that_fails_is_counted_and_raises_on() -> None:
    clock = Clock()
    with (
        meter_of(Scripted(lambda s: 10.0, clock), clock=clock) as meter,
        pytest.raises(ZeroDivisionError),
        energy_task("x"),
    ):
        clock.wait(1.0)
        1 / 0  # noqa: B018
    assert meter.window is not None and by_name(meter.window)["x"][0] == 1.0
    assert tasks_module._listening == ()


def test_tasks_of_several_threads_add_up() -> None:
    clock = Clock()
    inside, over = threading.Barrier(3), threading.Barrier(3)

    def work() -> None:
        with energy_task("load"):
            inside.wait(30)
            over.wait(30)

    with meter_of(Scripted(lambda s: 10.0, clock), clock=clock) as meter:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        inside.wait(30)
        clock.wait(3.0)
        over.wait(30)
        for thread in threads:
            thread.join(30)
    assert meter.window is not None and by_name(meter.window)["load"] == (6.0, pytest.approx(60), 2)


@dataclass
class Lagging:
    """A device that is at an event some seconds after the host recorded it, as a GPU with a full queue."""

    clock: Clock
    lag_s: float

    def mark(self) -> float:
        return self.clock() + self.lag_s

    def time_of(self, event: float, at_s: float) -> float | None:
        assert at_s <= event
        return event if self.clock() >= event else None


spans = st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.001, 2), st.floats(0, 1)), min_size=1, max_size=20)


@given(spans, st.floats(0, 3), st.lists(st.tuples(st.floats(0.01, 2), st.floats(0, 300)), min_size=1, max_size=60))
def test_whatever_the_lag_each_task_has_the_joules_of_its_own_time(spans, lag_s, readings) -> None:
    clock = Clock()
    book, start_s, curve = TaskBook(clock, *_calls(Lagging(clock, lag_s))), clock(), []
    at, coming = start_s, list(readings)

    def joules_until(until_s: float) -> float:
        return sum(j * max(0.0, min(1.0, (until_s - a) / (b - a))) for a, b, j in curve)

    def read_on() -> None:
        """What a thread that reads sensors has done by now."""
        nonlocal at
        while coming and at + coming[0][0] <= clock():
            seconds, joules = coming.pop(0)
            curve.append((at, at + seconds, joules))
            at += seconds
            book.measured(curve[-1:], at)

    expected: dict[str, list[tuple[float, float]]] = {}
    for name, seconds, pause in spans:
        token = book.begin(name)
        begun = clock() + lag_s
        clock.wait(seconds)
        read_on()
        assert token is not None
        book.end(name, token)
        expected.setdefault(name, []).append((begun, clock() + lag_s))
        clock.wait(pause)
    clock.wait(lag_s)
    read_on()
    book.measured((), clock())
    for name, found in book.totals().items():
        assert found.times == len(expected[name])
        assert found.seconds == pytest.approx(sum(b - a for a, b in expected[name]))
        assert found.joules == pytest.approx(
            sum(joules_until(b) - joules_until(a) for a, b in expected[name]), abs=1e-6
        )
    assert set(book.totals()) == set(expected)
    assert not book._points and len(book._parts) == 0  # nothing is kept that nobody asks for


def _calls(device: Lagging):
    return device.mark, device.time_of


def test_names_without_end_and_a_sensor_that_hangs_take_no_memory_without_end(monkeypatch) -> None:
    clock = Clock()
    book = TaskBook(clock)
    for number in range(MOST_NAMES + 50):
        book.end(f"step {number}", book.begin(f"step {number}"))
    book.measured((), clock())
    totals = book.totals()
    assert len(totals) == MOST_NAMES + 1 and totals["(further tasks)"].times == 50
    monkeypatch.setattr(tasks_module, "_MOST_WAITING", 10)
    tokens = [book.begin(f"x{number}") for number in range(20)]
    assert tokens[9] is not None and tokens[19] is None
    assert book.missed == sum(token is None for token in tokens)
    book.forget()
    assert book.missed == 0


def test_a_window_with_many_names_takes_no_room_from_the_next() -> None:
    clock = Clock()
    meter = meter_of(clock=clock)
    for run in range(2):
        meter.begin("run", restart=True)
        for number in range(MOST_NAMES):
            with meter.task(f"run {run}, {number}"):
                pass
        assert len(meter.so_far("run").tasks) == MOST_NAMES
        assert "(further tasks)" not in by_name(meter.so_far("run"))
    meter.close()


@pytest.mark.parametrize("name", ["caf\udce9", "x" * 3_000_000, "\x1b[31mred\x00\n"])
def test_any_text_is_a_name_that_can_be_sent_and_shown(name: str) -> None:
    clock = Clock()
    with meter_of(clock=clock) as meter, meter.task(name), energy_task("y"):
        clock.wait(1.0)
    assert meter.window is not None
    found = {task.task: task.times for task in meter.window.tasks}
    assert len(found) == 2 and all(len(n.encode()) < 250 and n.isprintable() for n in found)


def _loads(times: int):
    with energy_task("load"):
        yield from range(times)


def test_a_task_of_a_suspended_generator_hides_no_other() -> None:
    clock = Clock()
    with meter_of(clock=clock) as meter:
        elsewhere, kept = _loads(2), _loads(2)
        next(elsewhere)
        next(kept)
        ends = threading.Thread(target=lambda: list(elsewhere))
        ends.start()
        ends.join(30)
        for _ in range(3):
            with energy_task("load"):
                clock.wait(1.0)
    assert meter.window is not None and by_name(meter.window)["load"][2] == 4
    kept.close()


def test_one_task_is_used_within_itself_and_by_several_threads() -> None:
    clock = Clock()
    with meter_of(clock=clock) as meter:
        again = energy_task("again")
        with again, again:
            clock.wait(1.0)
        inside = threading.Barrier(4)

        def work() -> None:
            with again:
                inside.wait(30)
            with again:
                pass

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        with again:
            clock.wait(1.0)
    assert meter.window is not None and by_name(meter.window)["again"][2] == 1 + 8 + 1


def test_a_device_that_fails_costs_the_task_not_the_code() -> None:
    def broken() -> None:
        raise RuntimeError("a driver's own")

    book = TaskBook(Clock(), broken)
    assert book.begin("x") is None
    book.measured((), 0.0)
    assert book.totals() == {}


def test_naming_a_task_loads_no_torch_and_needs_no_meter() -> None:
    code = (
        "import sys; from guava_nb import energy_task\nwith energy_task('x'): pass\nassert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


class Gpu:
    """The calls of `torch.cuda` that events need, of a device that falls behind the host and whose own clock is another."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.behind_s, self.initialised, self.capturing = clock, 0.0, True, False
        self.now_s = 5.0 - clock()
        gpu = self

        class Event:
            device = "cuda:0"

            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: object) -> None:
                self.at_s = gpu.clock() + gpu.behind_s

            def query(self) -> bool:
                return gpu.clock() >= self.at_s

            def synchronize(self) -> None:
                assert self.query(), "the device was idle when it was tied to the clock"

            def elapsed_time(self, end: Event) -> float:
                return (end.at_s - self.at_s) * 1e3

        self.Event = Event

    def is_initialized(self) -> bool:
        return self.initialised

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def synchronize(self, device: object) -> None:
        self.clock.wait(self.behind_s)
        self.behind_s = 0.0

    def current_stream(self, device: object) -> None:
        return None

    def is_current_stream_capturing(self) -> bool:
        return self.capturing


def test_on_a_gpu_a_task_has_the_time_of_the_device_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    gpu = Gpu(clock)
    torch = SimpleNamespace(cuda=gpu, compiler=SimpleNamespace(is_compiling=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", torch)
    meter = EnergyMeter([0], sensors=[Scripted(lambda s: 100 * s, clock, counts=True)], clock=clock, background=False)
    meter.begin()
    clock.wait(1.0)
    with energy_task("kernels"):  # the host only queues them: that takes it no time
        gpu.behind_s = 4.0
    assert meter.so_far().tasks == ()  # the device is not there yet
    pass_time(meter, clock, 2.0)
    gpu.behind_s = 2.0
    gpu.capturing = True
    with energy_task("captured"):  # a graph would record the event instead of the device's time
        clock.wait(0.5)
    gpu.capturing, gpu.behind_s = False, 1.5
    window = meter.end()  # waits for the device, as every end of a window
    assert by_name(window)["kernels"] == (pytest.approx(4), pytest.approx(400), 1)
    assert by_name(window)["captured"] == (pytest.approx(0.5), pytest.approx(50), 1)
    meter.close()


def test_a_long_run_is_tied_to_the_clock_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's clock drifts by 1 in 1000, far more than any: what is known of an event bounds its time."""
    clock = Clock()
    gpu = Gpu(clock)
    kept = gpu.Event.elapsed_time
    gpu.Event.elapsed_time = lambda self, end: kept(self, end) * 1.001
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=gpu))
    events = CudaEvents(None, clock)
    events.anchor()
    for _ in range(200):
        clock.wait(30.0)
        event, at_s = events.mark(), clock()
        clock.wait(0.1)
        found_s = events.time_of(event, at_s)
        assert found_s is not None and at_s <= found_s <= clock()
    gpu.initialised = False
    assert events.mark() is None


def test_while_torch_compiles_a_task_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it did would break the graph; tried with `torch.compile(fullgraph=True)`, which takes too long here."""
    import torch

    clock = Clock()
    with meter_of(clock=clock) as meter:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        with energy_task("inside"), meter.task("inside too"):
            clock.wait(1.0)
    assert meter.window is not None and meter.window.tasks == ()


def test_what_runs_beside_the_run_counts_for_no_task() -> None:
    clock = Clock()
    with meter_of(clock=clock) as meter:
        with tasks_module.uncounted(), energy_task("x"):
            clock.wait(1.0)
        with energy_task("x"):
            clock.wait(0.5)
    assert meter.window is not None and by_name(meter.window)["x"] == (0.5, None, 1)
