"""`guava demo` as a person runs it, with worker processes over TLS on loopback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from guava_nb.cli.demo import MODEL, DemoOptions, make_loaders
from guava_nb.cli.demo_model import DigitNet
from guava_nb.cli.main import main
from guava_nb.cli.reference import train_plain
from tests.support.processes import Session

KEYS = {
    "mode", "sync", "workers", "steps", "epochs", "samples", "train_loss", "val", "wall_s", "step_s", "wire", "energy",
    "parity", "lost_samples", "duplicated_samples", "generations",
}  # fmt: skip
WIRE_KEYS = {
    "out_bytes", "in_bytes", "sample_bytes", "gradient_bytes", "activation_bytes", "parameter_bytes", "control_bytes",
}  # fmt: skip


def demo(tmp_path: Path, *words: str) -> dict[str, Any]:
    file = tmp_path / "report.json"
    assert main(["demo", *words, "--report", str(file)]) == 0
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def plain_losses(options: DemoOptions) -> list[float]:
    torch.manual_seed(options.seed)
    return train_plain(DigitNet(), make_loaders(options)[0], options.epochs, options.learning_rate)


@pytest.mark.parametrize(
    ("workers", "words"),
    [(1, ["--epochs", "1"]), (3, ["--epochs", "1", "--batch-size", "65", "--shares", "3,1,2"])],
)
def test_check_finds_no_difference_to_plain_pytorch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: int, words: list[str]
) -> None:
    report = demo(tmp_path, "--workers", str(workers), "--check", *words)
    assert report["parity"]["max_abs_diff"] <= 1e-9 and report["parity"]["precision"] == "fp64"
    assert (report["lost_samples"], report["duplicated_samples"]) == (0, 0)
    assert report["samples"] == 1437 and len(report["workers"]) == workers
    assert sum(worker["samples"] for worker in report["workers"]) == 1437
    assert "equal to plain PyTorch" in capsys.readouterr().out


@pytest.mark.timeout(150)
def test_two_workers_learn_the_digits_and_report_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = demo(tmp_path, "--workers", "2", "--epochs", "8")
    assert set(report) >= KEYS and set(report["wire"]) >= WIRE_KEYS and set(report["step_s"]) == {"p50", "p95"}
    assert report["val"]["accuracy"] >= 0.95 and report["val"]["samples"] == 360
    assert (report["mode"], report["sync"], report["parity"]) == ("data", "step", None)
    assert report["steps"] == len(report["train_loss"]) == 8 * 23  # 1,437 images, 64 a batch: the last one has 29
    assert report["samples"] == 8 * 1437 and report["generations"] == 1
    assert (report["lost_samples"], report["duplicated_samples"]) == (0, 0)
    assert report["wire"]["sample_bytes"] >= 8 * 1437 * 64 and report["wire"]["gradient_bytes"] > 0
    assert all(entry["joules"] is None and entry["method"] for entry in report["energy"])
    assert report["train_loss"] == pytest.approx(plain_losses(DemoOptions(epochs=8)), abs=1e-5)
    out = capsys.readouterr().out
    assert "0 lost, 0 doubled" in out and "accuracy" in out


@pytest.mark.parametrize(
    ("batch_size", "shares", "precision"),
    [(64, None, "fp64"), (64, None, "fp32"), (65, None, "fp32"), (65, None, "fp64"), (64, (5, 1, 2), "fp32")],
)
def test_three_workers_have_the_losses_of_plain_pytorch(
    three: Session, batch_size: int, shares: tuple[float, ...] | None, precision: str
) -> None:
    options = DemoOptions(workers=3, epochs=1, batch_size=batch_size, shares=shares)
    three.orch.register_model(MODEL)
    run = three.orch.start_training(
        make_loaders(options)[0], num_epochs=1, optimizer="Adam", optimizer_args={"lr": options.learning_rate},
        shares=shares, precision=precision, fresh=True, progress=False,
    )  # fmt: skip
    model = DigitNet().to(torch.float64 if precision == "fp64" else torch.float32)
    torch.manual_seed(0)
    model = DigitNet().to(next(model.parameters()).dtype)
    losses = train_plain(model, make_loaders(options)[0], 1, options.learning_rate)
    assert run.report()["train_loss"] == pytest.approx(losses, abs=1e-5 if precision == "fp32" else 1e-12)
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)
    assert sum(record["samples"] for record in run.history) == 1437
    if precision == "fp64":
        theirs = run.model().state_dict()
        assert max(float((theirs[name] - value).abs().max()) for name, value in model.state_dict().items()) <= 1e-9


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--shares", "1,2,3"], "names 3 shares for 2 workers"),
        (["--report", "/no/such/folder/r.json"], "there is no folder"),
        (["--mode", "pipelin"], "--mode pipelin"),
        (["--workers", "0"], "num_workers"),
    ],
)
def test_a_wrong_line_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert main(["demo", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.strip().splitlines()) == 1
