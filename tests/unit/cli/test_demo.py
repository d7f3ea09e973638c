"""The demo without its orchestrator: options, batches, the plain loop, the check."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from guava_nb.cli import demo
from guava_nb.cli.demo import DemoOptions, make_loaders, options_from, run_demo
from guava_nb.cli.demo_model import DigitNet
from guava_nb.cli.main import build_parser, main
from guava_nb.cli.reference import evaluate, largest_difference, measure_parity, train_plain
from guava_nb.config import mode_settings
from guava_nb.errors import ConfigError


def options(*words: str) -> DemoOptions:
    return options_from(build_parser().parse_args(["demo", *words]))


def digits(seed: int) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Stand-in for the packaged images: a bright row per class, 100 for training and 30 held out."""
    labels = torch.arange(130) % 8
    images = torch.zeros(130, 8, 8, dtype=torch.uint8)
    images[torch.arange(130), labels] = 16
    return (images[:100], labels[:100]), (images[100:], labels[100:])


@pytest.fixture
def fake_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("guava_nb.datasets.digits")
    module.split_digits = digits  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "guava_nb.datasets.digits", module)


def test_defaults_and_every_option(tmp_path: Path) -> None:
    assert options() == DemoOptions()
    words = "--workers 3 --mode data --epochs 2 --batch-size 65 --shares 2,1,1 --lr 0.1 --seed 7 --check --no-tls --device auto"
    given = options(*words.split(), "--report", str(tmp_path / "r.json"))
    assert given == DemoOptions(
        3,
        "data",
        2,
        65,
        (2.0, 1.0, 1.0),
        0.1,
        7,
        "fp64",
        check=True,
        report=tmp_path / "r.json",
        tls=False,
        device="auto",
    )
    assert options("--check", "--precision", "fp32").precision == "fp32"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--mode pipelin", "--mode pipelin is unknown; choose one of: data, pipeline"),
        ("--mode hybrid --workers 3", "--mode hybrid makes pairs of stages and needs 4, 6, ... workers, not 3"),
        ("--mode tensor --shares 1,2", "--shares divides a batch among replicas"),
        ("--shares 2,1,1", "--shares names 3 shares for 2 workers"),
        ("--shares 2,x", "must be numbers with commas"),
        ("--shares 1,0", "must be greater than 0"),
        ("--workers 99999", "--workers 99999: a worker takes about 300.0 MB beside its model"),
        ("--report /nowhere/at/all.json", "there is no folder /nowhere/at"),
    ],
)
def test_options_that_do_not_fit(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(*words.split())


@pytest.mark.parametrize("words", ["--workers 0", "--batch-size 0", "--epochs 0", "--lr -1", "--seed -1"])
def test_numbers_are_checked_by_the_configuration(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *words.split()]) == 2
    assert "(from argument); it must be at least" in capsys.readouterr().err


def test_the_same_options_give_the_same_batches(fake_digits: None) -> None:
    first, again = (list(make_loaders(DemoOptions(batch_size=32))[0]) for _ in range(2))
    assert [len(labels) for _, labels in first] == [32, 32, 32, 4]
    for (images, labels), (images_again, labels_again) in zip(first, again, strict=True):
        assert torch.equal(images, images_again)
        assert torch.equal(labels, labels_again)
    other = next(iter(make_loaders(DemoOptions(batch_size=32, seed=1))[0]))
    assert not torch.equal(first[0][0], other[0])


def test_the_network_takes_bytes_and_keeps_the_precision_of_its_weights() -> None:
    images = torch.randint(0, 17, (3, 8, 8), dtype=torch.uint8)
    for dtype in (torch.float32, torch.float64):
        scores = DigitNet().to(dtype)(images)
        assert scores.shape == (3, 10)
        assert scores.dtype == dtype
    assert sum(p.numel() for p in DigitNet().parameters()) == 38_282
    assert not list(DigitNet().buffers())


def test_the_plain_loop_learns_and_is_repeatable(fake_digits: None) -> None:
    def train() -> tuple[torch.nn.Module, list[float]]:
        torch.manual_seed(0)
        model = DigitNet()
        return model, train_plain(model, make_loaders(DemoOptions())[0], 10, 5e-3)

    (model, losses), (again, losses_again) = train(), train()
    assert len(losses) == 20
    assert losses == losses_again
    assert losses[-1] < 0.1 < losses[0]
    assert largest_difference(model.state_dict(), again.state_dict()) == 0.0
    loss, accuracy, samples = evaluate(model, make_loaders(DemoOptions())[1])
    assert (accuracy, samples) == (1.0, 30)
    assert loss < 0.1


def test_parity_is_judged_by_weights_in_fp64_and_by_losses_in_fp32() -> None:
    torch.manual_seed(0)
    model, other = DigitNet(), DigitNet()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.classes.bias[0] += 1e-3
    near = measure_parity(model, [1.0, 0.5], other, [1.0, 0.5 + 1e-7], "fp32")
    assert near.ok
    assert (near.limit, near.steps) == (1e-5, 2)
    assert near.max_abs_diff == pytest.approx(1e-3, rel=1e-3)
    assert near.max_loss_diff == pytest.approx(1e-7, rel=1e-3)
    assert not measure_parity(model, [1.0, 0.5], other, [1.0, 0.5 + 1e-7], "fp64").ok
    assert measure_parity(model, [1.0], model, [1.5], "fp64").ok
    with pytest.raises(ValueError, match="zip"):
        measure_parity(model, [1.0], other, [1.0, 2.0], "fp32")


class PlainOrchestrator:
    """Trains in this process: the demo around the orchestrator is what is under test."""

    made: list[PlainOrchestrator] = []

    def __init__(self, config: Any) -> None:
        self.config, self.calls = config, []
        self.made.append(self)

    def __enter__(self) -> PlainOrchestrator:
        self.calls.append("open")
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append("close")

    def set_mode(self, mode: str, **axes: int) -> None:
        self.calls.append(f"mode {mode}")
        self.config = self.config.replace(**mode_settings(mode, **axes))

    def launch_workers(self, count: int, device: str, threads: int) -> None:
        self.calls.append(f"launch {count} of {threads} on {device}")

    def status(self) -> Any:
        return types.SimpleNamespace(notes=["local-1 takes cuda:0, 3 threads"])

    def wait_for_workers(self, count: int, timeout: float) -> None:
        self.calls.append(f"wait {count}")

    def register_model(self, reference: str) -> None:
        self.calls.append(reference)

    def start_training(self, train_loader: Any, val_loader: Any, **arguments: Any) -> Any:
        self.arguments = arguments
        torch.manual_seed(self.config.seed)
        dtype = torch.float64 if self.config.precision == "fp64" else torch.float32
        self.model_ = DigitNet().to(dtype)
        rate = arguments["optimizer_args"]["lr"] * self.rate_factor
        self.losses = train_plain(self.model_, train_loader, arguments["num_epochs"], rate)
        self.val = evaluate(self.model_, val_loader)
        return self

    rate_factor = 1.0

    def result(self) -> PlainOrchestrator:
        return self

    def model(self) -> torch.nn.Module:
        return self.model_

    def report(self) -> dict[str, Any]:
        loss, accuracy, samples = self.val
        count = self.config.num_workers
        workers = [{"worker": f"w{k}", "device": "cpu", "state": "left", "samples": 200 // count} for k in range(count)]
        return {
            "mode": "data",
            "sync": "step",
            "workers": workers,
            "steps": len(self.losses),
            "epochs": self.arguments["num_epochs"],
            "samples": 200,
            "train_loss": self.losses,
            "val": {"loss": loss, "accuracy": accuracy, "samples": samples},
            "wall_s": 1.5,
            "step_s": {"p50": 0.01, "p95": None},
            "wire": {"out_bytes": 2_000_000, "in_bytes": 10, "gradient_bytes": 5000, "activation_bytes": 0},
            "energy": [],
            "parity": None,
            "lost_samples": 0,
            "duplicated_samples": 0,
            "generations": 1,
        }


@pytest.fixture
def expected() -> list[int]:
    """Threads of the workers that were announced before the orchestrator was made."""
    return []


@pytest.fixture
def plain_orchestrator(
    monkeypatch: pytest.MonkeyPatch, fake_digits: None, expected: list[int]
) -> type[PlainOrchestrator]:
    module = types.ModuleType("guava_nb.orchestrator")
    fresh = type("Fresh", (PlainOrchestrator,), {"made": []})
    module.Orchestrator = fresh  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "guava_nb.orchestrator", module)
    monkeypatch.setattr(demo, "expect_workers", expected.append)
    return fresh


def test_a_spread_model_is_reported_with_its_mesh(plain_orchestrator: type[PlainOrchestrator]) -> None:
    report = run_demo(DemoOptions(workers=4, epochs=1, mode="hybrid"))
    assert (report["mesh"], report["zero_stage"]) == ("dp 2 x pp 2 x tp 1", 0)
    report = run_demo(DemoOptions(workers=3, epochs=1, mode="zero"))
    assert (report["mesh"], report["zero_stage"]) == ("dp 3 x pp 1 x tp 1", 2)


def test_run_demo_asks_the_orchestrator_for_the_right_things(
    plain_orchestrator: type[PlainOrchestrator], expected: list[int]
) -> None:
    report = run_demo(DemoOptions(workers=3, epochs=2, shares=(2, 1, 1), learning_rate=0.01, seed=5, tls=False))
    (made,) = plain_orchestrator.made
    assert made.calls == ["open", "mode data", "launch 3 of 1 on cpu", "wait 3", demo.MODEL, "close"]
    assert expected == [1] == [torch.get_num_threads()]
    assert made.arguments["shares"] == (2, 1, 1)
    assert (made.arguments["optimizer"], made.arguments["optimizer_args"]) == ("Adam", {"lr": 0.01})
    config = made.config
    assert (config.num_workers, config.seed, config.precision, config.tls) == (3, 5, "fp32", False)
    assert (config.max_grad_norm, config.weight_decay) == (None, 0.0)
    assert report["parity"] is None


def test_a_device_that_is_not_here_is_refused_before_a_worker_starts(
    plain_orchestrator: type[PlainOrchestrator], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--device", "cuda:99"]) == 2
    assert "device 'cuda:99' is not here" in capsys.readouterr().err and not plain_orchestrator.made


def test_check_is_exact_against_the_same_loop(plain_orchestrator: type[PlainOrchestrator]) -> None:
    report = run_demo(options("--check", "--epochs", "2"))
    assert plain_orchestrator.made[0].config.precision == "fp64"
    assert report["parity"] == {
        "max_abs_diff": 0.0,
        "max_loss_diff": 0.0,
        "precision": "fp64",
        "steps": 4,
        "limit": 1e-9,
        "ok": True,
    }


def test_a_failed_check_fails_the_command(
    plain_orchestrator: type[PlainOrchestrator], capsys: pytest.CaptureFixture[str]
) -> None:
    plain_orchestrator.rate_factor = 1.01
    assert main(["demo", "--check", "--epochs", "2"]) == 1
    captured = capsys.readouterr()
    assert "NOT equal to plain PyTorch in fp64" in captured.out
    assert captured.err == "guava: parity check failed, the limit is 1e-09\n"


def test_the_environment_has_no_say(
    plain_orchestrator: type[PlainOrchestrator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("GUAVA_MAX_GRAD_NORM", "0.1")
    run_demo(DemoOptions(epochs=1))
    assert plain_orchestrator.made[0].config.master_port == 0
    assert plain_orchestrator.made[0].config.max_grad_norm is None


def test_the_packaged_digits_are_learnt() -> None:
    """The demo's own settings in the plain loop: what `guava demo` must reach on the wire as well."""
    train_loader, val_loader = make_loaders(DemoOptions())
    torch.manual_seed(0)
    model = DigitNet()
    losses = train_plain(model, train_loader, DemoOptions().epochs, DemoOptions().learning_rate)
    _, accuracy, samples = evaluate(model, val_loader)
    assert (len(losses), samples) == (230, 360)
    assert accuracy >= 0.95


def test_local_sync_is_of_data_mode() -> None:
    with pytest.raises(ConfigError, match="--sync local lets every worker take steps of its own"):
        demo.DemoOptions(mode="zero", sync="local")
    assert demo.DemoOptions(sync="local").sync_every == 10
    with pytest.raises(ConfigError, match="--outer sparse belongs to rounds of local steps: add --sync local"):
        demo.DemoOptions(outer="sparse")


def test_options_of_rounds_are_those_of_a_run() -> None:
    given = options("--sync", "local", "--sync-every", "6", "--outer", "partial", "--sync-delay", "2")
    assert given.rounds() == {"sync_every": 6, "outer": "partial", "sync_delay": 2} and DemoOptions().rounds() == {}
    with pytest.raises(ConfigError, match="--sync-delay 2 belongs to rounds of local steps: add --sync local"):
        options("--sync-delay", "2")
    with pytest.raises(ConfigError, match="sync_delay is 10, and a round has 10 steps"):
        options("--sync", "local", "--sync-delay", "10")
