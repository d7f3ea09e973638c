"""What this machine has: the device a worker uses, and the hello that describes it."""

from __future__ import annotations

import platform
import socket
from pathlib import Path

import psutil
import torch

from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import Hello
from guava_nb.telemetry.versions import local_versions

__all__ = ["describe", "pick_device", "visible_devices"]


def visible_devices() -> list[str]:
    """Return the accelerators of this machine, or ["cpu"]."""
    if torch.cuda.is_available():
        return [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return ["cpu"]


def pick_device(wanted: str) -> torch.device:
    """Return the device for "auto", "cpu", "cuda", "cuda:1", "mps", or a GPU's number.

    Raises:
        ConfigError: there is no such device here; the message names those there are.
    """
    if wanted == "auto":
        if not torch.cuda.is_available() and torch.backends.mps.is_available():
            return torch.device("mps")
        return torch.device(visible_devices()[0])
    try:
        device = torch.device(f"cuda:{wanted}" if wanted.isdigit() else wanted)
    except RuntimeError as error:
        raise ConfigError(f"device {wanted!r} is not a torch device; here are: {_listed_devices()}") from error
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        hint = (
            "" if torch.cuda.is_available() else " (torch sees no GPU: in Colab choose Runtime > Change runtime type)"
        )
        raise ConfigError(f"device {wanted!r} is not here{hint}; here are: {_listed_devices()}")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda:0")
    return device


def _listed_devices() -> str:
    return ", ".join(dict.fromkeys([*visible_devices(), "cpu"]))


def describe(
    device: torch.device,
    name: str = "",
    program: str = "spawned",
    own: tuple[str, ...] = (),
) -> Hello:
    """Return the hello of a worker on this device; `own` names what lives in the user's process there."""
    device_name, uuid = _device_facts(device)
    host = socket.gethostname()
    return Hello(
        name=name or f"{host.split('.')[0][:24]}-{str(device).replace(':', '')}",
        program=program,
        versions=local_versions(),
        hostname=host,
        device=str(device),
        device_name=device_name,
        device_uuid=uuid,
        host_id=_host_id(),
        has_bf16=device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False),
        own=own,
    )


def _host_id() -> str:
    """Tell machines, and separate networks on one machine, apart: a cloned machine has its original's name."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    started = boot.read_text(encoding="utf-8").strip() if boot.exists() else f"{psutil.boot_time():.0f}"
    room = str(network.stat().st_ino) if network.exists() else ""
    return f"{socket.gethostname()}/{started}/{room}"


def _device_facts(device: torch.device) -> tuple[str, str]:
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return facts.name, str(getattr(facts, "uuid", ""))
    if device.type == "mps":
        return "Apple GPU", ""
    return _cpu_name(), ""


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "CPU"
