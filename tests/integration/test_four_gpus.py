"""Four GPUs that stand for two machines of two: NCCL inside each, the relay between them, against one GPU.

The second pair of workers says another host name, which is how machines are told apart; path="relay" keeps the two from
finding out that they reach each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from guava_nb import Orchestrator
from tests.support.on_gpus import Plain, assert_equal, batches, train_plainly

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices, and this machine has fewer"),
    pytest.mark.timeout(240),
]
OTHER_NAME = """
import os, socket
if name := os.environ.get("STANDS_FOR_MACHINE"):
    socket.gethostname = lambda: name
"""


@pytest.fixture(scope="module")
def orchestrator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orchestrator]:
    folder = tmp_path_factory.mktemp("names")
    (folder / "sitecustomize.py").write_text(OTHER_NAME)
    with (
        pytest.MonkeyPatch.context() as patch,
        Orchestrator(num_workers=4, precision="fp64", hash_every_steps=1, silence_s=4.0, heartbeat_s=0.5) as made,
    ):
        patch.setenv("PYTHONPATH", f"{folder}:{ROOT}", prepend=":")
        for number in (0, 2, 1, 3):  # not side by side as they come
            patch.setenv("STANDS_FOR_MACHINE", f"box-{number // 2}")
            made.launch_workers(1, device=f"cuda:{number}")
            made.wait_for_workers(len(made._local), timeout=120)
        made.register_model("guava_nb.cli.demo_model:DigitNet")
        yield made


@pytest.fixture(scope="module")
def plain() -> Plain:
    return train_plainly()


MODES = [
    ({"dp": 2, "tp": 2}, "tp"),
    ({"dp": 2, "pp": 2}, "pp"),
    ({"pp": 2, "tp": 2}, "tp"),
    ({"dp": 2, "tp": 2, "zero_stage": 3}, "tp"),
]


@pytest.mark.parametrize(("settings", "inside"), MODES, ids=str)
def test_nccl_inside_machines_and_the_relay_between_equal_one_gpu(
    orchestrator: Orchestrator, plain: Plain, settings: dict[str, Any], inside: str
) -> None:
    orchestrator.set_mode("hybrid", path="relay", **settings)
    run = orchestrator.start_training(
        batches(), num_epochs=2, optimizer="AdamW", optimizer_args={"lr": 1e-3}, max_grad_norm=0.5, fresh=True,
        progress=False,
    )  # fmt: skip
    assert_equal(run, plain)
    path = run.report()["path"]
    assert path["backend"] == "guava" and f"NCCL along {inside}," in path["reason"]


class Kill:
    """Ends a worker at a step."""

    def __init__(self, worker: Any, step: int) -> None:
        self.worker, self.step = worker, step

    def on_step(self, run: Any, record: dict[str, Any]) -> None:
        if record["step"] == self.step and self.worker is not None:
            self.worker.kill()
            self.worker = None


def test_a_lost_gpu_frees_those_that_wait_for_it_in_nccl(orchestrator: Orchestrator) -> None:
    """The others go on once a worker is back in its place."""
    orchestrator.set_mode("hybrid", path="relay", dp=2, tp=2)
    run = orchestrator.start_training(
        batches(), num_epochs=2, fresh=True, progress=False, detach=True,
        callbacks=[Kill(orchestrator._local[-1], 5)],
    )  # fmt: skip
    for _ in range(600):
        if run.generations > 1 or run.done:
            break
        run.wait(0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STANDS_FOR_MACHINE", "box-1")
        orchestrator.launch_workers(1, device="cuda:3")
    assert run.wait(120) and run.result() is run
    assert run.report()["steps"] == 22 and run.report()["lost_samples"] == 0
