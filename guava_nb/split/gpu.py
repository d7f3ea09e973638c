"""`GPUTrainer`: the side that has the model. A worker in the calling process, which trains it in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn

from guava_nb.config import DistributedConfig
from guava_nb.config.folder_risks import folder_notice
from guava_nb.errors import ConfigError
from guava_nb.link.tunnel_keeper import asked_here
from guava_nb.protocol.joincode import JoinCode
from guava_nb.replica.model.resident import ResidentParts
from guava_nb.split.codes import ShowCode, given_codes, show_code, show_notice, token_prompt
from guava_nb.telemetry.hardware import pick_device
from guava_nb.tunnels import NgrokTunnel, Tunnel, make_tunnel
from guava_nb.worker.network_worker import ListeningWorker, NetworkWorker

__all__ = ["ColabGPUTrainer", "GPUTrainer"]


class GPUTrainer:
    """The side that has the model: trains it in place, in this process.

    Args:
        port: to listen on; None takes `master_port` of the configuration, 0 a free one.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        host: address to listen on; None takes `gpu_host` of the configuration, else this machine only.
        config: settings; None reads config.yaml, `.env` and the environment.
        name: what the other side calls this one.
        show: called with the join code and the other side's call when this side listens; None prints them.

    Raises:
        ConfigError: the device is not here.
    """

    def __init__(
        self,
        port: int | None = None,
        device: str = "auto",
        *,
        host: str | None = None,
        config: DistributedConfig | None = None,
        name: str = "",
        show: ShowCode | None = None,
    ) -> None:
        """Choose the device; nothing listens yet."""
        self.config = config or DistributedConfig.load()
        if told := folder_notice(self.config, of_a_worker=True):
            show_notice(told)
        self.device = pick_device(device)
        self._port, self._host, self._name = port, host, name
        self._show = show or show_code
        self._parts: ResidentParts | None = None
        self._listening: ListeningWorker | None = None
        self._working: NetworkWorker | ListeningWorker | None = None

    def setup_model(
        self,
        model: nn.Module,
        criterion: Callable[..., Any] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        learning_rate: float | None = None,
        *,
        preprocess: Callable[[Any], Any] | None = None,
    ) -> None:
        """Say what to train or to ask. The model is moved to the device; its dtype stays.

        Args:
            model: trained in place.
            criterion: a loss of outputs and targets: torch's module or function, or one's own that returns a mean or
                `(sum, count)`. None means CrossEntropyLoss.
            optimizer: over the model's parameters. None makes Adam with `learning_rate` and nothing else: no weight decay,
                no schedule, no clipping.
            learning_rate: of that Adam; None takes that of the configuration, or torch's own where that says none.
            preprocess: called with each batch as it arrived, on this device; returns what the model gets.

        Raises:
            ConfigError: both an optimizer and a learning rate.
        """
        if optimizer is not None and learning_rate is not None:
            raise ConfigError("the optimizer has its own learning rate: give optimizer= or learning_rate=, not both")
        model.to(self.device)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if optimizer is None and trained:
            chosen = self.config.learning_rate if learning_rate is None else learning_rate
            optimizer = torch.optim.Adam(trained) if chosen is None else torch.optim.Adam(trained, lr=chosen)
        self._parts = ResidentParts(model, criterion or nn.CrossEntropyLoss(), optimizer, preprocess)

    @property
    def model(self) -> nn.Module:
        """The model object of `setup_model`.

        Raises:
            ConfigError: there is none yet.
        """
        return self._needed().model

    def listen(self) -> JoinCode:
        """Listen from now on, until `close`; returns the code for this machine's own address. Calls return the same.

        Raises:
            ConfigError: the port is taken.
        """
        if self._listening is None:
            self._listening = ListeningWorker(
                host=self._host,
                port=self._port,
                gpu_id=str(self.device),
                own=self._needed(),
                config=self.config,
                name=self._name,
            )
        return self._listening.join_code

    def start_training(
        self, cpu_host: str | None = None, cpu_port: int | None = None, *, join_code: JoinCode | str | None = None
    ) -> str:
        """Train the model with what the CPU side sends, until it closes its session; returns why it ended.

        Args:
            cpu_host, cpu_port: where to dial, when that is not what the join code says. Without a join code the CPU side
                dials, and these say nothing.
            join_code: of the CPU side, which listens; None takes GUAVA_JOIN_CODE; without any this side listens, shows its
                own code and waits, also for a CPU side that was lost to come back (`rejoin_timeout_s`).

        An interrupt (Ctrl-C) leaves after the step in work, a second one raises at once; either way the model is that of
        the last step that was committed.

        Raises:
            GuavaError: the CPU side cannot be reached, or was lost.
        """
        return self._serve(self._needed(), cpu_host, cpu_port, join_code, once=True, call="CPULoader().start_loading(")

    def start_service(
        self,
        mode: str = "validation",
        cpu_host: str | None = None,
        cpu_port: int | None = None,
        *,
        join_code: JoinCode | str | None = None,
        once: bool = False,
    ) -> str:
        """Answer with the model without changing it; returns why it ended.

        Args:
            mode: "validation" or "inference"; with the latter no criterion of this side is used.
            once: return when a CPU side has closed its session; else serve the next one, until `stop` or an interrupt.
            cpu_host, cpu_port, join_code: as for `start_training`.

        Raises:
            ConfigError: another mode.
            GuavaError: as for `start_training`.
        """
        if mode not in ("validation", "inference"):
            raise ConfigError(f"mode is {mode!r}; it is one of: validation, inference")
        parts = self._needed()
        own = ResidentParts(
            parts.model, parts.criterion if mode == "validation" else None, None, parts.preprocess, service=mode
        )
        call = f"CPULoader().run_{mode}("
        return self._serve(own, cpu_host, cpu_port, join_code, once=once, call=call)

    def _serve(
        self,
        own: ResidentParts,
        cpu_host: str | None,
        cpu_port: int | None,
        join_code: JoinCode | str | None,
        once: bool,
        call: str,
    ) -> str:
        codes = given_codes(join_code)
        if codes and (join_code is not None or self._listening is None):
            worker = NetworkWorker(
                codes[0], master_ip=cpu_host, master_port=cpu_port, gpu_id=str(self.device), own=own, config=self.config,
                name=self._name,
            )  # fmt: skip
            self._working = worker
            return worker.connect_and_train()
        code = self._address(self.listen())
        listening = self._working = self._listening
        assert listening is not None
        listening.own = own
        self._show(code, call)
        return listening.serve(once)

    def _address(self, code: JoinCode) -> JoinCode:
        return code

    def _needed(self) -> ResidentParts:
        if self._parts is None:
            raise ConfigError("no model: call setup_model(model, criterion=..., optimizer=...) first")
        return self._parts

    def stop(self) -> None:
        """Let the call in progress end after the step in work; from any thread."""
        if self._working is not None:
            self._working.leave()

    def redirect(self, code: JoinCode | str) -> None:
        """Let the call in progress, which dialled the CPU side, go on by a new code of the same session; from any thread.

        Raises:
            ConfigError: no such call is in progress; a damaged code, or one of another session, is a JoinCodeError.
        """
        if not isinstance(self._working, NetworkWorker):
            raise ConfigError("nothing here has dialled: a new code is for the side that dials")
        self._working.redirect(code)

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.close()

    def __enter__(self) -> GPUTrainer:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening."""
        self.close()


class ColabGPUTrainer(GPUTrainer):
    """A `GPUTrainer` on a machine that cannot be dialled: it listens behind a tunnel. Arguments as of `GPUTrainer`.

    Free Colab runtimes do not allow distributed workers and may be ended; paid plans with compute units do allow them.
    """

    _tunnelled: JoinCode | None = None

    def start_training_with_tunnel(self, tunnel: Tunnel | str | None = None, authtoken: str | None = None) -> str:
        """As `start_training`, listening behind a tunnel; the code that is shown leads through it.

        A tunnel that breaks is started again, for `rejoin_timeout_s`. If its address changed, the new code is shown: on the
        CPU side `loader.orchestrator.connect(code)` goes on with it.

        Args:
            tunnel: `NAME[:WHAT]` as in `guava_nb.tunnels.make_tunnel` ("ngrok", "cloudflared", "ssh:me@lab.example"), or a
                tunnel; None takes `tunnel` of the configuration, else ngrok.
            authtoken: of ngrok; None takes NGROK_AUTHTOKEN, the secrets of Colab and Kaggle, or asks.

        Raises:
            ConfigError: the tunnel cannot be opened; the message says what to do.
            WorkerLost: the CPU side was lost and did not come back.
        """
        return self._behind(tunnel, authtoken, self.start_training)

    def start_service_with_tunnel(
        self,
        mode: str = "validation",
        tunnel: Tunnel | str | None = None,
        authtoken: str | None = None,
        *,
        once: bool = False,
    ) -> str:
        """As `start_service`, listening behind a tunnel; arguments as for both.

        Args:
            mode, once: as for `start_service`.
            tunnel, authtoken: as for `start_training_with_tunnel`.
        """
        return self._behind(tunnel, authtoken, partial(self.start_service, mode, once=once))

    def _behind(self, tunnel: Tunnel | str | None, authtoken: str | None, call: Callable[[], str]) -> str:
        way = self._way(tunnel, authtoken)
        self._host = self._host or self.config.gpu_host or way.bind
        self.listen()
        assert self._listening is not None
        try:
            with self._listening.behind(way, show_notice, self._moved) as self._tunnelled:
                return call()
        finally:
            self._tunnelled = None

    def _way(self, tunnel: Tunnel | str | None, authtoken: str | None) -> Tunnel:
        if isinstance(tunnel, Tunnel):
            return tunnel
        text = tunnel or self.config.tunnel or "ngrok"
        if text == "ngrok" and authtoken is not None:
            return NgrokTunnel(authtoken=authtoken)
        return make_tunnel(text, asked_here(token_prompt()))

    def _moved(self, code: JoinCode) -> None:
        self._tunnelled = code
        self._show(code, "loader.orchestrator.connect(")

    def _address(self, code: JoinCode) -> JoinCode:
        return self._tunnelled or code
