"""Curves of how devices were used through a run."""

from __future__ import annotations

from guava_nb.protocol.messages import BoardEnergy, Energy
from guava_nb.telemetry.device_curves import _MOST_DEVICES, _MOST_POINTS, DeviceCurves


def gpu(busy: float, used_bytes: int, key: str = "host/GPU-1") -> Energy:
    board = BoardEnergy(key=key, name="a GPU", method="", joules=None, readings=1)
    return Energy(
        run_id="r", mark=0, seconds=1.0, boards=(board,), busy=busy, memory_used_bytes=used_bytes, memory_bytes=16
    )


def cpu(busy: float | None) -> Energy:
    return Energy(run_id="r", mark=0, seconds=1.0, cpu_busy=busy, host_memory_used_bytes=3, host_memory_bytes=8)


def test_a_shared_device_is_one_with_the_names_of_all_its_workers() -> None:
    curves = DeviceCurves()
    for second in range(3):
        curves.heard("a", "host", second, gpu(0.5, second))
        curves.heard("b", "host", second + 0.2, gpu(0.9, 99))
        curves.heard("c", "host", second, cpu(0.25))
        curves.heard("d", "elsewhere", second, cpu(None))
    board, machine, other = curves.uses()
    assert (board.workers, board.is_gpu) == ("a, b", True) and (machine.workers, machine.is_gpu) == ("c", False)
    assert board.busy == ((0, 0.5), (1, 0.5), (2, 0.5)) and board.memory_used_bytes == ((0, 0), (1, 1), (2, 2))
    assert machine.busy[-1] == (2, 0.25) and other.busy == (), "what is not told is no 0"


def test_a_long_run_keeps_its_means_and_its_peaks() -> None:
    curves = DeviceCurves()
    for second in range(20_001):
        curves.heard("a", "host", second, gpu(second % 2, 1000 if second == 7777 else 1))
    (one,) = curves.uses()
    assert _MOST_POINTS / 2 <= len(one.busy) <= _MOST_POINTS + 1 and one.busy[-1][0] == 20_000
    assert all(value == 0.5 for _, value in one.busy[:-1]) and max(used for _, used in one.memory_used_bytes) == 1000


def test_a_worker_that_names_ever_new_devices_fills_no_memory() -> None:
    curves = DeviceCurves()
    for number in range(_MOST_DEVICES + 10):
        curves.heard("a", "host", number, gpu(0.5, 1, f"host/{number}"))
    assert len(curves.uses()) == _MOST_DEVICES
