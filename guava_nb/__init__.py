"""guava_nb turns notebooks and GPUs behind NAT into one PyTorch training job.

README.md beside this file has the rooms on one page, how a step and a batch pass through them, and where to add what.

Importing this package loads neither torch nor IPython and starts nothing: names come in on first use.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from guava_nb import errors
from guava_nb.errors import *  # noqa: F403  (the public tree of errors, named by its own __all__)

if TYPE_CHECKING:
    from guava_nb.config import DistributedConfig
    from guava_nb.data.worker_data import WorkerData
    from guava_nb.orchestrator import Orchestrator
    from guava_nb.parallel.replicas.gather_batch import gather_batch
    from guava_nb.protocol.joincode import JoinCode
    from guava_nb.split import ColabGPUTrainer, CPULoader, GPUTrainer
    from guava_nb.telemetry import EnergyMeter, energy_task
    from guava_nb.training.plan import Callback
    from guava_nb.training.run import Run
    from guava_nb.worker.network_worker import NetworkWorker

    __version__: str

# A library's warnings must not be printed into whatever cell happens to run: the orchestrator shows them as notices.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "CPULoader",
    "Callback",
    "ColabGPUTrainer",
    "DistributedConfig",
    "EnergyMeter",
    "GPUTrainer",
    "JoinCode",
    "NetworkWorker",
    "Orchestrator",
]
__all__ += ["Run", "WorkerData", "__version__", "energy_task", "gather_batch"]
__all__ += errors.__all__

#: Public name to the module that holds it.
_HOMES = {
    "Callback": "guava_nb.training.plan",
    "CPULoader": "guava_nb.split",
    "ColabGPUTrainer": "guava_nb.split",
    "GPUTrainer": "guava_nb.split",
    "DistributedConfig": "guava_nb.config",
    "EnergyMeter": "guava_nb.telemetry",
    "JoinCode": "guava_nb.protocol.joincode",
    "NetworkWorker": "guava_nb.worker.network_worker",
    "Orchestrator": "guava_nb.orchestrator",
    "Run": "guava_nb.training.run",
    "WorkerData": "guava_nb.data.worker_data",
    "energy_task": "guava_nb.telemetry.tasks",
    "gather_batch": "guava_nb.parallel.replicas.gather_batch",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name == "__version__":
        from guava_nb.config.version import installed_version

        return installed_version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from guava_nb.spec.loading import loading_without_collections

    with loading_without_collections():
        value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(ipython: Any) -> None:
    """Called by `%load_ext guava_nb`."""
    from guava_nb.spec.loading import loading_without_collections

    with loading_without_collections():
        from guava_nb.notebook import load

    load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Called by `%unload_ext guava_nb`."""
    from guava_nb.notebook import unload

    unload(ipython)
