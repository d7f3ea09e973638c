"""Validation and prediction by real worker processes, with kills in the middle and in every mode, against plain PyTorch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from guava_nb import Orchestrator
from guava_nb.errors import RemoteError, WorkerLost
from tests.support.processes import CELL, ROOT, Session, Worker, data, eventually

#: The net of the traps, with one in the forward of evaluation as well, and a metric.
LOOKING = (
    CELL
    + """
_looks = 0


class Block(nn.Module):
    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.linear = nn.Linear(fan_in, fan_out)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Head(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 4)

    def forward(self, x):
        global _looks, _calls
        if not self.training:
            _looks += 1
            _calls, before = _looks, _calls
            trap("look")
            _calls = before
        return self.linear(x)


def Looked(width=16):
    return nn.Sequential(Block(10, width), Block(width, width), Block(width, width), Head(width))


def hits(outputs, targets):
    return (outputs.argmax(1) == targets).double().sum(), len(targets)


def doubled(model, batch):
    return 2 * model(batch["x"])
"""
)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        made = Session(tmp_path_factory.mktemp("looks"), num_workers=2, heartbeat_s=0.5, silence_s=4.0, path="relay")
        try:
            yield made
        finally:
            made.close()


def train(session: Session, mode: str = "data", **settings: Any) -> torch.nn.Module:
    """One epoch, so that the weights are not those that everybody builds; returns them in a plain model."""
    plan = (
        {"tensor_plan": {"0.linear": "colwise", "1.linear": "rowwise"}} if mode == "tensor" or "tp" in settings else {}
    )
    session.orch.set_mode(mode, path="relay", **plan, **settings)
    run = session.train(
        DataLoader(data(), 32),
        1,
        LOOKING.format(folder=str(session.folder)),
        model="Looked",
        criterion="CrossEntropyLoss",
    )
    return run.model().eval()


def plain(model: torch.nn.Module, batch: int) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(x) for x, _ in DataLoader(data(), batch)])


def assert_right(found: Any, outputs: torch.Tensor, exactly: bool = True) -> None:
    assert found["total_samples"] == len(outputs)
    best, probabilities = outputs.argmax(1), torch.softmax(outputs, 1).float()
    assert np.array_equal(found["predictions"], best.numpy())
    if exactly:
        assert np.array_equal(found["confidences"], probabilities.gather(1, best[:, None])[:, 0].numpy())
    else:
        assert found["confidences"] == pytest.approx(probabilities.max(1).values.numpy(), abs=1e-6)


def truth(model: torch.nn.Module) -> dict[str, float]:
    x, y = data().tensors
    with torch.no_grad():
        outputs = model(x)
    accuracy = (outputs.argmax(1) == y).double().mean().item()
    loss = torch.nn.functional.cross_entropy(outputs, y).item()
    return {"loss": loss, "accuracy": accuracy, "hits": accuracy, "samples": 101}


def kill(worker: Worker) -> None:
    os.kill(worker.pid, signal.SIGKILL)
    eventually(lambda: not worker.handle.alive, 20, f"{worker.name} is dead")  # or `ensure` would count it


def in_background(call: Any) -> tuple[threading.Thread, list[Any]]:
    """Run a call on a thread; the list gets its result or its error."""
    came: list[Any] = []

    def body() -> None:
        try:
            came.append(call())
        except BaseException as error:
            came.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    return thread, came


@pytest.mark.parametrize("what", ["validation", "prediction"])
def test_a_worker_killed_in_the_middle_changes_nothing(session: Session, what: str) -> None:
    victim = session.ensure(3)[1]
    model, orch, loader = train(session), session.orch, DataLoader(data(), 5)
    victim.trap("look", 1)  # how many more batches it would get depends on the others
    thread, came = in_background(
        lambda: orch.validate(loader, metrics=["hits"]) if what == "validation" else orch.predict(loader)
    )
    victim.wait_trapped()
    kill(victim)
    thread.join(60)
    assert came and not isinstance(came[0], BaseException), came
    if what == "validation":
        assert came[0] == pytest.approx(truth(model), abs=1e-12)
    else:
        assert_right(came[0], plain(model, 5))


@pytest.mark.parametrize(
    ("mode", "workers", "settings"),
    [
        ("pipeline", 2, {"micro_batches": 3}),
        ("tensor", 2, {}),
        ("zero", 3, {"zero_stage": 3}),
        ("zero", 2, {"zero_stage": 1}),
        ("hybrid", 4, {"dp": 2, "pp": 2}),
        ("hybrid", 4, {"dp": 2, "tp": 2}),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_every_mode_gives_what_plain_pytorch_gives(
    session: Session, mode: str, workers: int, settings: dict[str, Any]
) -> None:
    """101 rows in batches of 34: the last has 33, and neither divides by replicas times micro-batches."""
    session.ensure(workers)
    model, orch = train(session, mode, **settings), session.orch
    assert orch.validate(DataLoader(data(), 34), metrics=["hits"]) == pytest.approx(truth(model), abs=1e-12)
    outputs = plain(model, 34)
    assert_right(orch.predict(DataLoader(data(), 34)), outputs, exactly=False)
    found = orch.predict(DataLoader(data(), 34), raw=True)["outputs"]
    assert found == pytest.approx(outputs.numpy(), abs=1e-12)
    one = orch.predict(DataLoader(data(), 1), top_k=2, confidence_threshold=0.0)  # a replica or more with nothing to do
    assert np.array_equal(one["predictions"], outputs.float().topk(2).indices.numpy()) and one["kept"].all()


#: A model that compares outputs within a batch, and a loss whose mean is over what counts: parts would give other figures.
COMPARING = """
from torch import nn


class Centred(nn.Module):
    def forward(self, x):
        return x if self.training else x - x.mean(0)


def Comparing():
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4), Centred())


def over_what_counts(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, ignore_index=0)
"""


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("pipeline", {"micro_batches": 3}),
        ("zero", {"zero_stage": 1}),
        ("zero", {"zero_stage": 3}),
        ("data", {"path": "direct"}),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_batches_are_looked_at_whole(session: Session, mode: str, settings: dict[str, Any]) -> None:
    session.ensure(2)
    session.orch.set_mode(mode, **{"path": "relay", **settings})
    loader = DataLoader(data(), 7)
    run = session.train(
        DataLoader(data(96), 32), 1, COMPARING, model="Comparing", criterion="over_what_counts", check="off",
        val_loader=loader,
    )  # fmt: skip
    model, outputs = run.model().eval(), []
    assert run.report()["path"]["path"] == {"path": "relay", **settings}["path"]
    loss = 0.0
    with torch.no_grad():
        for x, y in loader:
            outputs.append(model(x))
            loss += nn.functional.cross_entropy(outputs[-1], y, ignore_index=0).item() * len(y) / 101
    assert run.validations[-1]["loss"] == pytest.approx(loss, abs=1e-12)
    assert session.orch.validate(loader)["loss"] == pytest.approx(loss, abs=1e-12)
    found = session.orch.predict(loader, raw=True)["outputs"]
    assert found == pytest.approx(torch.cat(outputs).numpy(), abs=1e-12)


@pytest.mark.parametrize(("mode", "settings"), [("pipeline", {}), ("zero", {"zero_stage": 2})])
def test_a_rank_killed_in_mid_prediction_is_replaced_by_another(
    session: Session, mode: str, settings: dict[str, Any]
) -> None:
    victim = session.ensure(2)[1]
    model, orch = train(session, mode, **settings), session.orch
    victim.trap("look", 3)
    thread, came = in_background(lambda: orch.predict(DataLoader(data(), 5)))
    victim.wait_trapped()
    spare = Worker(session, f"spare-{mode}", False)
    session.workers.append(spare)
    eventually(lambda: spare.name in session.ready(), 60, "the spare is here")
    kill(victim)
    thread.join(60)
    assert came and not isinstance(came[0], BaseException), came
    assert_right(came[0], plain(model, 5), exactly=False)


def test_a_rank_that_nobody_can_replace_is_told_and_the_next_call_works_with_another(session: Session) -> None:
    lost = session.ensure(2)[1]
    model, orch = train(session, "pipeline"), session.orch
    lost.trap("look", 3)
    thread, came = in_background(lambda: orch.validate(DataLoader(data(), 5), metrics=["hits"]))
    lost.wait_trapped()
    kill(lost)
    thread.join(60)
    assert isinstance(came[0], WorkerLost) and lost.name in str(came[0]), came
    session.ensure(2)
    assert orch.validate(DataLoader(data(), 5), metrics=["hits"]) == pytest.approx(truth(model), abs=1e-12)


@pytest.mark.parametrize("mode", ["data", "pipeline", "tensor"])
def test_an_error_or_an_interrupt_in_mid_pass_costs_no_worker(session: Session, mode: str) -> None:
    workers = session.ensure(2)
    model, orch, loader = train(session, mode), session.orch, DataLoader(data(), 5)
    workers[1].trap("look", 1, "raise")
    with pytest.raises(
        RemoteError, match=r"this batch is cursed \(while predicting batch \d+ of the loader \(samples \d"
    ):
        orch.predict(loader)
    workers[1].release()
    assert_right(orch.predict(loader), plain(model, 5), exactly=mode == "data")
    with pytest.raises(KeyboardInterrupt):
        orch.predict(loader, progress=lambda done, total: signal.raise_signal(signal.SIGINT))
    assert_right(orch.predict(loader), plain(model, 5), exactly=mode == "data")
    assert session.ready() == [w.name for w in workers]


# ------------------------------------------------------------------------------------- a killed orchestrator goes on

SCRIPT = """
import os, sys, pathlib
import torch
from torch import nn
from guava_nb import Orchestrator, DistributedConfig
from torch.utils.data import DataLoader, TensorDataset

folder, kill_at, cell = pathlib.Path(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]).read_text()
x = torch.randn(101, 10, generator=torch.Generator().manual_seed(5))


class Counted(TensorDataset):
    def __getitem__(self, index):
        if index == kill_at:
            os.kill(os.getpid(), 9)
        with open(folder.parent / "loaded.txt", "a") as file:
            file.write(f"{index}\\n")
        return super().__getitem__(index)


if __name__ == "__main__":
    with Orchestrator(DistributedConfig(num_workers=1)) as orch:
        orch.launch_workers(1)
        orch.wait_for_workers(timeout=60)
        orch.share(cell, "net")
        orch.register_model("Looked")
        found = orch.predict(DataLoader(Counted(x), 4), path=folder, resume=True, return_full_probabilities=True)
        print(found)
"""


def test_a_killed_orchestrator_goes_on_without_predicting_anything_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "cell.py").write_text(LOOKING.format(folder=str(tmp_path)))
    folder, environment = tmp_path / "results", {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(kill_at: int) -> subprocess.CompletedProcess[str]:
        words = [str(tmp_path / "script.py"), str(folder), str(kill_at), str(tmp_path / "cell.py")]
        words = [sys.executable, "-m", "tests.support.script", *words]
        return subprocess.run(
            words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
        )

    assert run(70).returncode == -signal.SIGKILL
    done = len(np.load(folder / "predictions.npy"))
    (tmp_path / "loaded.txt").unlink()
    second = run(-1)
    assert second.returncode == 0, second.stderr
    assert "Predictions(101 samples: predictions (101,) int64" in second.stdout and str(folder) in second.stdout
    loaded = [int(line) for line in (tmp_path / "loaded.txt").read_text().split()]
    assert done >= 4 and loaded == list(range(done, 101))
    namespace: dict[str, Any] = {"__name__": "oracle"}
    exec(LOOKING.format(folder=str(tmp_path)), namespace)
    torch.manual_seed(0)
    model = namespace["Looked"]().eval()
    x = torch.randn(101, 10, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in x.split(4)])
    assert np.array_equal(np.load(folder / "probabilities.npy"), torch.softmax(outputs, 1).numpy())


def test_metrics_of_a_run_stand_in_its_history(session: Session) -> None:
    metrics = pytest.importorskip("torchmetrics", reason="torchmetrics is part of the extra test")
    session.ensure(2)
    session.orch.set_mode("data", path="relay")
    f1 = metrics.F1Score(task="multiclass", num_classes=4, average="macro")
    run = session.train(
        DataLoader(data(), 32), 2, LOOKING.format(folder=str(session.folder)), model="Looked",
        criterion="CrossEntropyLoss", val_loader=DataLoader(data(), 7), metrics={"f1": f1, "hits": "hits"},
    )  # fmt: skip
    model, (x, y) = run.model().eval(), data().tensors
    with torch.no_grad():
        f1.update(model(x), y)
    assert run.validations[-1]["f1"] == pytest.approx(f1.compute().item(), abs=1e-7)
    assert run.report()["val"]["hits"] == run.validations[-1]["accuracy"]
    assert len(run.validations) == 2 and isinstance(session.orch, Orchestrator)
    assert session.orch.predict([{"x": x}], raw=True, predict_step="doubled")["outputs"] == pytest.approx(
        2 * plain(model, 101).numpy()
    )


def test_what_is_asked_with_counts_each_time(session: Session) -> None:
    """Another loss, preprocessing, cell or model than the call before: before and after a run, whose state stays."""
    session.ensure(2)
    orch = session.orch
    rows = torch.randn(20, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    targets = torch.arange(20) % 3
    loader = DataLoader(TensorDataset(rows, targets), batch_size=8)
    orch.set_mode("data")

    def loss_of(module: nn.Module, inputs: torch.Tensor) -> float:
        return float(module(inputs, targets))

    cell = """
import torch
from torch import nn
from torch import nn
class Scaled(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = nn.Parameter(torch.full((3,), factor))
    def forward(self, x):
        return x * self.factor
def minus(batch):
    return -batch[0], batch[1]
"""
    orch.share(cell, "asked")
    orch.register_model("Scaled")
    cross, margin = nn.CrossEntropyLoss(), nn.MultiMarginLoss()
    assert orch.validate(loader)["loss"] == pytest.approx(loss_of(cross, rows), abs=1e-12)
    assert orch.validate(loader, criterion="MultiMarginLoss")["loss"] == pytest.approx(loss_of(margin, rows), abs=1e-12)
    assert orch.validate(loader, preprocess="minus")["loss"] == pytest.approx(loss_of(cross, -rows), abs=1e-12)
    orch.register_model("Scaled", {"factor": 2.0})
    assert orch.validate(loader)["loss"] == pytest.approx(loss_of(cross, 2 * rows), abs=1e-12)
    run = orch.start_training(
        loader, optimizer="SGD", optimizer_args={"lr": 0.5}, progress=False, fresh=True, criterion="CrossEntropyLoss"
    )
    factor = run.model().factor.detach()
    assert orch.validate(loader, preprocess="minus")["loss"] == pytest.approx(loss_of(cross, -rows * factor), abs=1e-12)
    orch.share("def rows_of(outputs, targets):\n    return float(len(outputs)), 1\n", "a metric that came later")
    assert orch.validate(loader, metrics=["rows_of"])["rows_of"] == pytest.approx(20 / 3)
    assert orch.validate(loader)["loss"] == pytest.approx(loss_of(cross, rows * factor), abs=1e-12)
    assert torch.equal(orch.run.model().factor.detach(), factor)
