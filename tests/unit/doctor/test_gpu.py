"""Checks of CUDA and of the library that reads energy counters, on machines that are made up."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from guava_nb.doctor import Check, gpu

# ------------------------------------------------------------------------------------------------------------ hardware


def fake_torch(monkeypatch: pytest.MonkeyPatch, gpus: int = 0, cuda: str | None = None, mps: bool = False) -> None:
    torch = types.SimpleNamespace(
        cuda=types.SimpleNamespace(
            is_available=lambda: gpus > 0, device_count=lambda: gpus, get_device_name=lambda index: f"Card {index}"
        ),
        backends=types.SimpleNamespace(mps=types.SimpleNamespace(is_available=lambda: mps)),
        version=types.SimpleNamespace(cuda=cuda),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("torch", "driver", "status", "says"),
    [
        (
            {"gpus": 2, "cuda": "12.8"},
            "driver 570.1, 2 GPU(s)",
            "ok",
            "Card 0, Card 1 (CUDA 12.8, driver 570.1, 2 GPU(s))",
        ),
        ({"mps": True}, None, "ok", "Apple GPU"),
        ({}, None, "-", "none; workers compute on the CPU"),
        ({}, "driver 570.1, 1 GPU(s)", "warning", "torch is a CPU build"),
        ({"cuda": "13.0"}, "driver 470.1, 1 GPU(s)", "warning", "torch wants CUDA 13.0"),
    ],
)
def test_gpu(
    torch: dict[str, Any], driver: str | None, status: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch(monkeypatch, **torch)
    monkeypatch.setattr(gpu, "_driver", lambda: driver)
    check = gpu.check_gpu()
    assert check.status == status
    assert says in check.detail


def test_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    library = types.SimpleNamespace(
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlSystemGetDriverVersion=lambda: b"570.1",
        nvmlDeviceGetCount=lambda: 3,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)  # type: ignore[arg-type]
    assert gpu._driver() == "driver 570.1, 3 GPU(s)"
    assert calls == ["init", "shutdown"]

    def no_driver() -> None:
        raise RuntimeError("NVML_ERROR_LIBRARY_NOT_FOUND")

    library.nvmlInit = no_driver
    assert gpu._driver() is None


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A machine: `module` is what import finds, `owner` what nvidia-ml-py brought, `old` the deprecated package."""
    world = types.SimpleNamespace(module="/site/pynvml.py", owner="/site/pynvml.py", old=False)

    def find_spec(name: str) -> Any:
        return types.SimpleNamespace(origin=world.module) if world.module else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(gpu, "_module_of_owner", lambda: Path(world.owner) if world.owner else None)
    monkeypatch.setattr(gpu, "installed", lambda name: world.old if name == "pynvml" else bool(world.owner))
    monkeypatch.setattr(gpu, "_driver", lambda: None)
    return world


def test_nvml_in_order(nvml: types.SimpleNamespace) -> None:
    assert gpu.check_nvml() == Check("nvml", "ok", "library here, no NVIDIA driver")


def test_nvml_shadowed_missing_or_deprecated(nvml: types.SimpleNamespace) -> None:
    nvml.module = "/old/pynvml/__init__.py"
    check = gpu.check_nvml()
    assert check.status == "warning"
    assert "/old/pynvml/__init__.py" in check.detail
    assert "uninstall -y pynvml" in check.fix
    nvml.module, nvml.old = "/site/pynvml.py", True
    assert "deprecated" in gpu.check_nvml().detail
    nvml.module = None
    assert gpu.check_nvml().fix == "python -m pip install nvidia-ml-py"


def test_the_owner_of_pynvml_is_found_here() -> None:
    pytest.importorskip("pynvml")
    found = gpu._module_of_owner()
    assert found is not None
    assert found.name == "pynvml.py"


@pytest.mark.parametrize(
    ("missing", "status", "detail"),
    [
        ((), "ok", "GPU 0: total energy yes, power yes, utilisation yes; GPU 1: total energy yes, power yes, utilisation yes"),
        (("utilisation",), "ok", "GPU 0: total energy yes, power yes, utilisation no; GPU 1: total energy yes, power yes, "
         "utilisation no"),
        (("total energy",), "ok", "GPU 0: total energy no, power yes, utilisation yes; GPU 1: total energy no, power yes, "
         "utilisation yes"),
        (("total energy", "power"), "warning", "GPU 0: total energy no, power no, utilisation yes; GPU 1: total energy no, "
         "power no, utilisation yes"),
    ],
)  # fmt: skip
def test_what_a_gpu_tells_is_tried_call_by_call(
    missing: tuple[str, ...], status: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def refuse(handle: int) -> None:
        raise RuntimeError("Not Supported")

    library = types.SimpleNamespace(
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        **{call: (refuse if name in missing else lambda handle: 1) for name, call in gpu.READINGS.items()},
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)  # type: ignore[arg-type]
    monkeypatch.setattr(gpu, "_driver", lambda: "driver 570.1, 2 GPU(s)")
    check = gpu.check_energy()
    assert (check.status, check.detail) == (status, detail)
    assert calls == ["init", "shutdown"] and bool(check.fix) == (status == "warning")
    monkeypatch.setattr(gpu, "_driver", lambda: None)
    assert gpu.check_energy().detail == "no NVIDIA GPU to read"
