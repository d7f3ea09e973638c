"""Each check against machines that are made up."""

from __future__ import annotations

import importlib.util
import socket
import sys
import types
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from guava_nb.doctor import Check, exit_status, gpu, machine, network, run_checks, software
from guava_nb.doctor.check import release
from guava_nb.doctor.memory import WORKER_BYTES, Memory
from guava_nb.errors import LinkTimeout


def versions(monkeypatch: pytest.MonkeyPatch, **known: str) -> None:
    def version(name: str) -> str:
        if name not in known:
            raise PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(software, "version", version)


def test_release() -> None:
    assert release("2.13.0+cpu") == (2, 13, 0)
    assert release("7.0.0rc1") == (7, 0, 0)
    assert release("unknown") == ()
    assert release("2.9") < release("2.13")


def test_exit_status_and_a_check_that_breaks() -> None:
    def check_broken() -> Check:
        raise OSError("driver gone")

    results = run_checks([lambda: Check("a", "warning", ""), check_broken])
    assert results[1] == Check("broken", "fail", "the check itself failed with OSError: driver gone")
    assert exit_status(results) == 1
    assert exit_status(results[:1]) == 0


@pytest.mark.parametrize(
    ("found", "status", "says"),
    [
        ("2.13.0+cpu", "ok", ""),
        ("2.11.0", "warning", ""),
        ("2.5.1", "fail", "torch>=2.6"),
        (None, "fail", "install torch"),
    ],
)
def test_torch(found: str | None, status: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, **({"torch": found} if found else {}))
    check = software.check_torch()
    assert check.status == status
    assert says in check.fix
    if found:
        assert check.detail == f"{found} (tested: 2.13)"


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ("6.29.5", "ok"),
        ("7.0.0", "warning"),
        ("7.0.1", "warning"),
        ("7.4.0", "ok"),
        ("6.9.0", "warning"),
        (None, "warning"),
    ],
)
def test_ipykernel(found: str | None, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, **({"ipykernel": found} if found else {}))
    check = software.check_ipykernel()
    assert check.status == status
    assert bool(check.fix) == (status != "ok")


@pytest.mark.parametrize(("found", "status"), [("8.1.9", "ok"), ("7.6.5", "warning"), (None, "warning")])
def test_ipywidgets(found: str | None, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, **({"ipywidgets": found} if found else {}))
    assert software.check_ipywidgets().status == status


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.check_python().status == "ok"
    monkeypatch.setattr(sys, "version_info", (3, 9, 0))
    assert software.check_python().status == "fail"


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.check_packages().status == "ok"
    monkeypatch.setitem(software.PACKAGES, "no_such_module_at_all", "no-such-package")
    check = software.check_packages()
    assert check.status == "fail"
    assert check.fix == "python -m pip install no-such-package"
    assert "ModuleNotFoundError" in check.detail


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
    monkeypatch.setattr(gpu, "_installed", lambda name: world.old if name == "pynvml" else bool(world.owner))
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


def test_memory_cores_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory = Memory(10 * WORKER_BYTES, 4 << 30)
    monkeypatch.setattr(machine, "memory_here", lambda: memory)
    check = machine.check_memory()
    assert check.status == "ok" and check.detail.endswith("of 4.0 GiB free, room for about 10 small workers")
    memory = Memory(2 * WORKER_BYTES - 1, 2 << 30, is_limited=True)
    check = machine.check_memory()
    assert check.status == "warning" and "of 2.0 GiB that this host gives free, room for about 1 small" in check.detail

    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert machine.check_cores().status == "warning"
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert machine.check_cores() == Check("cores", "ok", "2")

    monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: types.SimpleNamespace(free=5 << 30))
    assert machine.check_disk(tmp_path) == Check("disk", "ok", f"5.0 GiB free in {tmp_path}")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: types.SimpleNamespace(free=1 << 20))
    assert machine.check_disk(tmp_path).status == "warning"


# ------------------------------------------------------------------------------------------------------------- network


def test_port_that_may_not_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: Any) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(socket, "create_server", refuse)
    check = network.check_port()
    assert check.status == "fail"
    assert "cannot listen on 127.0.0.1: not here" in check.detail


def test_connection_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "connect_to_itself", lambda: None)
    assert network.check_connection().status == "ok"

    def time_out() -> None:
        raise LinkTimeout("nothing came from 127.0.0.1 for 10 s")

    monkeypatch.setattr(network, "connect_to_itself", time_out)
    check = network.check_connection()
    assert check.status == "fail"
    assert "nothing came from 127.0.0.1" in check.detail


def test_the_listener_is_closed_when_dialling_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Listener:
        def __init__(self, options: object, on_event: Any, host: str) -> None:
            on_event("opened")
            calls.append(host)

        def start(self) -> None:
            calls.append("start")

        def join_code(self) -> str:
            return "code"

        def close(self) -> None:
            calls.append("close")

    def dial(code: str, on_event: Any, options: object) -> None:
        raise LinkTimeout("no answer")

    for name, content in {
        "dialler": {"dial": dial},
        "listener": {"Listener": Listener},
        "options": {"LinkOptions": dict},
    }.items():
        module = types.ModuleType(f"guava_nb.link.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(LinkTimeout):
        network.connect_to_itself()
    assert calls == ["127.0.0.1", "start", "close"]
