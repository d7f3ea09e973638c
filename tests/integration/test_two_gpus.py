"""Two GPUs: every mode over the relay and over NCCL, against plain PyTorch on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from guava_nb import Orchestrator
from tests.support.on_gpus import Plain, assert_equal, batches, train_plainly

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices, and this machine has fewer"),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def orchestrator() -> Iterator[Orchestrator]:
    with Orchestrator(num_workers=2, precision="fp64", hash_every_steps=1) as made:
        for number in range(2):
            made.launch_workers(1, device=f"cuda:{number}")
        made.wait_for_workers(2, timeout=120)
        made.register_model("guava_nb.cli.demo_model:DigitNet")
        yield made


@pytest.fixture(scope="module")
def plain() -> Plain:
    return train_plainly()


MODES = [
    ("zero", {"zero_stage": 1}),
    ("zero", {"zero_stage": 2}),
    ("zero", {"zero_stage": 3}),
    ("tensor", {}),
    ("pipeline", {}),
    ("pipeline", {"pipeline_schedule": "gpipe", "checkpoint_activations": ""}),
    ("data", {}),
]


@pytest.mark.parametrize("path", ["relay", "direct"])
@pytest.mark.parametrize(("mode", "settings"), MODES, ids=str)
def test_a_mode_on_two_gpus_equals_one(
    orchestrator: Orchestrator,
    plain: Plain,
    mode: str,
    settings: dict[str, Any],
    path: str,
) -> None:
    orchestrator.set_mode(mode, path=path, **settings)
    run = orchestrator.start_training(
        batches(), num_epochs=2, optimizer="AdamW", optimizer_args={"lr": 1e-3}, max_grad_norm=0.5, fresh=True,
        progress=False,
    )  # fmt: skip
    assert_equal(run, plain)
    expected = {"relay": "relay", "direct": "direct"}[path]
    if not (mode == "data" and path == "relay"):
        assert run.report()["path"]["path"] == expected
        assert run.report()["path"]["backend"] == {"relay": "guava", "direct": "nccl"}[path]
