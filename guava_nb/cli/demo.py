"""`guava demo`: trains on the packaged digits with workers spawned on this machine; no account, no network."""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guava_nb.cli import DEMO_THREADS
from guava_nb.cli.result import check_report_path, result_view, write_report
from guava_nb.config import MODES, DistributedConfig
from guava_nb.doctor.memory import check_room_for, memory_here
from guava_nb.errors import ConfigError
from guava_nb.processes.nursery import expect_workers
from guava_nb.render.text import to_text
from guava_nb.spec.loading import loading_without_collections
from guava_nb.spec.training_options import TrainingOptions, option_infos

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.utils.data import DataLoader

__all__ = ["DemoOptions", "add_command", "make_loaders", "options_from", "run_demo"]

MODEL, LOSS = "guava_nb.cli.demo_model:DigitNet", "CrossEntropyLoss"
_OF_ROUNDS = ("sync_every", "outer", "sync_delay")
JOIN_TIMEOUT_S = 120.0  # a worker process imports torch first, which takes seconds on a busy machine


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to train and how.

    Attributes:
        shares: relative share of each worker; None shares equally.
        precision: "fp32" or "fp64".
        check: also train plain PyTorch and compare.
        sync: "step", or "local" for rounds of `sync_every` local steps.
        outer: how the workers' pseudo-gradients of a round become new weights.
        sync_delay: local steps that workers go on with while these travel.
        device: of the workers; "auto" gives GPUs to as many as there are. To start CUDA and its libraries takes longer than the
            training of this small model.
    """

    workers: int = 2
    mode: str = "data"
    epochs: int = 10
    batch_size: int = 64
    shares: tuple[float, ...] | None = None
    learning_rate: float = 5e-3
    seed: int = 0
    precision: str = "fp32"
    check: bool = False
    sync: str = "step"
    sync_every: int = 10
    outer: str = "average"
    sync_delay: int = 0
    report: Path | None = None
    tls: bool = True
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse what the configuration cannot know of."""
        if self.mode not in MODES:
            raise ConfigError(f"--mode {self.mode} is unknown; choose one of: {', '.join(MODES)}")
        for word, given in (("--outer", self.outer), ("--sync-delay", self.sync_delay)):
            if given not in ("average", 0) and self.sync != "local":
                raise ConfigError(
                    f"{word} {given} belongs to rounds of local steps: add --sync local, or leave {word} out"
                )
        TrainingOptions(criterion=LOSS, sync=self.sync, **self.rounds())  # refuses what a run would refuse
        if self.sync == "local" and self.mode != "data":
            raise ConfigError(
                f"--sync local lets every worker take steps of its own, and in {self.mode} mode none can: leave --sync out, "
                "or take --mode data"
            )
        if self.mode == "hybrid" and (self.workers < 4 or self.workers % 2):
            raise ConfigError(f"--mode hybrid makes pairs of stages and needs 4, 6, ... workers, not {self.workers}")
        if self.mode not in ("data", "zero") and self.shares is not None:
            raise ConfigError(
                f"--shares divides a batch among replicas, in data and zero mode only, and this is {self.mode} mode: leave "
                "--shares out, or take --mode data"
            )
        if self.shares is not None and len(self.shares) != self.workers:
            raise ConfigError(f"--shares names {len(self.shares)} shares for {self.workers} workers; give one for each")
        if self.shares is not None and min(self.shares) <= 0:
            raise ConfigError(f"--shares must be greater than 0, not {min(self.shares):g}")
        check_room_for(self.workers, "--workers", memory_here())
        if self.report is not None:
            check_report_path(self.report)

    def rounds(self) -> dict[str, Any]:
        """Return the options of a run's rounds of local steps; none where every step is exchanged."""
        return {name: getattr(self, name) for name in _OF_ROUNDS} if self.sync == "local" else {}

    def config(self) -> DistributedConfig:
        """Return the settings; the environment and files of the current folder have no say in a demo."""
        return DistributedConfig(
            num_workers=self.workers,
            num_epochs=self.epochs,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            weight_decay=0.0,
            seed=self.seed,
            precision=self.precision,
            tls=self.tls,
        )


def add_command(commands: Any) -> None:
    """Declare the subcommand and its options."""
    parser = commands.add_parser(
        "demo", help="train on real digit images with workers on this machine", description=__doc__
    )
    add = parser.add_argument
    add("--workers", type=int, metavar="N", help="worker processes (%(default)s)")
    add(
        "--device",
        metavar="D",
        help="of the workers: cpu, cuda:0, ..., or auto: GPUs while there are some (%(default)s)",
    )
    add("--mode", help=f"way to share the work: {', '.join(MODES)} (%(default)s)")
    add("--epochs", type=int, metavar="E", help="passes (%(default)s)")
    add("--batch-size", type=int, metavar="B", help="images per step, all workers (%(default)s)")
    add("--shares", metavar="2,1", help="relative share of each worker (equal)")
    add("--lr", type=float, dest="learning_rate", metavar="LR", help="learning rate of Adam (%(default)s)")
    add("--seed", type=int, help="root of every random stream (%(default)s)")
    add("--precision", choices=("fp32", "fp64"), help="fp32; with --check fp64, where parity is sharpest")
    add("--check", action="store_true", help="train plain PyTorch too and compare the weights")
    add(
        "--sync",
        choices=("step", "local"),
        help="exchange gradients in each step, or rounds of local steps (%(default)s)",
    )
    for info in option_infos():
        if info.name in _OF_ROUNDS:
            kind = {"choices": info.choices} if info.choices else {"type": int, "metavar": "N"}
            add(f"--{info.flag}", **kind, help=f"with --sync local: {info.text.replace('%', '%%')}")
    add("--report", type=Path, metavar="FILE", help="write all figures as JSON")
    add("--no-tls", dest="tls", action="store_false", help="do not encrypt the connections")
    parser.set_defaults(**{**asdict(DemoOptions()), "precision": None})
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, show the table, write the report; 1 when a check failed."""
    options = options_from(args)
    report = run_demo(options)
    print(to_text(result_view(report)))
    if options.report is not None:
        write_report(options.report, report)
    parity = report.get("parity")
    if parity is not None and not parity["ok"]:
        print(f"guava: parity check failed, the limit is {parity['limit']:.0e}", file=sys.stderr)
        return 1
    return 0


def options_from(args: argparse.Namespace) -> DemoOptions:
    """Read the parsed line.

    Raises:
        ConfigError: options that do not fit together.
    """
    given = {one.name: getattr(args, one.name) for one in fields(DemoOptions)}
    precision = args.precision or ("fp64" if args.check else "fp32")
    return DemoOptions(**{**given, "shares": _parse_shares(args.shares), "precision": precision})


def run_demo(options: DemoOptions) -> dict[str, Any]:
    """Train with local workers and return the report, `parity` included when it was asked for.

    Raises:
        GuavaError: a setting is wrong, or the run failed.
    """
    config = options.config()
    report, model = _train(options, config)
    if options.check:
        report["parity"] = _check(options, model, report["train_loss"])
    return report


def make_loaders(options: DemoOptions) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders of the training and the held-out images; the same options give the same order again."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from guava_nb.datasets.digits import split_digits

    train, held_out = (TensorDataset(*part) for part in split_digits(options.seed))
    order = torch.Generator().manual_seed(options.seed)
    return DataLoader(train, options.batch_size, shuffle=True, generator=order), DataLoader(held_out, batch_size=120)


def _train(options: DemoOptions, config: DistributedConfig) -> tuple[dict[str, Any], Module]:
    expect_workers(DEMO_THREADS)
    with loading_without_collections():
        import torch

        from guava_nb.orchestrator import Orchestrator
        from guava_nb.telemetry.hardware import pick_device

    pick_device(options.device)  # refuses one that is not here
    torch.set_num_threads(DEMO_THREADS)
    train_loader, val_loader = make_loaders(options)
    print(
        f"Training on the packaged digit images with {options.workers} worker process(es) on this machine ...",
        flush=True,
    )
    with Orchestrator(config) as orchestrator:
        axes: dict[str, Any] = {"dp": options.workers // 2, "pp": 2} if options.mode == "hybrid" else {}
        orchestrator.set_mode(options.mode, **axes)
        orchestrator.launch_workers(options.workers, device=options.device, threads=DEMO_THREADS)
        print(*orchestrator.status().notes, sep="\n", flush=True)
        gc.freeze()  # what was loaded stays: no collection need look at it, the one at the session's end neither
        orchestrator.wait_for_workers(options.workers, timeout=JOIN_TIMEOUT_S)
        orchestrator.register_model(MODEL)
        training = orchestrator.start_training(
            train_loader,
            val_loader,
            num_epochs=options.epochs,
            criterion=LOSS,
            optimizer="Adam",
            optimizer_args={"lr": options.learning_rate},
            shares=options.shares,
            sync=options.sync,
            **options.rounds(),
        )
        report = training.result().report()
        if options.mode != "data":
            chosen = orchestrator.config
            report.update(mesh=str(chosen.mesh(options.workers)), zero_stage=chosen.zero_stage)
        return report, training.model()


def _check(options: DemoOptions, model: Module, losses: list[float]) -> dict[str, Any]:
    import torch

    from guava_nb.cli.demo_model import DigitNet
    from guava_nb.cli.reference import OuterLoop, measure_parity, train_local, train_plain
    from guava_nb.spec.round_options import outer_step

    torch.manual_seed(options.seed)
    plain = DigitNet().to(torch.float64 if options.precision == "fp64" else torch.float32)
    loader, shares = make_loaders(options)[0], options.shares or (1.0,) * options.workers
    if options.sync == "local":
        outer = OuterLoop(plain, options.outer, len(shares), outer_step(options.outer, options.sync_every))
        plain_losses = train_local(
            plain, loader, options.epochs, options.learning_rate, shares, options.sync_every, outer, options.sync_delay
        )
    else:
        plain_losses = train_plain(plain, loader, options.epochs, options.learning_rate)
    return measure_parity(model, losses, plain, plain_losses, options.precision).as_dict()


def _parse_shares(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(share) for share in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--shares {text!r} must be numbers with commas between them, for instance 2,1") from error
