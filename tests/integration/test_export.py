"""Programs that `run.export` and `%guava_export` write: torchrun runs them without guava_nb, with the losses of the run."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb import Orchestrator
from guava_nb.training.run import Run
from tests.support.kernels import Kernel

ROOT = Path(__file__).resolve().parents[2]
ROWS = 97  # in batches of 16 the last one has a single row, which no number of replicas divides
TOLERANCE = 1e-5
LAUNCH_S = 150.0

pytestmark = pytest.mark.timeout(
    400
)  # a program is three processes, and a test starts up to two of them after two runs

CELL = '''
import torch
from torch import nn


class Block(nn.Module):
    """Two layers beside the way."""

    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        """Add what the layers make."""
        return x + self.down(self.drop(torch.relu(self.up(x))))


class Net(nn.Module):
    """Blocks in a list, which pipelines trace and tensor plans find."""

    def __init__(self, width=16, blocks=4, dropout=0.0):
        super().__init__()
        self.enter = nn.Linear(10, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        """Return the scores of the classes."""
        x = torch.relu(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def layers(width=16):
    """Return the same as a sequence."""
    return nn.Sequential(nn.Linear(10, width), Block(width), Block(width), Block(width), nn.Linear(width, 4))


class Spare(Net):
    """With a head that no step uses."""

    def __init__(self, width=16):
        super().__init__(width)
        self.spare = nn.Linear(width, 2)


def groups(named, lr=0.01):
    """Train biases slowly."""
    slow = [p for n, p in named if n.endswith("bias")]
    fast = [p for n, p in named if not n.endswith("bias")]
    return torch.optim.AdamW([{"params": fast}, {"params": slow, "lr": lr / 10, "weight_decay": 0.0}], lr=lr)


def weighted(outputs, targets):
    """Return a sum and its own denominator."""
    weight = 1.0 + targets.float()
    each = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return (each * weight).sum(), weight.sum()


def warm(step):
    """Begin slowly."""
    return min(1.0, (step + 1) / 5)
'''

ALL = {
    "optimizer": "groups",
    "max_grad_norm": 0.05,
    "scheduler": "LambdaLR",
    "scheduler_args": {"lr_lambda": "warm"},
}
#: Mode, its settings, model, its arguments, options: what torch spreads otherwise, once each.
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], dict[str, Any]]] = {
    "data": ("data", {}, "Net", {"dropout": 0.2}, {**ALL, "accumulation_steps": 2}),
    "data-count": ("data", {}, "Net", {}, {"criterion": "weighted", "optimizer": "SGD", "optimizer_args": {"lr": 0.1}}),
    "data-labels": (
        "data", {}, "Net", {},
        {"criterion_args": {"weight": [1.0, 2.0, 0.5, 1.0], "ignore_index": 3}, "accumulation_steps": 2, "max_steps": 5},
    ),
    "data-bf16": ("data", {}, "Net", {}, {"precision": "bf16", "scheduler": "StepLR", "scheduler_args": {"step_size": 1},
                                          "scheduler_interval": "epoch"}),
    "data-unused": ("data", {}, "Spare", {}, {**ALL, "accumulation_steps": 2}),
    "data-fp64": ("data", {}, "Net", {}, {"precision": "fp64"}),
    "zero-1": ("zero", {"zero_stage": 1}, "Net", {}, ALL),
    "zero-1-unused": ("zero", {"zero_stage": 1}, "Spare", {}, ALL),
    "zero-2-unused": ("zero", {"zero_stage": 2}, "Spare", {}, ALL),
    "zero-3-unused": ("zero", {"zero_stage": 3}, "Spare", {}, ALL),
    "zero-2": ("zero", {"zero_stage": 2}, "Net", {"dropout": 0.1}, {**ALL, "accumulation_steps": 2}),
    "zero-3": ("zero", {"zero_stage": 3}, "Net", {}, {**ALL, "criterion": "weighted"}),
    "tensor": ("tensor", {}, "Net", {}, {**ALL, "accumulation_steps": 2}),
    "pipeline": ("pipeline", {"micro_batches": 4}, "layers", {}, {**ALL, "accumulation_steps": 2}),
    "pipeline-count": ("pipeline", {"micro_batches": 2, "pipeline_schedule": "gpipe"}, "layers", {},
                       {**ALL, "criterion": "weighted"}),
    "pipeline-interleaved": ("pipeline", {"micro_batches": 4, "pipeline_schedule": "interleaved", "stages_per_worker": 2},
                             "layers", {}, ALL),
    "pipeline-traced": ("pipeline", {"micro_batches": 4}, "Net", {}, ALL),
    "hybrid-dp-tp": ("hybrid", {"dp": 2, "tp": 2}, "Net", {}, ALL),
    "hybrid-dp-tp-unused": ("hybrid", {"dp": 2, "tp": 2}, "Spare", {}, ALL),
    "hybrid-dp-tp-zero-2": ("hybrid", {"dp": 2, "tp": 2, "zero_stage": 2}, "Net", {}, {**ALL, "accumulation_steps": 2}),
    "hybrid-dp-pp": ("hybrid", {"dp": 2, "pp": 2, "micro_batches": 2}, "layers", {}, ALL),
    "hybrid-pp-tp": ("hybrid", {"pp": 2, "tp": 2, "micro_batches": 2}, "layers", {}, {**ALL, "criterion": "weighted"}),
}  # fmt: skip
#: Those that ask for four workers, and their groups of processes.
FOUR = [name for name in CASES if name.startswith("hybrid")]


def loader(rows: int = ROWS, order: torch.Generator | None = None) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(rows, 10, generator=generator), torch.randint(0, 4, (rows,), generator=generator))
    return DataLoader(data, 16, shuffle=True, generator=order)


@pytest.fixture(scope="module")
def orchestrator() -> Iterator[Orchestrator]:
    with Orchestrator(path="relay", threads_per_worker=1) as made:
        made.share(CELL, "net")
        yield made


def trained(
    orchestrator: Orchestrator, name: str, workers: int = 2, order: torch.Generator | None = None, **more: Any
) -> Run:
    mode, settings, model, arguments, options = CASES[name]
    missing = workers - len([w for w in orchestrator.status().workers if w.state in ("ready", "working")])
    if missing > 0:
        orchestrator.launch_workers(missing, "cpu", 1)
    orchestrator.wait_for_workers(workers)
    orchestrator.set_mode(mode, **{"path": "relay", **settings})
    orchestrator.register_model(model, arguments)
    rows = ROWS - 1 if name == "pipeline-traced" else ROWS
    given = {"num_epochs": 2, "fresh": True, "progress": False, **options, **more}
    return orchestrator.start_training(loader(rows, order), **given)


def started(program: Path, *words: str, processes: int = 2, warm: bool = True, **variables: str) -> list[float]:
    """Run a program under torchrun; returns the losses that it tells."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT) if warm else "", **variables}
    script = ["-m", "tests.support.script"] if warm else []
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        *script,
    ]
    process = subprocess.Popen(
        [*command, str(program), *words], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True, cwd=ROOT if warm else program.parent,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LAUNCH_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun's children are of its session
        process.communicate()
        raise
    assert process.returncode == 0, output
    return [float(value) for value in re.findall(r"step \d+: loss (\S+)", output)]


def losses(run: Run) -> list[float]:
    return [record["loss"] for record in run.history]


def complaints(program: Path) -> str:
    """What the repository's ruff says of a program, and how it would format it."""
    own = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    checked = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *own, str(program)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    shown = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--diff", *own, str(program)],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    return ("" if checked.returncode == 0 else checked.stdout) + shown.stdout


@pytest.mark.whole
def test_a_program_runs_where_guava_nb_cannot_be_imported(orchestrator: Orchestrator, tmp_path: Path) -> None:
    run = trained(orchestrator, "data")
    program = run.export(tmp_path / "train.py", save_data=True)
    (tmp_path / "guava_nb").mkdir()
    (tmp_path / "guava_nb" / "__init__.py").write_text("raise ImportError('guava_nb is not here')\n")
    assert started(program, warm=False, PYTHONPATH=str(tmp_path)) == pytest.approx(losses(run), abs=TOLERANCE)


@pytest.mark.parametrize("name", ["data", "zero-1", "zero-3", "tensor", "pipeline"])
def test_a_program_goes_on_from_a_checkpoint_of_the_run_and_of_its_own(
    orchestrator: Orchestrator, tmp_path: Path, name: str
) -> None:
    steps = 6
    runs = []
    for end in (steps // 2, steps):  # the same order, because the loader has a generator of its own
        order = torch.Generator().manual_seed(7)
        runs.append(trained(orchestrator, name, order=order, max_steps=end, num_epochs=None))
        orchestrator.save_checkpoint(tmp_path / f"{end}.pt")
    run = runs[-1]
    program = run.export(tmp_path / "train.py", save_data=True)
    through = started(program, "--save", str(tmp_path / "own.pt"))
    assert through == pytest.approx(losses(run), abs=TOLERANCE)
    saved = torch.load(tmp_path / "own.pt", weights_only=True)
    assert (saved["step"], saved["position"]["batches"] > 0) == (steps - 1, True)
    ours = torch.load(tmp_path / f"{steps}.pt", weights_only=True)
    assert saved["model"].keys() == ours["model"].keys()
    assert saved["optimizer"]["state"].keys() == ours["optimizer"]["state"].keys()
    for key, value in saved["model"].items():
        assert torch.allclose(value, ours["model"][key], atol=1e-5)
    rest = started(program, "--resume", str(tmp_path / f"{steps // 2}.pt"))
    assert rest == pytest.approx(losses(run)[steps // 2 :], abs=TOLERANCE)


@pytest.mark.whole
@pytest.mark.parametrize(("form", "module"), [("ray", "ray"), ("fabric", "lightning")])
def test_a_program_for_ray_or_fabric_gives_the_losses_of_its_run_and_goes_on(
    orchestrator: Orchestrator, tmp_path: Path, form: str, module: str
) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: pip install {'ray[train]' if form == 'ray' else module}")
    for end in (3, 6):  # the same order, because the loader has a generator of its own
        order = torch.Generator().manual_seed(7)
        run = trained(orchestrator, "data", order=order, max_steps=end, num_epochs=None)
        orchestrator.save_checkpoint(tmp_path / f"{end}.pt")
    program = run.export(tmp_path / "train.py", form=form, save_data=True)
    assert complaints(program) == ""
    # Ray's local mode: its trainer and reports in the processes that torchrun starts, without a cluster.
    words = ["--workers", "0"] if form == "ray" else ["--devices", "2"]
    here: dict[str, Any] = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "RAY_TRAIN_V2_ENABLED": "1"}
    assert started(program, *words, warm=False, **here) == pytest.approx(losses(run), abs=TOLERANCE)
    rest = started(program, *words, "--resume", str(tmp_path / "3.pt"), warm=False, **here)
    assert rest == pytest.approx(losses(run)[3:], abs=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_a_program_gives_the_losses_of_its_run(orchestrator: Orchestrator, tmp_path: Path, name: str) -> None:
    workers = 4 if name in FOUR else 2
    run = trained(orchestrator, name, workers)
    program = run.export(tmp_path / "train.py", save_data=True)
    assert complaints(program) == ""
    text = program.read_text(encoding="utf-8")
    processes = int(re.findall(r"--nproc-per-node (\d+)", text)[0])
    assert processes == workers and "import guava" not in text
    # Without it one in four programs with shards was aborted at its end, after all it had to do.
    assert "gc.collect()\n    dist.destroy_process_group()" in text
    through = started(program, "--save", str(tmp_path / "own.pt"), processes=processes)
    assert through == pytest.approx(losses(run), abs=TOLERANCE)
    theirs, ours = torch.load(tmp_path / "own.pt", weights_only=True)["model"], run.model().state_dict()
    assert theirs.keys() == ours.keys()
    largest = max(float((theirs[key].double() - ours[key].double()).abs().max()) for key in ours)
    assert largest < 10 * TOLERANCE, "weights that no loss shows, such as those of a head that no step uses"


@pytest.mark.whole
def test_the_magic_writes_a_program_in_a_real_kernel(tmp_path: Path) -> None:
    kernel = Kernel(folder=tmp_path)
    try:
        kernel.run("%load_ext guava_nb\n%guava_up --local 2")
        kernel.run(f"%%guava_share\n{CELL}")
        kernel.run(
            "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
            "torch.manual_seed(1)\nrows = TensorDataset(torch.randn(40, 10), torch.randint(0, 4, (40,)))\n"
            "loader = DataLoader(rows, 16, shuffle=True)"
        )
        status, text = kernel.attempt("%guava_export train.py")
        assert status == "error" and "no run was started" in text
        kernel.run("%guava_train --model Net --loss CrossEntropyLoss --data loader --epochs 1 --out run", timeout_s=90)
        shown = kernel.run("%guava_export train.py")
        assert "Wrote train.py" in shown and "fill in build_data()" in shown
        text = (tmp_path / "train.py").read_text(encoding="utf-8")
        assert "40 samples; a batch of 16, over all processes, is\n        inputs: float32 [16, 10]" in text
        status, text = kernel.attempt("%guava_export train.py --save-data")
        assert status == "error" and "train.py exists" in text and not (tmp_path / "train.pt").exists()
        assert "build_data" not in kernel.run("%guava_export train.py --save-data --overwrite")
        told = kernel.run("print([record['loss'] for record in run.history])")
        assert started(tmp_path / "train.py") == pytest.approx(
            [float(value) for value in re.findall(r"\d+\.\d+", told)], abs=TOLERANCE
        )
    finally:
        kernel.close()
