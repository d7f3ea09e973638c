"""Every mode that spreads a model, between real worker processes over TLS: parity, faults, checkpoints, validation."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from guava_nb.errors import ConfigError, NotFinite, PreparationError, RemoteError, WorkerLost
from guava_nb.sync.group_replica_set import GroupReplicaSet
from guava_nb.sync.handover import fetch_between_runs
from guava_nb.sync.replica_set import GroupLost
from guava_nb.training import membership
from guava_nb.training.run import Run
from tests.support.processes import CELL, ROOT, PlainTraining, Session, Worker, data, difference, eventually, loader

#: The net of `processes` as a Sequential whose blocks have the traps: stages are cut between them.
BLOCKS = (
    CELL
    + """

class Block(nn.Module):
    def __init__(self, rows, columns, dropout=0.0):
        super().__init__()
        self.linear = nn.Linear(rows, columns)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        global _calls
        if self.training and not checking():
            _calls += 1
            trap("forward")
        return self.drop(torch.relu(self.linear(x)))


def Deep(width=16, dropout=0.0):
    return nn.Sequential(Block(10, width), Block(width, width, dropout), Block(width, width), nn.Linear(width, 4))
"""
)


class Plain(PlainTraining):
    """The same net in plain PyTorch."""

    def __init__(
        self, folder: Path, batches: Any, clip: float | None = None, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__(folder, batches)
        namespace: dict[str, Any] = {"__name__": "oracle"}
        exec(BLOCKS.format(folder=str(folder)), namespace)
        torch.manual_seed(0)
        self.model = namespace["Deep"]().to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.clip = clip
        if clip is not None:
            self.optimizer.register_step_pre_hook(
                lambda *_: torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip) and None
            )


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        folder = tmp_path_factory.mktemp("modes")
        made = Session(folder, num_workers=2, heartbeat_s=0.5, silence_s=4.0, hash_every_steps=1, path="relay")
        try:
            yield made
        finally:
            made.close()


def train(session: Session, mode: str, batches: Any, epochs: int = 2, **options: Any) -> Run:
    settings = options.pop("settings", {})
    if mode == "tensor" or "tp" in settings:  # the traps hide from the planner what the blocks do
        settings = {"tensor_plan": {"0.linear": "colwise", "1.linear": "rowwise"}, **settings}
    session.orch.set_mode(mode, **{"path": "relay", **settings})
    cell = BLOCKS.format(folder=str(session.folder)) + options.pop("more", "")
    return session.train(batches, epochs, cell, **{"model": "Deep", "criterion": "CrossEntropyLoss", **options})


MODES = [
    ("zero", 2, {"zero_stage": 1}),
    ("zero", 2, {"zero_stage": 2}),
    ("zero", 3, {"zero_stage": 3}),
    ("tensor", 2, {}),
    ("pipeline", 2, {"pipeline_schedule": "gpipe"}),
    ("pipeline", 3, {"pipeline_schedule": "1f1b", "micro_batches": 3}),
    ("pipeline", 2, {"pipeline_schedule": "interleaved", "stages_per_worker": 2}),
    ("pipeline", 2, {"micro_batches": 1, "pipeline_split": "2"}),
    ("pipeline", 2, {"pipeline_balance": "time"}),
    ("hybrid", 4, {"dp": 2, "pp": 2}),
    ("hybrid", 4, {"dp": 2, "tp": 2}),
    ("hybrid", 4, {"dp": 2, "pp": 2, "zero_stage": 1}),
]


@pytest.mark.parametrize(("mode", "workers", "settings"), MODES, ids=lambda value: str(value).replace(" ", ""))
def test_a_mode_equals_plain_pytorch(session: Session, mode: str, workers: int, settings: dict[str, Any]) -> None:
    """101 rows in batches of 32: the last batch has 5, which no number of micro-batches or replicas here divides."""
    session.ensure(workers)
    plain = Plain(session.folder, loader(), clip=0.05).epochs(2)
    run = train(session, mode, loader(), val_loader=DataLoader(data(), 30), settings=settings, max_grad_norm=0.05)
    session.assert_undisturbed(run, plain)
    x, y = data().tensors
    plain.model.eval()
    with torch.no_grad():
        outputs = plain.model(x)
    truth = torch.nn.functional.cross_entropy(outputs, y).item()
    accuracy = (outputs.argmax(1) == y).double().mean().item()
    assert [v["samples"] for v in run.validations] == [101, 101]
    assert run.validations[-1]["loss"] == pytest.approx(truth, abs=1e-12)
    assert run.validations[-1]["accuracy"] == pytest.approx(accuracy)
    # Once more after the run, on the group that stands.
    assert session.orch.validate(DataLoader(data(), 17))["loss"] == pytest.approx(truth, abs=1e-12)
    report = run.report()
    assert report["mode"] == mode and report["wire"]["sample_bytes"] > 0
    assert report["check"]["outcome"] == "same"  # whole against cut, or the whole model against its parts
    words = {"pipeline": "stages begin", "pp": "stages begin", "tensor": "shared out: columns of", "tp": "columns of"}
    assert all(word in report["layout"] for key, word in words.items() if key == mode or settings.get(key, 1) > 1)
    moved = "gradient_bytes" if mode == "zero" else "activation_bytes"
    assert report["wire"][moved] > 0


#: A loss that couples samples, as a user writes it.
CONTRAST = (
    CELL
    + """

from guava_nb import gather_batch


def contrast(model, batch):
    a, b = (nn.functional.normalize(model(x), dim=1) for x in (batch[0], 0.9 * batch[0]))
    a, b = gather_batch(a), gather_batch(b)
    return nn.functional.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))
"""
)


def contrasted(session: Session, epochs: int) -> tuple[torch.nn.Module, list[float]]:
    """The same in plain PyTorch, where `gather_batch` does nothing."""
    namespace: dict[str, Any] = {"__name__": "oracle"}
    exec(CONTRAST.format(folder=str(session.folder)), namespace)
    torch.manual_seed(0)
    model, losses = namespace["Net"]().double(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in [batch for _, order in enumerate([loader()]) for _ in range(epochs) for batch in order]:
        optimizer.zero_grad()
        loss = namespace["contrast"](model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


@pytest.mark.parametrize(("mode", "settings"), [("data", {}), ("zero", {"zero_stage": 1}), ("zero", {"zero_stage": 3})])
def test_a_loss_that_gathers_equals_plain_pytorch(session: Session, mode: str, settings: dict[str, Any]) -> None:
    """Data mode forms a group by itself, because the cell names `gather_batch`; 101 rows leave a last batch of 5."""
    session.ensure(3)
    session.orch.set_mode(mode, path="relay", **settings)
    run = session.train(loader(), 2, CONTRAST.format(folder=str(session.folder)), step="contrast", check="strict")
    model, losses = contrasted(session, 2)
    assert [record["loss"] for record in run.history] == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9
    assert run.report()["check"]["outcome"] == "same"


def test_a_worker_lost_while_others_gather_ends_their_wait(session: Session) -> None:
    victim = session.ensure(3)[1]
    victim.trap("forward", 5)
    session.orch.set_mode("data", path="relay")
    cell = CONTRAST.format(folder=str(session.folder))
    run = session.train(loader(), 2, cell, step="contrast", detach=True)
    victim.wait_trapped()  # the others wait in `gather_batch` for its rows
    os.kill(victim.pid, signal.SIGKILL)
    assert run.wait(30), run
    model, losses = contrasted(session, 2)
    assert [record["loss"] for record in run.result().history] == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9
    assert (run.lost_samples, run.duplicated_samples) == (0, 0) and run.generations >= 2


def test_a_pipeline_refuses_to_gather(session: Session) -> None:
    session.ensure(2)
    session.orch.set_mode("pipeline", path="relay")
    cell = (
        CONTRAST.format(folder=str(session.folder))
        + """

def gathered_loss(outputs, targets):
    return nn.functional.cross_entropy(gather_batch(outputs), gather_batch(targets))


def Sequence():
    return nn.Sequential(nn.Linear(10, 16), nn.Linear(16, 4))
"""
    )
    with pytest.raises(ConfigError, match="use data or ZeRO mode"):
        session.train(loader(), 1, cell, model="Sequence", criterion="gathered_loss")


def test_a_worker_that_leaves_has_counted_all_its_steps(session: Session) -> None:
    first, _ = session.ensure(2)
    run = train(session, "zero", loader(), epochs=1)
    first.handle.leave()
    assert first.handle.wait(20)
    last = first.handle.status()
    assert (last.state, last.step) == ("left", len(run.history))


@pytest.mark.parametrize("mode", ["pipeline", "tensor", "zero"])
def test_tokens_count_once_however_a_batch_is_shared(session: Session, mode: str) -> None:
    session.ensure(2)
    plain = Plain(session.folder, loader()).epochs(1)
    run = train(session, mode, loader(), epochs=1, more="def tokens_of(batch):\n    return batch[0].numel() + len(batch[1])\n",
                tokens="tokens_of")  # fmt: skip
    session.assert_undisturbed(run, plain)
    assert [step["tokens"] for step in run.history] == [11 * step["samples"] for step in run.history]
    assert sum(row["tokens"] or 0 for row in run.energy_record()["workers"]) == 11 * 101


#: Groups of unlike rates, of which the first lies on one stage: a group for each parameter, and the head before the rest.
GROUPED = """
def one_each(named):
    return torch.optim.SGD([{"params": [p], "lr": 0.1 / p.shape[-1]} for _, p in named])


def head_first(named):
    head = [p for name, p in named if name.startswith("3.")]
    return torch.optim.SGD(
        [{"params": head, "lr": 0.02}] * bool(head)
        + [{"params": [p for name, p in named if not name.startswith("3.")], "lr": 0.05}]
    )
"""


@pytest.mark.parametrize(("optimizer", "rate"), [("one_each", 0.01), ("head_first", 0.02)])
def test_the_rate_told_is_that_of_the_whole_optimizers_first_group(
    session: Session, optimizer: str, rate: float
) -> None:
    session.ensure(2)
    run = train(session, "pipeline", loader(), epochs=3, more=GROUPED, optimizer=optimizer, optimizer_args=None,
                scheduler="StepLR", scheduler_args={"step_size": 6, "gamma": 0.5})  # fmt: skip
    assert run.wait(60) and run.result()
    assert [step["learning_rate"] for step in run.history] == pytest.approx([rate] * 6 + [rate / 2] * 6)


def test_more_micro_batches_than_rows_are_told_once(session: Session) -> None:
    session.ensure(2)
    for number, told in ((33, 1), (32, 0)):
        train(session, "pipeline", loader(), epochs=2, settings={"micro_batches": number})
        notes = "\n".join(session.orch.status().notes)
        assert notes.count(f"is {number}, but a pipeline gets 32 rows of a batch") == told


ROUTED = """
import torch
from torch import nn


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 12)
        self.experts = nn.ModuleList(nn.Sequential(nn.Sequential(nn.Linear(12, 12)), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(12, 4)

    def chosen(self, x):
        return x[:, :3].argmax(1)

    def forward(self, x):
        h, chosen = self.first(x), self.chosen(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                h = h.index_add(0, rows, expert(h[rows]))
        return self.last(h)


class Again(Routed):
    # All rows take all blocks; one with a high mark takes the first block twice.
    def forward(self, x):
        h = self.first(x)
        for expert in self.experts:
            h = h + expert(h)
        high = x[:, :1] > 50
        if bool(high.any()):
            h = torch.where(high, self.experts[0](h), h)
        return self.last(h)
"""


@pytest.mark.parametrize("model", ["Routed", "Again"])
def test_replicas_may_use_unlike_blocks(session: Session, model: str) -> None:
    """Six rows a step, three on each worker; a block that is used once more in the fifth step makes a new group."""
    session.ensure(2)
    namespace: dict[str, Any] = {}
    exec(ROUTED, namespace)
    torch.manual_seed(0)
    plain = namespace[model]().double()
    x, y = (tensor[:48].clone() for tensor in data().tensors)
    x[6 * 4, 0] = 99
    batches = DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=6)
    optimizer, losses = torch.optim.AdamW(plain.parameters(), lr=0.01), []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(plain(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    session.orch.set_mode("zero", path="relay", zero_stage=3)
    run = session.train(batches, 1, ROUTED, model=model, criterion="CrossEntropyLoss", val_loader=batches)
    assert [r["loss"] for r in run.history] == pytest.approx(losses, abs=1e-9)
    assert difference(run.model(), plain) <= 1e-9
    assert run.validations[-1]["samples"] == 48
    assert run.generations == (2 if model == "Again" else 1)


LAID_OUT = """
import torch
from torch import nn


class Front(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        if not x.is_contiguous(memory_format=torch.channels_last):
            raise ValueError(f"the batch came with strides {x.stride()}")
        return self.conv(x).relu()


class Tilted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4).t())

    def forward(self, x):
        return x.mean((2, 3)) @ self.weight


def Images():
    return nn.Sequential(Front(), nn.Conv2d(4, 4, 3), Tilted(), nn.Linear(5, 4)).to(memory_format=torch.channels_last)
"""


@pytest.mark.parametrize(
    ("mode", "settings", "cache"),
    [("data", {}, None), ("data", {}, "memory"), ("zero", {"zero_stage": 1}, None), ("zero", {"zero_stage": 2}, None),
     ("zero", {"zero_stage": 3}, "memory"), ("tensor", {"tensor_plan": {"3": "colwise"}}, None),
     ("pipeline", {"micro_batches": 2}, None)],
)  # fmt: skip
def test_models_and_batches_of_other_layouts_in_memory(
    session: Session, tmp_path: Path, mode: str, settings: dict[str, Any], cache: str | None
) -> None:
    """Weights in channels_last, a transposed one, and batches in channels_last arrive and end as in plain PyTorch."""
    session.ensure(2)
    namespace: dict[str, Any] = {}
    exec(LAID_OUT, namespace)
    torch.manual_seed(0)
    plain = namespace["Images"]().double()
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(30, 3, 7, 7, generator=generator, dtype=torch.float64).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 4, (30,), generator=generator)
    batches = list(zip(images.split(8), labels.split(8), strict=True))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for x, y in batches * 2:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    session.orch.set_mode(mode, path="relay", **settings)
    run = session.train(batches, 2, LAID_OUT, model="Images", criterion="CrossEntropyLoss", cache=cache)
    assert difference(run.model(), plain) <= 1e-9
    for ours, theirs in zip(run.model().parameters(), plain.parameters(), strict=True):
        assert ours.stride() == theirs.stride()
    saved = torch.load(session.orch.save_checkpoint(tmp_path / "laid-out.pt"), weights_only=True)
    optimizer.load_state_dict(saved["optimizer"])
    plain.load_state_dict(saved["model"])
    assert difference(run.model(), plain) == 0.0


NORMED = """
from torch import nn


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(10, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())
"""


@pytest.mark.parametrize(("mode", "settings"), [("data", {}), ("zero", {"zero_stage": 3})])
def test_synced_batch_norms_equal_plain_pytorch(session: Session, mode: str, settings: dict[str, Any]) -> None:
    """98 rows in batches of 32: the last batch has two, one on each worker."""
    session.ensure(2)
    namespace: dict[str, Any] = {}
    exec(NORMED, namespace)
    torch.manual_seed(0)
    model = namespace["Normed"]().double()
    rows = torch.utils.data.TensorDataset(*(tensor[:98] for tensor in data().tensors))
    batches = DataLoader(rows, batch_size=32)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for x, y in list(batches) * 2:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    session.orch.set_mode(mode, path="relay", sync_batchnorm=True, **settings)
    try:
        run = session.train(batches, 2, NORMED, model="Normed", criterion="CrossEntropyLoss")
    finally:
        session.orch.set_mode("data", sync_batchnorm=False)
    assert [r["loss"] for r in run.history] == pytest.approx(losses, abs=1e-9)
    assert difference(run.model(), model) <= 1e-9


#: A loss that couples samples as soon as a parameter has learnt.
GATED = """
import torch
from torch import nn

class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.gate = nn.Linear(10, 16), nn.Linear(16, 4), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.last(self.first(x).relu()) + 0 * self.gate

def gated_step(model, batch):
    outputs = model(batch[0])
    loss = nn.functional.cross_entropy(outputs, batch[1]) - model.gate
    return loss + torch.cdist(outputs, outputs).amax(1).mean() if float(model.gate.detach().sum()) > 0.17 else loss
"""


def test_a_run_that_goes_on_is_checked_with_the_weights_with_which_it_begins(session: Session) -> None:
    session.ensure(2)
    session.orch.set_mode("zero", path="relay", zero_stage=3)
    options = {"model": "Gated", "step": "gated_step", "optimizer": "SGD", "optimizer_args": {"lr": 0.05}}
    first = session.train(loader(), 1, GATED, **options)
    assert first.check is not None and first.check["outcome"] == "same"
    second = session.train(loader(), 1, GATED, fresh=False, **options)
    assert second.check is not None and second.check["causes"] == ["coupled"] and "step" not in second.check


def caught_in_a_step(session: Session, mode: str, settings: dict[str, Any]) -> tuple[Worker, Run]:
    """The second of two workers, in a forward of the third step or a later one; and the run."""
    caught = session.ensure(2)[1]
    caught.trap("forward", 9 if mode != "pipeline" else 16)
    run = train(session, mode, loader(), epochs=3, detach=True, settings=settings)
    caught.wait_trapped()
    return caught, run


@pytest.mark.parametrize(("mode", "settings"), [("zero", {"zero_stage": 2}), ("pipeline", {}), ("tensor", {})])
def test_a_lost_rank_ends_the_step_and_another_takes_its_place(
    session: Session, mode: str, settings: dict[str, Any]
) -> None:
    victim, run = caught_in_a_step(session, mode, settings)
    os.kill(victim.pid, signal.SIGKILL)
    killed = time.monotonic()
    eventually(lambda: run.status().state == "waiting", 15, "the others give the step up")
    assert time.monotonic() - killed <= 15
    assert victim.name in "\n".join(session.orch.status().notes)
    session.workers.append(Worker(session, f"spare-{mode}", False))
    session.assert_undisturbed(run, Plain(session.folder, loader()).epochs(3))
    assert run.generations >= 2


def test_a_stage_killed_behind_a_rounded_boundary_costs_nothing_and_a_resume_is_exact(
    session: Session, tmp_path: Path
) -> None:
    """Messages are functions of what is sent, so a step that is done again, or after a resume, is the same bit for bit."""
    session.ensure(2)
    rounded: dict[str, Any] = {"wire": "int8", "settings": {"micro_batches": 2}}
    whole = train(session, "pipeline", loader(), epochs=3, **rounded)
    assert whole.wait(60) and any("from stage to stage as int8" in note for note in session.orch.status().notes)
    assert difference(whole.model(), Plain(session.folder, loader()).epochs(3).model) > 1e-6

    victim = session.ensure(2)[1]
    victim.trap("forward", 10)
    run = train(session, "pipeline", loader(), epochs=3, detach=True, **rounded)
    victim.wait_trapped()
    os.kill(victim.pid, signal.SIGKILL)
    session.workers.append(Worker(session, "spare-rounded", False))
    assert run.wait(60) and run.generations >= 2
    assert (run.lost_samples, run.duplicated_samples) == (0, 0) and len(run.history) == len(whole.history) == 12
    assert difference(run.model(), whole.model()) == 0

    path = tmp_path / "middle.pt"
    train(session, "pipeline", loader(), epochs=3, max_steps=6, **rounded)
    session.orch.save_checkpoint(path)
    rest = train(session, "pipeline", loader(), epochs=3, resume=path, **rounded)
    assert len(rest.history) == 6 and difference(rest.model(), whole.model()) == 0


class WaitsForAll:
    """A callback that holds the run after two steps of a smaller mesh, until `count` workers are here."""

    def __init__(self, session: Session, count: int) -> None:
        self.session, self.count = session, count
        self.holds, self._steps = threading.Event(), 0

    def on_step(self, run: Run, record: dict[str, Any]) -> None:
        self._steps += run.generations > 1
        if self._steps == 2:
            self.holds.set()
            eventually(lambda: len(self.session.ready()) == self.count, 60, "the place is taken again")


@pytest.mark.parametrize("settings", [{"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}], ids=["tensor", "pipeline"])
def test_a_mesh_goes_on_with_one_replica_fewer_and_takes_it_back(
    session: Session, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """The first rank is killed, which handed over the state until then: the other replica has all of it."""
    monkeypatch.setattr(membership, "BUILD_S", 60.0)
    victim, waits = session.ensure(4)[0], WaitsForAll(session, 4)
    victim.trap("forward", 9 if "tp" in settings else 16)
    run = train(session, "hybrid", loader(), epochs=4, detach=True, settings=settings, callbacks=[waits])
    victim.wait_trapped()
    os.kill(victim.pid, signal.SIGKILL)
    assert waits.holds.wait(60), "the run goes on with three workers"
    session.workers.append(Worker(session, f"back-{session._number}-{len(settings)}", False))
    session.assert_undisturbed(run, Plain(session.folder, loader()).epochs(4))
    notes = "\n".join(session.orch.status().notes)
    assert "the run goes on with 1 of 2 replicas" in notes and "all 2 replicas take part again" in notes
    assert run.generations == 3 and run.losses == [], "no step but the one in work was done again"


@pytest.mark.parametrize(("mode", "settings"), [("zero", {"zero_stage": 3}), ("pipeline", {}), ("tensor", {})])
def test_a_rank_that_leaves_hands_over_first_and_no_step_is_done_twice(
    session: Session, mode: str, settings: dict[str, Any]
) -> None:
    leaver, run = caught_in_a_step(session, mode, settings)
    leaver.handle.leave()
    leaver.release()
    assert leaver.handle.wait(20)
    eventually(lambda: run.status().state == "waiting", 15, "the run waits for another one")
    assert f"goes on by itself from step {len(run.history)}:" in run.status().message and run.history
    session.workers.append(Worker(session, f"successor-{mode}", False))
    session.assert_undisturbed(run, Plain(session.folder, loader()).epochs(3))
    assert leaver.handle.status().state == "left" and run.generations >= 2


def test_a_rank_lost_while_the_next_group_forms_costs_one_more_group(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second group breaks before it has the snapshot: data and history go back all the same. A spare had built the run."""
    forms, calls = GroupReplicaSet._try_to_form, []

    def breaks_once(replica_set: GroupReplicaSet, job: Any, members: Any) -> Any:
        calls.append(members)
        if len(calls) == 2:
            raise GroupLost("a member was lost while the group formed")
        return forms(replica_set, job, members)

    monkeypatch.setattr(GroupReplicaSet, "_try_to_form", breaks_once)
    victim = session.ensure(2)[1]
    victim.trap("forward", 7)
    run = train(session, "zero", loader(), epochs=12, detach=True, settings={"zero_stage": 2})
    victim.wait_trapped()
    session.workers.append(Worker(session, "spare-twice", False))
    eventually(lambda: len(session.ready()) == 3, 60, "the spare is here")
    begun = len(run.history)
    victim.release()
    eventually(lambda: len(run.history) > begun, 20, "the run goes on")
    victim.trap("forward", 40)
    victim.wait_trapped()
    job = session.orch._job
    assert job is not None
    eventually(lambda: len(job.replica_set.prepared()) == 3, 60, "the spare has built the run while the others trained")
    os.kill(victim.pid, signal.SIGKILL)
    session.assert_undisturbed(run, Plain(session.folder, loader()).epochs(12))
    assert len(calls) == 3 and run.generations == 3


@pytest.mark.parametrize("mode", ["data", "zero", "pipeline"])
def test_an_interrupt_in_a_long_step_costs_nothing(session: Session, tmp_path: Path, mode: str) -> None:
    """Nobody can hand the state over while the step holds; it is there when the step is over."""
    victims = session.ensure(2)
    calls = 7 if mode != "pipeline" else 2 * 4 * 2 + 1  # blocks of one stage x micro-batches x two steps, and one more
    held = victims[:1] if mode == "pipeline" else victims  # the next stage waits for the first one
    for worker in held:
        worker.trap("forward", calls)
    run = train(session, mode, loader(), epochs=3, detach=True)
    for worker in held:
        worker.wait_trapped()
    committed = len(run.history)
    assert committed >= 1
    job = session.orch._job
    assert job is not None
    job.plan.interrupt_grace_s = 0.5  # the run's own patience; the test does not wait for the real one
    run.stop()
    assert run.wait(30) and run.state == "stopped" and len(run.history) == committed
    with pytest.raises(WorkerLost, match="still in work there. Nothing is lost"):
        fetch_between_runs(session.orch._replica_sets.trained, session.orch._open_cluster(), 0.5)
    for worker in held:
        worker.release()
    session.orch.save_checkpoint(tmp_path / "after.pt")
    plain = Plain(session.folder, loader()).epochs(3, limit=committed)
    assert difference(run.model(), plain.model) <= 1e-9
    assert session.orch.validate(DataLoader(data(), 30))["samples"] == 101


#: A user's own optimizer that raises in a step, after it has changed the parameters, where a file tells it to.
OWN_OPTIMIZER = """

class Own(torch.optim.AdamW):
    done = 0

    def step(self, closure=None):
        super().step(closure)
        self.done += 1
        if (FOLDER / f"{{os.getpid()}}.json").exists() and self.done == 6:
            raise ValueError("the optimizer is cursed")


def Schedule(optimizer):
    def factor(step):
        if (FOLDER / f"{{os.getpid()}}.json").exists() and step == 6:
            raise ValueError("the schedule is cursed")
        return 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
""".replace("{{", "{").replace("}}", "}")


@pytest.mark.parametrize(("where", "cause"), [("all", "optimizer"), ("one", "optimizer"), ("one", "schedule")])
@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("zero", {"zero_stage": 1}),
        ("zero", {"zero_stage": 3}),
        ("pipeline", {}),
        ("tensor", {}),
        ("data", {"path": "direct"}),
    ],
    ids=str,
)
def test_an_error_while_a_step_is_applied_leaves_a_whole_state(
    session: Session, mode: str, settings: dict[str, Any], where: str, cause: str
) -> None:
    """Where it fails on one rank only, the others take their step back; of whole replicas that vote the other one holds it."""
    workers = session.ensure(2)
    for worker in workers if where == "all" else workers[1:]:
        worker.trap("applied", 0, "nothing")
    chosen = {"optimizer": "Own"} if cause == "optimizer" else {"optimizer": "AdamW", "scheduler": "Schedule"}
    with pytest.raises(RemoteError, match=f"the {cause} is cursed"):
        train(session, mode, loader(), epochs=3, settings=settings, more=OWN_OPTIMIZER, **chosen)
    for worker in workers:
        worker.release()
    run = session.orch.run
    assert run is not None
    counted = 6 if cause == "schedule" or (mode, where) == ("data", "one") else 5
    assert len(run.history) == counted
    plain = Plain(session.folder, loader()).epochs(3, limit=counted)
    assert max(abs(one["loss"] - loss) for one, loss in zip(run.history, plain.losses, strict=True)) <= 1e-12
    assert difference(run.model(), plain.model) <= 1e-9
    assert session.orch.validate(DataLoader(data(), 30))["samples"] == 101
    again = train(session, mode, loader(), epochs=1, settings=settings, more=OWN_OPTIMIZER, fresh=False, **chosen)
    assert again.state == "done" and len(again.history) == 4


@pytest.mark.parametrize("mode", ["zero", "pipeline", "tensor"])
def test_a_failed_run_leaves_workers_that_validate(session: Session, mode: str) -> None:
    session.ensure(2)
    wrong = [(torch.zeros(8, 10, dtype=torch.float64), torch.zeros(8, dtype=torch.int64)),
             (torch.zeros(8, 3, dtype=torch.float64), torch.zeros(8, dtype=torch.int64))]  # fmt: skip
    with pytest.raises(RemoteError, match="cannot be multiplied"):
        train(session, mode, wrong)
    for _ in range(2):
        assert session.orch.validate(DataLoader(data(), 30))["samples"] == 101


def test_checkpoints_go_from_mode_to_mode(session: Session, tmp_path: Path) -> None:
    session.ensure(2)
    plain = Plain(session.folder, loader())
    path = None
    batches = loader()
    for number, (mode, settings) in enumerate(
        [("pipeline", {}), ("zero", {"zero_stage": 3}), ("data", {}), ("tensor", {}), ("zero", {"zero_stage": 1})]
    ):
        run = train(session, mode, loader(), epochs=number + 1, settings=settings, resume=path, fresh=path is None)
        path = session.orch.save_checkpoint(tmp_path / f"{mode}-{number}.pt")
        plain.epochs(1)
        assert difference(run.model(), plain.model) <= 1e-9, mode
        assert len(run.history) == 4
    content = torch.load(path, weights_only=True)
    fresh = Plain(session.folder, batches)
    fresh.model.load_state_dict(content["model"])
    fresh.optimizer.load_state_dict(content["optimizer"])
    assert difference(fresh.model, plain.model) <= 1e-9


def test_an_interrupt_stops_at_a_commit_and_the_next_run_goes_on(session: Session) -> None:
    session.ensure(2)

    class Stop:
        def on_step(self, run: Run, record: dict[str, Any]) -> bool:
            return bool(record["step"] == 6)

    batches = DataLoader(data(), batch_size=32)
    run = train(session, "pipeline", batches, epochs=50, callbacks=[Stop()])
    assert run.state == "stopped" and 6 <= len(run.history) <= 8
    plain = Plain(session.folder, batches).epochs(50, limit=len(run.history))
    assert difference(run.model(), plain.model) <= 1e-9
    again = train(session, "zero", batches, epochs=1, fresh=False, settings={"zero_stage": 2})
    assert difference(again.model(), plain.epochs(1).model) <= 1e-9


@pytest.mark.parametrize("mode", ["zero", "pipeline", "tensor"])
def test_errors_of_user_code_and_nan_end_the_run_and_workers_stay(session: Session, mode: str) -> None:
    workers = session.ensure(2)
    workers[1].trap("forward", 5, "raise")
    with pytest.raises(RemoteError, match=r"this batch is cursed"):
        train(session, mode, loader())
    workers[1].release()
    bad = loader()
    bad.dataset.tensors[0][40] = float("nan")
    with pytest.raises(NotFinite, match=r"was not applied anywhere"):
        train(session, mode, bad)
    plain = Plain(session.folder, loader()).epochs(1)
    session.assert_undisturbed(train(session, mode, loader(), epochs=1), plain)
    assert session.ready() == [w.name for w in workers]


def test_what_cannot_be_spread_is_refused_before_training(session: Session) -> None:
    session.ensure(2)
    with pytest.raises(ConfigError, match=r"dp 2 x pp 2 x tp 1 needs 4 workers, 2 are here"):
        train(session, "hybrid", loader(), settings={"dp": 2, "pp": 2})
    with pytest.raises((ConfigError, PreparationError), match=r"18"):
        train(session, "pipeline", loader(), settings={"pipeline_schedule": "interleaved", "stages_per_worker": 9})
    with pytest.raises(ConfigError, match=r"optimizer_site"):
        train(session, "tensor", loader(), optimizer_site="orchestrator")
    session.assert_undisturbed(train(session, "data", loader(), epochs=1), Plain(session.folder, loader()).epochs(1))


@pytest.mark.parametrize("mode", ["zero", "tensor", "pipeline"])
def test_dropout_repeats_from_the_seed(session: Session, mode: str) -> None:
    session.ensure(2)
    losses = []
    for seed in (3, 3, 4):
        run = train(session, mode, DataLoader(data(), 25), epochs=1, seed=seed, model_args={"dropout": 0.5})
        losses.append([record["loss"] for record in run.history])
    assert losses[0] == losses[1] != losses[2]


#: The deep net without anything that a run changes outside of the state.
STILL = """
import torch
from torch import nn

def Still():
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))
"""
ROWS_IN_A_ROW = [
    ("data", {"path": "direct"}),
    ("zero", {"zero_stage": 1}),
    ("zero", {"zero_stage": 3}),
    ("tensor", {"tensor_plan": {"0": "colwise", "2": "rowwise"}}),
    ("pipeline", {"micro_batches": 2}),
]


def test_runs_in_a_row_go_on_with_the_group_that_stands_in_one_mode_after_another(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mode goes on from the one before it, and then once more from what its own ranks hold."""
    session.ensure(2)
    monkeypatch.setattr("guava_nb.training.job.MOST_FETCHED_BYTES", -1)
    monkeypatch.setattr("guava_nb.orchestrator.left_state.COPY_AFTER_S", 1e5)
    exec(STILL, namespace := {})
    torch.manual_seed(0)
    model = namespace["Still"]().double()  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for mode, settings in ROWS_IN_A_ROW:
        session.orch.set_mode(mode, **{"path": "relay", **settings})
        for again in (False, True):
            fresh = mode == "data" and not again
            options = {
                "model": "Still",
                "criterion": "CrossEntropyLoss",
                "fresh": fresh,
                "check": "off",
            }  # it would fetch weights
            run = session.train(loader(), 1, STILL, **options)
            for x, y in loader():
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            wire = run.report()["wire"]
            replicas = session.orch._replica_sets.trained
            assert replicas is not None and (replicas.after is not None) == again
            assert not again or wire["parameter_bytes"] < 4000, "no state moved"
        assert difference(run.model(), model) <= 1e-9, mode


HIDDEN = """
import torch
from torch import nn

class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.scale.mul_(1.05)
        return x * self.scale

def Hidden():
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), Growing(), nn.Linear(16, 4))
"""


def test_a_buffer_outside_the_state_dict_goes_from_mode_to_mode_and_to_the_user(session: Session) -> None:
    """Training changes it: the model that comes back has it, and the next run goes on from it."""
    session.ensure(2)
    exec(HIDDEN, namespace := {})
    torch.manual_seed(0)
    model = namespace["Hidden"]().double()  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    modes = [(mode, {"micro_batches": 1} if mode == "pipeline" else settings) for mode, settings in ROWS_IN_A_ROW]
    for mode, settings in modes:
        session.orch.set_mode(mode, **{"path": "relay", **settings})
        run = session.train(loader(), 1, HIDDEN, model="Hidden", criterion="CrossEntropyLoss", fresh=mode == "data")
        for x, y in loader():
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        trained = run.model()
        assert float(trained[3].scale) == pytest.approx(float(model[3].scale), abs=1e-12), mode
        assert difference(trained, model) <= 1e-9, mode


NORMS = """
from torch import nn

def Normed():
    first, bare = nn.BatchNorm1d(16), nn.BatchNorm1d(16, track_running_stats=False)
    return nn.Sequential(nn.Linear(10, 16), first, nn.Tanh(), nn.Linear(16, 16), bare, nn.Linear(16, 4))
"""


@pytest.mark.parametrize("stage", [1, 3])
def test_a_worker_without_rows_stands_in_for_batch_norms_too(session: Session, stage: int) -> None:
    session.ensure(2)
    exec(NORMS, namespace := {})
    torch.manual_seed(0)
    model = namespace["Normed"]().double()  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session.orch.set_mode("zero", path="relay", zero_stage=stage)
    options = {"model": "Normed", "criterion": "CrossEntropyLoss", "fresh": True, "shares": [1, 0]}
    trained = session.train(loader(), 1, NORMS, **options).model()
    for x, y in loader():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert difference(trained, model) <= 1e-9
    assert torch.allclose(trained[1].running_var, model[1].running_var, rtol=0, atol=1e-12)
