"""The worker's side as its user holds it: a process per device, or the same loop in the calling process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from guava_nb.config import DistributedConfig
from guava_nb.engine.hardware import pick_device
from guava_nb.engine.interrupts import interrupts_call
from guava_nb.engine.launcher import WorkerHandle, launch
from guava_nb.engine.member import Membership
from guava_nb.engine.options import link_options
from guava_nb.errors import ConfigError
from guava_nb.protocol.joincode import JoinCode

__all__ = ["NetworkWorker", "WorkerHandle", "join_code_from", "run_worker", "start_worker"]


def join_code_from(code: JoinCode | str | None) -> JoinCode:
    """Return the join code given, or the one in GUAVA_JOIN_CODE.

    Raises:
        JoinCodeError: the text is damaged.
        ConfigError: there is none.
    """
    if isinstance(code, JoinCode):
        return code
    text = code or os.environ.get("GUAVA_JOIN_CODE", "")
    if not text:
        raise ConfigError("no join code: give the one that the orchestrator shows, or set GUAVA_JOIN_CODE")
    return JoinCode.decode(text)


def start_worker(
    code: JoinCode | str | None = None,
    device: str = "auto",
    name: str | None = None,
    config: DistributedConfig | None = None,
) -> WorkerHandle:
    """Start a worker process for one device and return its handle; `config` says how patient its link is.

    Raises:
        ConfigError: the join code or the device is wrong; nothing was started.
    """
    decoded = join_code_from(code)
    chosen = str(pick_device(device))
    user = getattr(os, "getuid", lambda: "user")()  # the folder of another user could not be written to
    folder = Path(tempfile.gettempdir()) / f"guava_nb-{user}"
    return launch(decoded, chosen, name or "", log_folder=folder, config=config)


def run_worker(code: JoinCode | str | None = None, device: str = "auto", name: str | None = None) -> int:
    """Start a worker process, wait for its end, and return an exit status: 0 when it left as it should."""
    worker = start_worker(code, device, name)
    interrupts = 0
    while True:
        try:
            if worker.wait(0.5):
                break
        except KeyboardInterrupt:
            interrupts += 1
            worker.leave() if interrupts == 1 else worker.kill()
    return 0 if worker.status().state == "left" else 1


class NetworkWorker:
    """A worker whose loop runs in the calling process, with a model that lives there.

    Args:
        join_code: from the orchestrator; or give `master_ip`, `master_port` and the code in GUAVA_JOIN_CODE.
        master_ip: host to dial instead of the one in the join code.
        master_port: port to dial instead of the one in the join code.
        gpu_id: GPU of this process; the CPU where there is none.
        model_ctor: called without arguments; its model is trained in place and is `worker.model`. Without it the model
            is built from the run's factory.
        config: link settings (heartbeat, silence, grace).
        name: wanted name.

    Raises:
        ConfigError: the join code or the device is wrong.
    """

    def __init__(
        self,
        join_code: JoinCode | str | None = None,
        *,
        master_ip: str | None = None,
        master_port: int | None = None,
        gpu_id: int | str = 0,
        model_ctor: Callable[[], torch.nn.Module] | None = None,
        config: DistributedConfig | None = None,
        name: str = "",
    ) -> None:
        """Check everything; nothing is dialled yet."""
        code = join_code_from(join_code)
        if master_ip is not None or master_port is not None:
            code = code.with_address(master_ip or code.host, master_port or code.port)
        self.code = code
        self.device = pick_device(str(gpu_id) if torch.cuda.is_available() or isinstance(gpu_id, str) else "cpu")
        self.model = model_ctor() if model_ctor is not None else None
        self._member = Membership(
            code, self.device, name, own_model=self.model, options=link_options(config or DistributedConfig())
        )

    def connect_and_train(self) -> str:
        """Join and work until the orchestrator ends the session or `leave` is called; returns why it ended.

        An interrupt (Ctrl-C) leaves after the step in work, a second one raises at once.

        Raises:
            GuavaError: the join failed, the orchestrator was lost, or it sent this worker away.
        """
        interrupted = False

        def on_interrupt() -> None:
            nonlocal interrupted
            if interrupted:
                raise KeyboardInterrupt
            interrupted = True
            self.leave()

        with interrupts_call(on_interrupt):
            return self._member.run()

    def leave(self) -> None:
        """Leave after the step in work; from any thread."""
        self._member.loop.leave("asked to leave")
