"""A GPU that no driver is here for is refused without torch; what no driver decides is torch's to judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from guava_nb.errors import ConfigError
from guava_nb.processes import gpu_driver


@pytest.mark.parametrize("wanted", ["cuda", "cuda:1", "0"])
def test_a_gpu_is_refused_at_once_where_no_driver_is(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setattr(gpu_driver, "has_gpu_driver", lambda: False)
    with pytest.raises(ConfigError, match=f"device '{wanted}' is not here: this machine has no driver of a GPU"):
        gpu_driver.check_device(wanted)
    monkeypatch.setattr(gpu_driver, "has_gpu_driver", lambda: True)
    gpu_driver.check_device(wanted)


@pytest.mark.parametrize("wanted", ["gpu", "GPU", "CUDA:0", "nvidia"])
def test_another_word_for_a_gpu_is_told_its_name(wanted: str) -> None:
    with pytest.raises(ConfigError, match="a GPU is called cuda, or cuda:1 by its number"):
        gpu_driver.check_device(wanted)


def test_what_no_driver_decides_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_driver, "has_gpu_driver", lambda: False)
    for wanted in ("auto", "cpu", "mps", "xpu:1"):
        gpu_driver.check_device(wanted)


def test_a_driver_is_a_library_or_the_device_of_rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_driver, "_ROCM", tmp_path / "kfd")
    monkeypatch.setattr(gpu_driver, "_DRIVERS", ("libguava_no_such_driver.so",))
    assert not gpu_driver.has_gpu_driver()
    (tmp_path / "kfd").touch()
    assert gpu_driver.has_gpu_driver()
    (tmp_path / "kfd").unlink()
    loaded: list[str] = []
    monkeypatch.setattr(gpu_driver.ctypes, "CDLL", loaded.append)
    assert gpu_driver.has_gpu_driver() and loaded == ["libguava_no_such_driver.so"]
