"""Writing a program: nothing is overwritten or half written, what cannot be exported is refused first, names do not clash."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb import Callback, Orchestrator, WorkerData
from guava_nb.errors import ConfigError
from guava_nb.export import program
from guava_nb.export.blanks import to_be_filled_in
from guava_nb.export.facts import ExportFacts
from guava_nb.export.refusals import check_exportable
from guava_nb.protocol.messages import Cell, Factory, ParallelSpec
from guava_nb.spec.training_options import option_infos
from guava_nb.training.run import Run
from tests.support.session import direct_session
from tests.support.training import spec as run_spec

CELL = '''
import torch
from torch import nn


class Net(nn.Linear):
    """One layer."""

    def __init__(self):
        super().__init__(4, 3)

    def inner(self, x):
        return self(x)


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def step(model, batch):
    return loss(model(batch["x"]), batch["y"])


def inside(model, batch):
    return loss(model.inner(batch["x"]), batch["y"])


def halves(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def rows(count):
    """Return a data set that every machine can make."""
    stream = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(torch.randn(count, 4, generator=stream), torch.arange(count) % 3)


def as_dict(samples):
    """Return a batch by names, with its samples mixed."""
    x = torch.stack([x for x, _ in samples])
    return {"x": 0.7 * x + 0.3 * x.flip(0), "y": torch.stack([y for _, y in samples])}


def as_lists(samples):
    """Return a batch that no slice of rows cuts."""
    return {"x": [x for x, _ in samples], "y": [y for _, y in samples]}


def of_lists(model, batch):
    return loss(model(torch.stack(batch["x"])), torch.stack(batch["y"]))
'''
CELL += '''

def twice(batch):
    """Return inputs twice as large."""
    return batch[0] * 2, batch[1]


def count(batch):
    """Return how many numbers a batch has."""
    return batch[0].numel()
'''
SECOND_CELL = '''
class Normed(nn.Module):
    """A layer with running statistics."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.norm.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.norm(x))
'''
STACK = """
import torch
from torch import nn


class Spared(nn.Module):
    '''With a layer that no step may use.'''

    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.spare = nn.Linear(width, 16), nn.Linear(16, width), nn.Linear(width, width)

    def forward(self, x):
        x = x + self.down(torch.relu(self.up(x)))
        return self.spare(x) if USES else x


def stack():
    return nn.Sequential(nn.Linear(4, 8), Spared(8), Spared(8), nn.Linear(8, 3))
"""
#: Each option: a value, and what a program then says.
WRITTEN: dict[str, tuple[Any, str]] = {
    "num_epochs": (2, "NUM_EPOCHS = 2"),
    "max_steps": (3, "MAX_STEPS = 3"),
    "criterion": ("MSELoss", "criterion = nn.MSELoss("),
    "criterion_args": ({"reduction": "mean"}, "nn.MSELoss("),
    "optimizer": ("SGD", "torch.optim.SGD(model.parameters()"),
    "optimizer_args": ({"lr": 0.25}, "lr=0.25"),
    "scheduler": ("StepLR", "torch.optim.lr_scheduler.StepLR(optimizer"),
    "scheduler_args": ({"step_size": 7}, "step_size=7"),
    "scheduler_interval": ("epoch", "        scheduler.step()\n        batches_done = 0"),
    "max_grad_norm": (0.5, "MAX_GRAD_NORM = 0.5"),
    "accumulation_steps": (2, "ACCUMULATION_STEPS = 2"),
    "precision": ("bf16", "dtype=torch.bfloat16"),
    "channels_last": (True, "memory_format=torch.channels_last"),
    "seed": (9, "SEED = 9"),
    "preprocess": ("twice", "inputs, targets = twice(batch)"),
    "augment": ("twice", "batch = twice(batch)"),
    "val_interval": (2, "validation"),
    "shares": ([2.0, 1.0], "unequal shares"),
    "wire": ("bf16", "sent gradients as bf16; here it all travels in full"),
    "buffers": ("first", "buffers=first"),
    "callbacks": ([Callback()], "callbacks"),
    "metrics": (None, "validation"),  # they belong to validations
    "tokens": ("count", "figures of energy"),
    "threads": (2, "gave each worker 2 threads"),
    "save_every": (50, "checkpoints within an epoch"),
    "save_best": ("loss", "the checkpoint of the best validation"),
    "patience": (3, "patience"),
    "log": ("csv", "the log"),
    "save_only": ("trainable", "checkpoints without what is frozen"),
    "budget_bytes": ("1GB", "the limit of bytes"),
    "checkpoint_dir": (None, ""),  # given by the test
}
#: Told by tests of their own here or in test_export.py: what is refused, what makes two runs, what goes with another option.
ELSEWHERE = {
    "sync", "sync_every", "outer", "outer_lr", "outer_momentum", "outer_args", "sync_delay", "mixing",  # local sync: refused
    "scheduler_metric",  # goes with validations: refused
    "split_fn", "batch",  # rows that are no slices: refused
    "step", "data", "optimizer_site", "compile", "count_flops", "weights", "resume", "fresh",
}  # fmt: skip
#: Nothing of it is in what is trained, or when.
OF_THE_SESSION = {"detach", "cache", "cache_static", "save_path", "keep", "check", "progress"}
ROWS = TensorDataset(torch.randn(10, 4), torch.arange(10) % 3)


@pytest.fixture
def session() -> Iterator[Orchestrator]:
    with direct_session(2) as orchestrator:
        orchestrator.share(CELL, "cell")
        orchestrator.register_model("Net")
        yield orchestrator


def trained(session: Orchestrator, data: Any = None, **options: Any) -> Run:
    given = {"num_epochs": 1, "progress": False, "fresh": True, **options}
    return session.start_training(DataLoader(ROWS, 4, shuffle=True) if data is None else data, **given)


def test_a_file_that_is_there_stays_as_it_was(session: Orchestrator, tmp_path: Path) -> None:
    run, program, data = trained(session), tmp_path / "train.py", tmp_path / "train.pt"
    program.write_text("mine")
    with pytest.raises(ConfigError, match=r"train\.py exists"):
        run.export(program)
    assert program.read_text() == "mine"
    program.unlink()
    data.write_text("mine too")
    with pytest.raises(ConfigError, match=r"train\.pt exists"):
        run.export(program, save_data=True)
    assert not program.exists() and data.read_text() == "mine too"
    run.export(program, save_data=True, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.pt", "train.py"]


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("train.txt", {}, "ends in .py"),
        ("no folder/train.py", {}, "there is no folder"),
        ("train.py", {"form": "jax"}, "one of: torch, ray, fabric"),
    ],
)
def test_a_call_that_cannot_be_meant_writes_nothing(
    session: Orchestrator, tmp_path: Path, name: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        trained(session).export(tmp_path / name, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sync": "local", "sync_every": 2}, "local steps between two exchanges"),
        ({"step": "inside", "criterion": None, "collate": True}, r"step 'inside' uses model\.inner"),
        (
            {"scheduler": "ReduceLROnPlateau", "scheduler_interval": "epoch"},
            r"its schedule \(ReduceLROnPlateau\) follows the validations",
        ),
        ({"split_fn": lambda batch, ranges: [tuple(p[a:b] for p in batch) for a, b in ranges]}, "split_fn"),
    ],
)
def test_what_no_program_can_do_is_refused_before_a_file_is_written(
    session: Orchestrator, tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    collate = vars(session._models.shared())["as_dict"] if options.pop("collate", False) else None
    run = trained(session, DataLoader(ROWS, 4, collate_fn=collate), **options)
    with pytest.raises(ConfigError, match=sentence):
        run.export(tmp_path / "train.py", save_data=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("stage", "optimizer", "is_refused"), [(1, "sgd", True), (2, "sgd", False), (1, "SGD", False)])
def test_hooks_on_the_steps_of_an_optimizer_that_torch_makes_anew_are_refused(
    stage: int, optimizer: str, is_refused: bool
) -> None:
    """Only where the run's optimizer is one of a cell: one of torch's own has no hooks, whatever a cell defines beside it."""
    spec = run_spec(
        parallel=ParallelSpec(mode="zero", dp=2, zero_stage=stage), optimizer=Factory(optimizer, {"lr": 0.1})
    )
    cells = [Cell("cell", "def sgd(named):\n    made.register_step_post_hook(clamp)\n")]
    loader: Any = SimpleNamespace(record=SimpleNamespace(look=("float32", (4,))), by_index=True)
    facts = ExportFacts("run-1", spec, cells, 2, True, 1, None, 1, loader)
    with pytest.raises(ConfigError, match="without the hooks") if is_refused else nullcontext():
        check_exportable(facts, "torch")


def test_names_of_the_users_that_the_program_has_variables_for_get_a_second_name(
    session: Orchestrator, tmp_path: Path
) -> None:
    run = trained(session, criterion="loss", scheduler="halves", accumulation_steps=2)
    text = run.export(tmp_path / "train.py").read_text()
    assert "shared_loss = loss" in text and "loss = weight * shared_loss(parallel(inputs), targets)" in text
    assert "scheduler = halves(optimizer)" in text
    ast.parse(text)


def test_batches_by_name_and_a_shared_collate_function(session: Orchestrator, tmp_path: Path) -> None:
    collate = vars(session._models.shared())["as_dict"]
    run = trained(session, DataLoader(ROWS, 4, collate_fn=collate), criterion=None, step="step")
    text = run.export(tmp_path / "train.py").read_text()
    assert "loss = weight * shared_step(parallel, batch)" in text and "collate_fn=as_dict" in text
    assert "batch = {name: part.to(device) for name, part in batch.items()}" in text
    epoch_data = runpy.run_path(str(tmp_path / "train.py"))["epoch_data"]
    parts = [list(epoch_data(ROWS, list(range(9)), 1, replica, 2)) for replica in (0, 1)]
    for ids, ((first, rows), (second, _)) in zip(([4, 5, 6, 7], [8]), zip(*parts, strict=True), strict=True):
        whole = collate([ROWS[at] for at in ids])
        assert rows == len(ids)
        for name, part in whole.items():
            assert torch.equal(torch.cat([first[name], second[name]])[:rows], part)


def test_what_sees_a_part_in_the_program_and_the_whole_in_the_run_is_told(
    session: Orchestrator, tmp_path: Path
) -> None:
    session.share("def watch(net):\n    net.weight.register_hook(print)\n", "hooks")
    collate = vars(session._models.shared())["as_lists"]
    run = trained(session, DataLoader(ROWS, 4, collate_fn=collate), criterion=None, step="of_lists")
    text = run.export(tmp_path / "train.py").read_text()
    told = " ".join(text.split())
    assert "as_lists is called with each process's part of a batch" in told and "batch_sampler=mine" in text
    assert "Hooks on a parameter's gradient get that of each process" in told


def test_data_that_workers_make_is_made_by_the_program_too(session: Orchestrator, tmp_path: Path) -> None:
    data = WorkerData("rows", 4, shuffle=True, seed=5, args={"count": 10})
    program = trained(session, data).export(tmp_path / "train.py")
    text = program.read_text()
    assert "data = shared_rows(count=10)" in text and "ORDER_SEED = 5" in text and "build_data" not in text
    assert to_be_filled_in(program) == ""
    with pytest.raises(ConfigError, match="made by a shared function"):
        trained(session, data).export(tmp_path / "again.py", save_data=True)


def test_a_list_of_batches_is_read_whole_and_cut(session: Orchestrator, tmp_path: Path) -> None:
    batches = [(torch.randn(3, 4), torch.arange(3)), (torch.randn(1, 4), torch.arange(1))]
    program = trained(session, batches).export(tmp_path / "train.py", save_data=True)
    assert "yield [part[mine.start : mine.stop] for part in batch], rows" in program.read_text()
    assert [len(x) for x, _ in torch.load(tmp_path / "train.pt", weights_only=True)] == [3, 1]


def test_what_is_to_be_filled_in_has_shapes_and_dtypes(session: Orchestrator, tmp_path: Path) -> None:
    program = trained(session).export(tmp_path / "train.py")
    text = program.read_text()
    assert "inputs: float32 [4, 4]" in text and "targets: int64 [4]" in text and "10 samples" in text
    assert "fill in build_data()" in to_be_filled_in(program)


def test_a_run_from_other_weights_says_so(session: Orchestrator, tmp_path: Path) -> None:
    trained(session)
    text = trained(session, fresh=False).export(tmp_path / "train.py").read_text()
    assert "did not begin from its seed" in text and '"--weights"' in text


def test_what_the_run_had_beside_training_is_named(session: Orchestrator, tmp_path: Path) -> None:
    run = trained(session, val_loader=DataLoader(ROWS, 4), patience=3)
    assert "Left out, which the run had: validation, patience." in run.export(tmp_path / "train.py").read_text()


def test_every_option_is_written_or_named_or_refused(session: Orchestrator, tmp_path: Path) -> None:
    assert {one.name for one in option_infos()} == {*WRITTEN, *ELSEWHERE, *OF_THE_SESSION}
    session.share(SECOND_CELL, "second")
    session.register_model("Normed")
    given = {name: value for name, (value, _) in WRITTEN.items()} | {"checkpoint_dir": tmp_path / "kept"}
    numbers = TensorDataset(torch.randn(12, 4), torch.randn(12, 3))
    run = trained(session, DataLoader(numbers, 6, shuffle=True), val_loader=DataLoader(numbers, 6), **given)
    text = run.export(tmp_path / "train.py").read_text()
    told = " ".join(text.split())
    assert [name for name, (_, words) in WRITTEN.items() if words not in text and words not in told] == []


def test_a_form_for_others_says_data_mode_only(session: Orchestrator, tmp_path: Path) -> None:
    run = trained(session, max_grad_norm=1.0)
    for form, word in (("ray", "TorchTrainer("), ("fabric", "fabric.clip_gradients(")):
        assert word in run.export(tmp_path / f"{form}.py", form=form).read_text()


@pytest.mark.parametrize("mode", [{"tp": 2}, {"pp": 2, "micro_batches": 2}], ids=["tp", "pp"])
@pytest.mark.parametrize("is_used", [True, False])
def test_replicas_of_parts_give_no_gradient_to_what_none_of_them_used(
    session: Orchestrator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: dict[str, int], is_used: bool
) -> None:
    session.share(f"USES = {is_used}\n{STACK}", "stack")
    session.register_model("stack")

    program_text = program.program_text

    def as_hybrid(facts: ExportFacts, *rest: Any) -> Any:
        spec = msgspec.structs.replace(facts.spec, parallel=ParallelSpec(mode="hybrid", dp=2, **mode))
        return program_text(replace(facts, spec=spec, workers=4), *rest)

    run = trained(session, optimizer="AdamW")
    monkeypatch.setattr("guava_nb.export.program.program_text", as_hybrid, raising=True)
    text = run.export(tmp_path / "train.py").read_text()
    assert "dist.all_reduce(used, group" in text if not is_used else "used = " not in text
    assert 'group=mesh["dp"].get_group()' in text and "parameter.grad = gradient" in text
    code = [line for line in text.splitlines() if not line.strip().startswith(('"""', "#"))]
    assert [line for line in code if len(line) > 120] == [], "ruff would set it otherwise"
