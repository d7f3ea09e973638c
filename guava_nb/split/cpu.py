"""`CPULoader`: the side that has the data. An `Orchestrator` whose model is the other side's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from guava_nb.config import DistributedConfig
from guava_nb.datasets.open_dataset import open_dataset
from guava_nb.errors import ClusterError, ConfigError
from guava_nb.orchestrator import Orchestrator
from guava_nb.protocol.joincode import JoinCode
from guava_nb.replica.model.resident import OWN_CRITERION, OWN_MODEL, OWN_OPTIMIZER, OWN_PREPROCESS
from guava_nb.split.codes import Codes, ShowCode, given_codes, show_code, token_prompt
from guava_nb.training.run import Run
from guava_nb.tunnels import Tunnel

__all__ = ["CPULoader"]


class CPULoader:
    """The side that has the data. A context manager; outside a `with` each call opens its own session and closes it.

    Args:
        num_workers: processes of the DataLoader; None takes `loader_workers` of the configuration.
        config: settings; None reads config.yaml, `.env` and the environment (`DistributedConfig.load`).
        show: called with the join code and the other side's call when this side listens; None prints them.
        tunnel: when this side listens: `NAME[:WHAT]` as in `guava_nb.tunnels.make_tunnel` ("ngrok", "ssh:me@lab.example"), or
            a tunnel; None takes `tunnel` of the configuration. If its address changes, the new code is shown.

    Attributes:
        orchestrator: the session of the present `with` or call, None outside.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        config: DistributedConfig | None = None,
        show: ShowCode | None = None,
        tunnel: Tunnel | str | None = None,
    ) -> None:
        """Check the settings; nothing is started."""
        self.config = config or DistributedConfig.load()
        if num_workers is not None:
            self.config = self.config.replace(loader_workers=num_workers)
        self.orchestrator: Orchestrator | None = None
        self._show, self._tunnel = show or show_code, tunnel
        self._dataset: Any = None
        self._val_dataset: Any = None
        self._arguments: dict[str, Any] = {}
        self._shuffle: bool | None = None
        self._stays = 0

    # --------------------------------------------------------------------------------------------------------- data

    def setup_dataset(
        self,
        dataset: Any,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        *,
        val_dataset: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        **options: Any,
    ) -> Any:
        """Say what to read.

        Args:
            dataset: a torch data set, NumPy arrays `(X, y)`, a path (.npy, .npz, .csv, a folder of images), or a DataLoader,
                which is used as it is.
            batch_size: samples of a global batch; None takes that of the configuration.
            shuffle: the training order, drawn from the configuration's seed; None shuffles whatever has indices.
                Validation and inference always go in the order of the data set.
            val_dataset: for `start_loading(val_interval=...)` and `run_validation`; of the same kinds.
            collate_fn: as of a DataLoader.
            drop_last: leave out a last batch that is smaller.
            options: for the kind of data: see `guava_nb.datasets.open_dataset.open_dataset`.

        Returns:
            The data set; its `repr` says what was found (rows, columns, classes).

        Raises:
            ConfigError: it cannot be read, with the file, line or column.
        """
        self._dataset = _opened(dataset, options)
        self._val_dataset = None if val_dataset is None else _opened(val_dataset, options)
        self._arguments = {
            "batch_size": self.config.batch_size if batch_size is None else batch_size,
            "collate_fn": collate_fn,
            "drop_last": drop_last,
        }
        self._shuffle = shuffle
        return self._dataset

    def _train_loader(self) -> Any:
        if self._dataset is None:
            raise ConfigError("no data: call setup_dataset(dataset, batch_size=...) first")
        if isinstance(self._dataset, DataLoader):
            return self._dataset
        stream = isinstance(self._dataset, IterableDataset)
        shuffle = not stream if self._shuffle is None else self._shuffle
        order = torch.Generator().manual_seed(self.config.seed)
        return DataLoader(
            self._dataset, shuffle=shuffle, generator=order, num_workers=self.config.loader_workers, **self._arguments
        )

    def _ordered_loader(self, dataset: Any, options: Mapping[str, Any]) -> Any:
        """A loader in the order of the data set, every sample once."""
        chosen = self._dataset if dataset is None else _opened(dataset, options)
        if chosen is None:
            raise ConfigError("no data: call setup_dataset(dataset) first, or give the data set with this call")
        if isinstance(chosen, DataLoader):
            return chosen
        arguments = {"batch_size": self.config.batch_size, **self._arguments, "drop_last": False}
        return DataLoader(chosen, num_workers=self.config.loader_workers, **arguments)

    # ------------------------------------------------------------------------------------------------------ sessions

    def listen(self, host: str | None = None, port: int | None = None) -> JoinCode:
        """Listen for GPU sides until `close`; returns the code that they dial with.

        Args:
            host: None takes `master_ip` of the configuration: this machine only, unless told otherwise.
            port: None takes `master_port`; 0 a free one.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        given = {"master_ip": host, "master_port": port}
        self.config = self.config.replace(**{name: value for name, value in given.items() if value is not None})
        if self.orchestrator is None:
            self.orchestrator = Orchestrator(self.config)
        self._stays += 1
        return self._open(self.orchestrator, "GPUTrainer().start_training(")

    def _open(self, orchestrator: Orchestrator, call: str) -> JoinCode:
        return orchestrator.open(self._tunnel, token_prompt(), lambda code: self._show(code, call))

    def close(self) -> None:
        """End the session; the GPU side's `start_training` returns. Safe to call twice."""
        orchestrator, self.orchestrator, self._stays = self.orchestrator, None, 0
        if orchestrator is not None:
            orchestrator.close()

    def __enter__(self) -> CPULoader:
        """Keep the session open between calls."""
        self._stays += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    @contextlib.contextmanager
    def _session(
        self, gpu_host: str | None, gpu_port: int | None, join_code: Codes | None, call: str
    ) -> Iterator[Orchestrator]:
        if self.orchestrator is None:
            self.orchestrator = Orchestrator(self.config)
        try:
            self._reach(self.orchestrator, gpu_host, gpu_port, join_code, call)
            self.orchestrator.register_model(OWN_MODEL)
            yield self.orchestrator
        finally:
            if not self._stays:
                self.close()

    def _reach(
        self,
        orchestrator: Orchestrator,
        gpu_host: str | None,
        gpu_port: int | None,
        join_code: Codes | None,
        call: str,
    ) -> None:
        codes = given_codes(join_code)
        if codes:
            if gpu_host is not None or gpu_port is not None:
                if len(codes) > 1:
                    raise ConfigError(
                        f"one gpu_host and {len(codes)} join codes: leave gpu_host out, each code carries its address"
                    )
                codes = [codes[0].with_address(gpu_host or codes[0].host, gpu_port or codes[0].port)]
            orchestrator.connect(*codes)
            return
        if gpu_host is not None or gpu_port is not None:
            raise ConfigError(
                f"{gpu_host or self.config.gpu_host or 'the GPU side'} accepts only peers with its join code, which it shows "
                "when it starts to listen: give it as join_code=, or set GUAVA_JOIN_CODE"
            )
        if not any(worker.state == "ready" for worker in orchestrator.status().workers):
            self._show(self._open(orchestrator, call), call)
        orchestrator.wait_for_workers(timeout=self.config.rejoin_timeout_s)

    def _own(self, orchestrator: Orchestrator) -> set[str]:
        """Return what the connected GPU sides have of their own, all of them."""
        found = orchestrator.own_parts()
        if "model" not in found:
            raise ClusterError(
                "the GPU side has no model of its own: run GPUTrainer there, or use Orchestrator here, which sends models"
            )
        return found

    # --------------------------------------------------------------------------------------------------------- the work

    def start_loading(
        self,
        gpu_host: str | None = None,
        gpu_port: int | None = None,
        epochs: int | None = None,
        *,
        join_code: Codes | None = None,
        **training: Any,
    ) -> Run:
        """Feed the GPU side's training to its end.

        Args:
            gpu_host, gpu_port: where the GPU side listens, when that is not what its join code says.
            epochs: passes over the data; None takes `num_epochs` of the configuration.
            join_code: of the GPU side, or several; None takes GUAVA_JOIN_CODE; without any this side listens, shows its own
                and waits for `num_workers` GPU sides.
            training: further arguments of `Orchestrator.start_training`, such as `val_interval`, `scheduler`, `callbacks`,
                `max_grad_norm`, `resume`, `preprocess`, `cache`. Criterion and optimizer are the GPU side's own, unless named.

        Returns:
            The run; `run.history`, `run.report()`, and `run.model().state_dict()` with the trained weights.

        Raises:
            LoadError: the data set failed, with the sample's index. The GPU side stays and waits.
            GuavaError: the GPU side cannot be reached, or the training failed there.
        """
        loader = self._train_loader()
        val_loader = None if self._val_dataset is None else self._ordered_loader(self._val_dataset, {})
        with self._session(gpu_host, gpu_port, join_code, "GPUTrainer().start_training(") as orchestrator:
            own = self._own(orchestrator)
            if "service" in own:
                raise ConfigError("the GPU side serves validation or inference: call start_training() there to train")
            arguments: dict[str, Any] = {"val_loader": val_loader, **_defaults(own, training), **training}
            if "optimizer" in own and "optimizer" not in training:
                arguments["optimizer"] = OWN_OPTIMIZER
            return orchestrator.start_training(
                loader, num_epochs=self.config.num_epochs if epochs is None else epochs, **arguments
            )

    def run_validation(
        self,
        gpu_host: str | None = None,
        val_dataset: Any = None,
        gpu_port: int | None = None,
        *,
        join_code: Codes | None = None,
        criterion: Any = None,
        metrics: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Measure the GPU side's model, each sample once.

        Args:
            gpu_host, gpu_port, join_code: as for `start_loading`.
            val_dataset: None takes that of `setup_dataset`.
            criterion: None takes the GPU side's own, else CrossEntropyLoss.
            metrics: further ones, as for `Orchestrator.validate`.
            options: for the kind of data, as for `setup_dataset`.

        Returns:
            `accuracy` (None where it has no meaning), `average_loss`, `total_samples`, and one entry for each metric.

        Raises:
            GuavaError: as for `start_loading`.
        """
        dataset = val_dataset if val_dataset is not None else self._val_dataset
        loader = self._ordered_loader(dataset, options or {})
        with self._session(gpu_host, gpu_port, join_code, 'GPUTrainer().start_service("validation", ') as orchestrator:
            given = {
                name: value for name, value in (("criterion", criterion), ("metrics", metrics)) if value is not None
            }
            found = dict(orchestrator.validate(loader, **_defaults(self._own(orchestrator), given), **given))
        return {
            "accuracy": found.pop("accuracy"),
            "average_loss": found.pop("loss"),
            "total_samples": found.pop("samples"),
            **found,
        }

    def run_inference(
        self,
        gpu_host: str | None = None,
        inference_dataset: Any = None,
        gpu_port: int | None = None,
        *,
        join_code: Codes | None = None,
        options: Mapping[str, Any] | None = None,
        **predicting: Any,
    ) -> Any:
        """Predict with the GPU side's model, in the order of the data set.

        Args:
            gpu_host, gpu_port, join_code: as for `start_loading`.
            inference_dataset: None takes that of `setup_dataset`.
            options: for the kind of data, as for `setup_dataset`.
            predicting: `top_k`, `confidence_threshold`, `return_full_probabilities`, `raw`, `path`, `resume`, as for
                `Orchestrator.predict`.

        Returns:
            A mapping with `predictions`, `confidences`, `total_samples`, `estimated_memory_mb` and what was asked for.

        Raises:
            GuavaError: as for `start_loading`.
        """
        loader = self._ordered_loader(inference_dataset, options or {})
        with self._session(gpu_host, gpu_port, join_code, 'GPUTrainer().start_service("inference", ') as orchestrator:
            own = self._own(orchestrator) - {"criterion"}
            return orchestrator.predict(loader, **_defaults(own, predicting), **predicting)


def _opened(dataset: Any, options: Mapping[str, Any]) -> Any:
    if isinstance(dataset, DataLoader):
        return dataset
    return open_dataset(dataset, **options)


def _defaults(own: set[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the GPU side's own parts for what the call does not name."""
    parts = {"criterion": OWN_CRITERION, "preprocess": OWN_PREPROCESS}
    chosen = {part: name for part, name in parts.items() if part in own and part not in given}
    if "step" in given:
        chosen.pop("criterion", None)
    return chosen
