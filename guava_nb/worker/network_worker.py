"""The worker's side as its user holds it: a process per device, or the same loop in the calling process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from guava_nb.config import DistributedConfig
from guava_nb.config.state_folder import private_temporary_folder
from guava_nb.errors import ConfigError
from guava_nb.link.options import link_options
from guava_nb.processes.interrupts import interrupts_call
from guava_nb.processes.local_workers import ListenAt, WorkerHandle, launch
from guava_nb.protocol.joincode import JoinCode
from guava_nb.replica.model.resident import ResidentParts
from guava_nb.telemetry.hardware import pick_device
from guava_nb.tunnels import Tunnel
from guava_nb.worker.listening import ListeningLoop
from guava_nb.worker.worker_session import WorkerSession

__all__ = [
    "ListeningWorker",
    "NetworkWorker",
    "WorkerHandle",
    "join_code_from",
    "start_listening_worker",
    "start_worker",
]


log = logging.getLogger(__name__)


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
    return _launch(join_code_from(code), device, name, config)


def start_listening_worker(
    host: str = "127.0.0.1",
    port: int = 0,
    device: str = "auto",
    name: str | None = None,
    config: DistributedConfig | None = None,
) -> WorkerHandle:
    """Start a worker process that orchestrators dial; `code` of its handle is what they need, as soon as it listens.

    Raises:
        ConfigError: the device is wrong, or the folder for its log cannot be trusted; nothing was started.
    """
    return _launch(ListenAt(host, port), device, name, config)


def _launch(
    where: JoinCode | ListenAt, device: str, name: str | None, config: DistributedConfig | None
) -> WorkerHandle:
    chosen = str(pick_device(device))
    return launch(where, chosen, name or "", log_folder=private_temporary_folder("guava_nb"), config=config)


def _device(gpu_id: int | str) -> torch.device:
    return pick_device(str(gpu_id) if torch.cuda.is_available() or isinstance(gpu_id, str) else "cpu")


def _parts(own: ResidentParts | None, model_ctor: Callable[[], torch.nn.Module] | None) -> ResidentParts | None:
    return ResidentParts(model_ctor()) if own is None and model_ctor is not None else own


@contextlib.contextmanager
def _leaves_on_interrupt(leave: Callable[[], None]) -> Iterator[None]:
    """Inside, the first interrupt or SIGTERM leaves after the step in work, the second raises at once."""
    interrupted = False

    def on_interrupt() -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
        leave()

    with interrupts_call(on_interrupt, signal.SIGTERM):
        yield


class NetworkWorker:
    """A worker whose loop runs in the calling process, with a model that lives there.

    Args:
        join_code: from the orchestrator; or give `master_ip`, `master_port` and the code in GUAVA_JOIN_CODE.
        master_ip: host to dial instead of the one in the join code.
        master_port: port to dial instead of the one in the join code.
        gpu_id: GPU of this process; the CPU where there is none. A text names any device of torch.
        model_ctor: called without arguments; its model is trained in place and is `worker.model`. Without it the model
            is built from the run's factory.
        own: instead of `model_ctor`: model, criterion, optimizer and preprocessing of this process.
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
        own: ResidentParts | None = None,
        config: DistributedConfig | None = None,
        name: str = "",
    ) -> None:
        """Check everything; nothing is dialled yet."""
        code = join_code_from(join_code)
        if master_ip is not None or master_port is not None:
            code = code.with_address(master_ip or code.host, master_port or code.port)
        self.code = code
        self.device = _device(gpu_id)
        own = _parts(own, model_ctor)
        self.model = None if own is None else own.model
        options = link_options(config or DistributedConfig())
        self._member = WorkerSession(code, self.device, name, own=own, options=options, report=self._report)
        self._is_away = False  # as it was told

    @staticmethod
    def listen(**arguments: Any) -> ListeningWorker:
        """Listen for an orchestrator instead of dialling one; arguments as for `ListeningWorker`."""
        return ListeningWorker(**arguments)

    def connect_and_train(self) -> str:
        """Join and work until the orchestrator ends the session or `leave` is called; returns why it ended.

        An interrupt (Ctrl-C) or SIGTERM leaves after the step in work, a second one raises at once.

        Raises:
            GuavaError: the join failed, the orchestrator was lost, or it sent this worker away.
        """
        with _leaves_on_interrupt(self.leave):
            return self._member.run()

    def _report(self, state: str, step: int, detail: str) -> None:
        """Warn once each time that the orchestrator is away: this call shows nothing else, and may need a new code."""
        is_away = state == "reconnecting"
        if is_away and not self._is_away:
            log.warning("%s", detail)
        self._is_away = is_away

    def redirect(self, code: JoinCode | str) -> None:
        """Dial the same session by another code from now on, as when a tunnel got another address; from any thread.

        Raises:
            JoinCodeError: the code is damaged or belongs to another session; nothing has changed.
        """
        new = join_code_from(code)
        self._member.redirect(new)
        self.code = new

    def leave(self) -> None:
        """Leave after the step in work, when the orchestrator has what is only here; from any thread."""
        self._member.loop.leave("asked to leave")


class ListeningWorker:
    """A worker in the calling process that orchestrators dial: it owns the port, the certificate and the join code.

    A context manager. One orchestrator at a time; a second one is sent away, and takes the place of one that is away.

    Args:
        host: where to listen; None takes `gpu_host` of the configuration, or this machine only (127.0.0.1).
        port: None takes `master_port` of the configuration; 0 takes a free one.
        gpu_id, model_ctor, own, name: as for `NetworkWorker`.
        config: link settings; `rejoin_timeout_s` is how long `serve(once=True)` waits for a lost orchestrator.

    Attributes:
        join_code: for this machine's own address; `join_code.with_address` makes that of a tunnel.
        own: what lives in this process; the next orchestrator finds what stands here then.

    Raises:
        ConfigError: the device is wrong, or the port is taken.
    """

    def __init__(
        self,
        *,
        host: str | None = None,
        port: int | None = None,
        gpu_id: int | str = 0,
        model_ctor: Callable[[], torch.nn.Module] | None = None,
        own: ResidentParts | None = None,
        config: DistributedConfig | None = None,
        name: str = "",
    ) -> None:
        """Listen from now on; `serve` works."""
        self._config = config or DistributedConfig()
        self.device = _device(gpu_id)
        self.own, options = _parts(own, model_ctor), link_options(self._config)
        self._listening = ListeningLoop(
            lambda: WorkerSession(None, self.device, name, own=self.own, options=options),
            options,
            host or self._config.gpu_host or "127.0.0.1",
            self._config.master_port if port is None else port,
            self._config.tls,
        )
        self.join_code = self._listening.open()

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._listening.port

    @contextlib.contextmanager
    def behind(
        self, tunnel: Tunnel, on_notice: Callable[[str], None], on_code: Callable[[JoinCode], None] = lambda code: None
    ) -> Iterator[JoinCode]:
        """Be reached through a tunnel inside the block; gives the code that leads through it.

        Args:
            on_notice: gets sentences for a person: the tunnel broke, is back, has to be reached in another way.
            on_code: gets each new code when its address changed: the orchestrator goes on by `connect(code)`.

        Raises:
            ConfigError: the tunnel cannot be started, or needs to be listened for elsewhere than here.
        """
        keeper = self._listening.keeper(on_notice, self._config.rejoin_timeout_s, on_code)
        try:
            yield keeper.use(tunnel)
        finally:
            keeper.close()

    def serve(self, once: bool = False) -> str:
        """Work for the orchestrators that dial, one at a time; returns why it ended.

        Args:
            once: return when an orchestrator has closed its session, instead of waiting for the next.

        An interrupt (Ctrl-C) or SIGTERM leaves after the step in work, a second one raises at once.

        Raises:
            WorkerLost: with `once`, the orchestrator was lost and did not dial again within `rejoin_timeout_s`.
        """
        with _leaves_on_interrupt(self.leave):
            return self._listening.serve(once, self._config.rejoin_timeout_s)

    def leave(self) -> None:
        """Leave after the step in work and serve no other orchestrator; from any thread."""
        self._listening.leave()

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        self._listening.close()

    def __enter__(self) -> ListeningWorker:
        """Return itself: it listens already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening."""
        self.close()
