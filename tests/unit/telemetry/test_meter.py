"""Windows over scripted sensors and a clock that passes when told."""

from __future__ import annotations

import itertools
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.errors import ConfigError
from guava_nb.telemetry import EnergyMeter
from guava_nb.telemetry.devices import RaplSensor, open_rapl
from guava_nb.telemetry.nvml import NvmlBoard, open_board
from tests.support.sensors import Clock, FakeNvml, Scripted


def meter_of(*sensors: Scripted, clock: Clock) -> EnergyMeter:
    return EnergyMeter(sensors=sensors, clock=clock, background=False)


def pass_time(meter: EnergyMeter, clock: Clock, seconds: float, pace_s: float = 0.1) -> None:
    for _ in range(round(seconds / pace_s)):
        clock.wait(pace_s)
        meter.poll()


class BusyMachine(Clock):
    """Time passes whenever somebody looks: by the next of these seconds, as where a thread is woken late."""

    def __init__(self, delays_s: list[float]) -> None:
        super().__init__()
        self._delays_s = itertools.cycle(delays_s)

    def __call__(self) -> float:
        self.wait(next(self._delays_s))
        return super().__call__()


@given(st.lists(st.floats(1e-6, 0.5), min_size=1, max_size=7))
def test_seconds_and_joules_are_of_the_same_stretch_however_late_a_machine_is(delays_s: list[float]) -> None:
    clock = BusyMachine(delays_s)
    meter = meter_of(Scripted(lambda s: 60.0, clock), clock=clock)
    meter.begin()
    clock.wait(1.0)
    part = meter.so_far()
    clock.wait(1.0)
    for window in (part, meter.end()):
        assert window.watts == pytest.approx(60, rel=1e-9) and window.boards[0].uncovered_s <= 1e-9
    meter.close()


def test_200_watts_for_10_seconds_are_2000_joules() -> None:
    clock = Clock()
    power, counter = Scripted(lambda s: 200.0, clock), Scripted(lambda s: 7 + 200 * s, clock, counts=True, key="b")
    meter = meter_of(power, counter, clock=clock)
    meter.begin()
    pass_time(meter, clock, 10.0)
    window = meter.end()
    assert [board.joules for board in window.boards] == [pytest.approx(2000, rel=0.01)] * 2
    assert window.watts == pytest.approx(400, rel=0.01)
    assert window.watt_hours == pytest.approx(4000 / 3600, rel=0.01)
    assert json.loads(json.dumps(window.to_dict()))["boards"][0]["joules"] == window.boards[0].joules
    assert window.per(100) == pytest.approx(40, rel=0.01)
    assert window.co2e_g(475) == pytest.approx(4000 / 3.6e6 * 475, rel=0.01)
    meter.close()
    assert power.closed and counter.closed


def test_two_sensors_of_one_board_count_once() -> None:
    clock = Clock()
    meter = meter_of(Scripted(lambda s: 200.0, clock), Scripted(lambda s: 200.0, clock), clock=clock)
    with meter:
        pass_time(meter, clock, 10.0)
    assert meter.window is not None and meter.window.joules == pytest.approx(2000, rel=0.01)
    assert len(meter.window.boards) == 1


def test_windows_overlap_and_restart() -> None:
    clock = Clock()
    meter = meter_of(Scripted(lambda s: 100.0, clock), clock=clock)
    meter.begin("run")
    pass_time(meter, clock, 1.0)
    meter.begin("epoch")
    with pytest.raises(ConfigError, match="restart=True"):
        meter.begin("epoch")
    pass_time(meter, clock, 1.0)
    meter.begin("epoch", restart=True)
    pass_time(meter, clock, 1.0)
    assert meter.so_far("run").joules == pytest.approx(300)
    assert meter.end("epoch").joules == pytest.approx(100)
    assert meter.end("run").joules == pytest.approx(300)
    with pytest.raises(ConfigError, match="no window 'run' is open"):
        meter.end("run")


def test_a_block_may_end_its_window_itself_and_a_closed_meter_says_so() -> None:
    clock = Clock()
    meter = meter_of(Scripted(lambda s: 100.0, clock), clock=clock)
    with meter:
        pass_time(meter, clock, 1.0)
        assert meter.end().joules == pytest.approx(100)
    with pytest.raises(ConfigError, match="closed"):
        meter.begin()


def test_a_window_shorter_than_the_sensor_s_pace_says_so() -> None:
    clock = Clock()
    meter = meter_of(Scripted(lambda s: 100.0, clock), clock=clock)
    meter.begin()
    clock.wait(0.05)
    window = meter.end()
    assert window.boards[0].too_short and "too short" in repr(window)


def leaping(s: float) -> float:
    """A counter of 200 W that is refreshed every 0.1 s."""
    return 20.0 * int(s / 0.1 + 1e-9)


@pytest.mark.parametrize(("watts", "joules"), [(200.0, 6.0), (None, None)])
def test_a_window_between_two_leaps_of_a_counter_is_no_0_joules(watts: float | None, joules: float | None) -> None:
    clock = Clock()
    meter = meter_of(Scripted(leaping, clock, counts=True, watts=watts), clock=clock)
    clock.wait(0.01)
    meter.begin()
    clock.wait(0.03)
    window = meter.end()
    assert window.joules == (None if joules is None else pytest.approx(joules))
    assert window.boards[0].method == ("scripted" if joules is None else "scripted, by power and time")


def test_a_leap_in_a_short_window_does_not_count_whole() -> None:
    """The power is the counter's own where it was seen to grow twice, whatever the sensor says of it."""
    clock = Clock()
    meter = meter_of(Scripted(leaping, clock, counts=True, watts=55.0), clock=clock)
    meter.begin("long")
    pass_time(meter, clock, 1.0, pace_s=0.1)
    clock.wait(0.09)
    meter.begin("short")
    clock.wait(0.02)
    assert meter.end("short").joules == pytest.approx(4.0, rel=0.15)
    assert meter.end("long").joules == pytest.approx(220.0)


def test_a_sensor_that_dies_leaves_a_gap_and_raises_nothing() -> None:
    clock = Clock()
    meter = meter_of(Scripted(lambda s: 100.0 if s < 5 else None, clock), clock=clock)
    meter.begin()
    pass_time(meter, clock, 10.0)
    window = meter.end()
    assert window.joules == pytest.approx(490, rel=0.03)
    assert "the script says no" in window.boards[0].problem


def test_a_sensor_that_never_spoke_is_not_measured() -> None:
    clock = Clock()
    meter = meter_of(Scripted(lambda s: None, clock), clock=clock)
    meter.begin()
    pass_time(meter, clock, 1.0)
    window = meter.end()
    assert window.joules is None and window.watts is None and window.per(3) is None
    assert "not measured" in repr(window)


def test_the_thread_reads_and_ends() -> None:

    clock = Clock()
    read = threading.Event()

    def at(seconds: float) -> float:
        if threading.current_thread().name == "guava-energy":
            read.set()
        return 1.0

    with EnergyMeter(sensors=[Scripted(at, clock)], interval_s=0.001):
        assert read.wait(30)
    assert all(thread.name != "guava-energy" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("refuses", "method"),
    [
        ((), "NVML energy counter"),
        (("nvmlDeviceGetTotalEnergyConsumption",), "NVML power, integrated"),
        (("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage"), None),
    ],
)
def test_the_best_that_a_board_has(refuses: tuple[str, ...], method: str | None) -> None:
    board = open_board("1234", "host", FakeNvml(refuses))
    assert isinstance(board, NvmlBoard) and board.board.key == "host/GPU-1234"
    assert (board.sensor.method if board.sensor else None) == method
    if method is None:
        assert "Not Supported" in board.why
    assert board.gauges().busy == 0.75
    assert board.gauges().power_w == (None if "nvmlDeviceGetPowerUsage" in refuses else 200.0)


def test_thousandths_become_joules_and_watts() -> None:
    counter = open_board("GPU-1", "host", FakeNvml())
    power = open_board("GPU-1", "host", FakeNvml(("nvmlDeviceGetTotalEnergyConsumption",)))
    assert isinstance(counter, NvmlBoard) and counter.sensor is not None and counter.sensor.read() == 5000.0
    assert isinstance(power, NvmlBoard) and power.sensor is not None and power.sensor.read() == 200.0


def test_a_meter_gives_nvml_back_once() -> None:
    api = FakeNvml()
    board = open_board("1", "host", api)
    assert isinstance(board, NvmlBoard) and board.sensor is not None and api.opened == 1
    meter = EnergyMeter(sensors=[board.sensor], background=False)
    meter.close()
    meter.close()
    assert api.opened == 0


def test_no_driver_no_uuid_no_slice() -> None:
    api = FakeNvml(("nvmlInit",))
    assert "does not start" in str(open_board("1", "host", api))
    unknown = FakeNvml(("nvmlDeviceGetHandleByUUID",))
    assert "does not know" in str(open_board("1", "host", unknown)) and unknown.opened == 0
    assert "UUID" in str(open_board("", "host", FakeNvml()))
    assert "MIG" in str(open_board("MIG-1", "host", FakeNvml()))
    split = open_board("1", "host", FakeNvml(mig=True))
    assert isinstance(split, NvmlBoard) and split.sensor is None and "MIG" in split.why


def packages(root, *values: int, readable: bool = True) -> None:
    for index, microjoules in enumerate(values):
        folder = root / f"intel-rapl:{index}"
        folder.mkdir(exist_ok=True)
        (folder / "name").write_text(f"package-{index}\n")
        (folder / "energy_uj").write_text(f"{microjoules}\n")
        (folder / "max_energy_range_uj").write_text("1000000000\n")


def test_rapl_adds_packages_and_bridges_wraps(tmp_path) -> None:
    packages(tmp_path, 999_000_000, 1_000_000)
    part = tmp_path / "intel-rapl:0:0"
    part.mkdir()
    (part / "name").write_text("core\n")
    sensor = open_rapl("host", tmp_path)
    assert isinstance(sensor, RaplSensor) and sensor.read() == 0
    packages(tmp_path, 4_000_000, 3_000_000)
    assert sensor.read() == pytest.approx(5.0 + 2.0)


def test_rapl_says_why_it_is_not_there(tmp_path) -> None:
    assert "no RAPL" in str(open_rapl("host", tmp_path))
    packages(tmp_path, 1)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("nonsense")
    assert "cannot be read" in str(open_rapl("host", tmp_path))


@pytest.mark.parametrize("value", [None, "60 W", float("nan"), float("inf"), -5.0])
def test_what_is_no_reading_is_not_measured(value: object) -> None:
    clock = Clock()

    class Odd(Scripted):
        def read(self) -> float:
            return value  # type: ignore[return-value]

    meter = EnergyMeter(sensors=[Odd(lambda s: 1.0, clock)], clock=clock, background=False)
    with meter:
        pass_time(meter, clock, 1.0)
    assert meter.window is not None and meter.window.joules is None and meter.window.boards[0].problem


def test_a_counter_that_only_falls_is_not_measured() -> None:
    clock = Clock()
    meter = meter_of(Scripted(lambda s: 1000.0 - s, clock, counts=True), clock=clock)
    with meter:
        pass_time(meter, clock, 2.0)
    assert meter.window is not None and meter.window.joules is None


@pytest.mark.parametrize("interval_s", [0, -1, float("nan"), float("inf"), 1e300, "a", None, True])
def test_an_interval_is_seconds(interval_s: object) -> None:
    with pytest.raises(ConfigError, match="interval_s"):
        EnergyMeter(sensors=(), interval_s=interval_s)  # type: ignore[arg-type]


def test_a_text_is_one_device_and_what_is_none_is_refused() -> None:
    meter = EnergyMeter("xpu:0")
    assert [device for device, _ in meter.unmeasured if device != "cpu"] == ["xpu:0"]
    for bad in ([], 5, None):
        with pytest.raises(ConfigError, match="name for a window"):
            meter.begin(bad)  # type: ignore[arg-type]
    meter.close()
    with pytest.raises(ConfigError, match="devices 5"):
        EnergyMeter(5)  # type: ignore[arg-type]


class Hanging(Scripted):
    """Answers for a while, then hangs until it is let go."""

    def __init__(self, clock: Clock, answers: int) -> None:
        super().__init__(lambda s: 100 * s, clock, counts=True, key="host/GPU-slow")
        self.answers, self.hangs, self.go_on = answers, threading.Event(), threading.Event()

    def read(self) -> float:
        self.answers -= 1
        if self.answers < 0:
            self.hangs.set()
            assert self.go_on.wait(60)
        return super().read()


@pytest.mark.parametrize("answers", [0, 1])
def test_a_sensor_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch, answers: int) -> None:
    monkeypatch.setattr("guava_nb.telemetry.meter.PATIENCE_S", 0.05)
    monkeypatch.setattr("guava_nb.telemetry.meter._JOIN_S", 0.05)
    clock = Clock()
    slow = Hanging(clock, answers)
    meter = EnergyMeter(sensors=[Scripted(lambda s: 5 * s, clock, counts=True), slow], clock=clock, interval_s=30)
    meter.begin()
    clock.wait(10.0)
    with meter.task("x"):
        clock.wait(1.0)
    assert meter.so_far().boards[1].joules is None
    assert slow.hangs.is_set()
    window = meter.end()
    assert window.seconds == 11.0 and window.boards[1].joules is None and window.boards[1].uncovered_s == 11.0
    assert [task.task for task in window.tasks] == ["x"]
    meter.begin()  # while it still hangs
    meter.end()
    meter.close()
    assert not slow.closed  # not under a call that may be using it
    slow.go_on.set()
    for thread in [thread for thread in threading.enumerate() if thread.name == "guava-energy"]:
        thread.join(30)
    assert slow.closed


def test_a_sensor_that_answers_late_counts_from_its_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guava_nb.telemetry.meter.PATIENCE_S", 0.05)
    clock = Clock()
    slow = Hanging(clock, 0)
    meter = EnergyMeter(sensors=[slow], clock=clock, interval_s=30)
    meter.begin()
    clock.wait(4.0)
    monkeypatch.setattr("guava_nb.telemetry.meter.PATIENCE_S", 30.0)
    slow.go_on.set()
    meter.poll()
    clock.wait(6.0)
    window = meter.end()
    assert (window.joules, window.boards[0].uncovered_s) == (600.0, 4.0)
    meter.close()


def test_the_end_of_a_counter_that_died_is_told_as_a_gap() -> None:
    clock = Clock()
    meter = meter_of(Scripted(lambda s: 100 * s if s < 5 else None, clock, counts=True), clock=clock)
    with meter:
        pass_time(meter, clock, 10.0)
    assert meter.window is not None
    (board,) = meter.window.boards
    assert board.joules == pytest.approx(490, rel=0.03) and board.uncovered_s == pytest.approx(5.1, abs=0.2)


def test_a_sensor_that_was_given_up_is_asked_again_at_the_next_window() -> None:
    clock = Clock()
    meter = meter_of(Scripted(lambda s: None if s < 10 else 100.0, clock), clock=clock)
    meter.begin()
    pass_time(meter, clock, 11.0)  # long after it is asked no more
    assert meter.end().joules is None
    meter.begin()
    pass_time(meter, clock, 1.0)
    assert meter.end().joules == pytest.approx(100)
    meter.close()
