"""Three worker processes on this machine train what an orchestrator shares with them, over TCP and TLS."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from guava_nb import DistributedConfig, Orchestrator
from guava_nb.cluster.job import Job
from guava_nb.errors import ConfigError, PreparationError, RemoteError, SourceError
from guava_nb.training.run import Run
from tests.support.processes import CELL, PlainTraining, Session, data, difference, eventually, loader


def plain(three: Session, batches: Any, **changes: Any) -> PlainTraining:
    return PlainTraining(three.folder, batches, **changes)


# ---------------------------------------------------------------------------------------------------- shared cells


def test_a_class_that_was_redefined_is_used_from_the_next_run_on(three: Session) -> None:
    cell = CELL.format(folder=str(three.folder))
    first = three.train(loader(), epochs=1)
    wider = three.train(loader(), epochs=1, cell=cell.replace("width=16", "width=24"))
    assert first.model().state_dict()["first.weight"].shape == (16, 10)
    assert wider.model().state_dict()["first.weight"].shape == (24, 10)
    # Same cells, same model: a further run goes on where this one ended, unless it is told to start anew.
    more = three.train(loader(seed=3), epochs=1, cell=cell.replace("width=16", "width=24"), fresh=False)
    assert sum(worker["samples"] for worker in more.report()["workers"]) == 101  # of this run, not of the session
    own = [worker.handle for worker in three.workers]
    eventually(lambda: sum(w.status().figures.samples for w in own) == 101, 10, "each worker knows what it did itself")
    assert all(w.status().figures.out_bytes > 0 and w.status().figures.step_s for w in own)
    oracle = plain(three, loader(), width=24).epochs(1)
    oracle.batches = loader(seed=3)
    assert difference(more.model(), oracle.epochs(1).model) <= 1e-9
    assert any("goes on from the weights of the last run; --fresh" in note for note in three.orch.status().notes)
    # What a run begins with is said, also where it is not what was trained before.
    three.train(loader(), epochs=1, cell=cell.replace("width=16", "width=24"), fresh=False, optimizer="SGD")
    assert any("of the last run with a new optimizer" in note for note in three.orch.status().notes)
    with pytest.raises(
        ConfigError, match="throw away what the last one trained in 4 steps: shared cell net changed since"
    ):
        three.train(loader(), epochs=1, fresh=False)


def test_an_import_that_workers_lack_is_refused_before_training(
    three: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_at_home_xyz.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    cell = "import only_at_home_xyz\n" + CELL.format(folder=str(three.folder))
    with pytest.raises(PreparationError) as caught:
        three.train(loader(), cell=cell)
    [line] = str(caught.value).splitlines()  # one problem, and all who have it
    names, _, problem = line.partition(" cannot import 'only_at_home_xyz'")
    assert sorted(names.split(", ")) == sorted(three.ready())
    assert f"{tmp_path / 'only_at_home_xyz.py'} here, and in no package index" in problem
    assert "%pip" not in problem
    assert three.orch.run is not None and three.orch.run.history == []
    assert three.train(loader(), epochs=1).state == "done"  # nobody was hurt


def test_a_name_that_exists_only_in_the_notebook_is_refused_at_once(three: Session) -> None:
    cell = CELL.format(folder=str(three.folder)).replace("return loss *", "return scale * loss *")
    before = three.orch.run
    with pytest.raises(SourceError, match=r"name 'scale' is used in cell 'net'.*%%guava_share"):
        three.train(loader(), cell=cell)
    assert three.orch.run is before

    class Here(torch.nn.Linear):
        pass

    three.orch.share(CELL.format(folder=str(three.folder)), "net")
    with pytest.raises(SourceError, match=r"Here.*exists only here.*%%guava_share"):
        three.orch.register_model(Here)
    with pytest.raises(ConfigError, match="argument 'device' is a device"):
        three.orch.register_model("Net", {"device": torch.device("cpu")})


def test_an_error_in_shared_code_comes_back_with_cell_and_line(three: Session) -> None:
    victim = three.workers[1]
    victim.trap("forward", 2, "raise")
    with pytest.raises(RemoteError, match=f"worker {victim.name} raised ValueError: this batch is cursed") as caught:
        three.train(loader())
    cell = CELL.format(folder=str(three.folder)).splitlines()
    number = next(k for k, line in enumerate(cell, 1) if "this batch is cursed" in line)
    trace = caught.value.remote_traceback
    assert f"File \"<cell 'net'>\", line {number}, in trap" in trace
    assert 'raise ValueError("this batch is cursed")' in trace  # the line's text as well
    three.ensure(3)
    assert three.train(loader(), epochs=1).state == "done"


@pytest.mark.parametrize("shares", [None, (1, 0, 0)])
def test_an_error_in_the_user_s_schedule_costs_no_worker(three: Session, shares: tuple[int, ...] | None) -> None:
    def cell(spared: int) -> str:
        return CELL.format(folder=str(three.folder)) + (
            "\ndef schedule(optimizer):\n"
            "    def rate(step):\n"
            f"        return 1.0 if step < 3 or os.getpid() == {spared} else 1 / 0\n"
            "    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)\n"
        )

    with pytest.raises(
        ConfigError, match=r"fails after optimizer step 3 of the 8 .*ZeroDivisionError: division by zero"
    ):
        three.train(loader(), cell=cell(0), scheduler="schedule", shares=shares)
    # Tried beforehand it is right here, and fails at the workers all the same.
    with pytest.raises(RemoteError, match=r"worker w\d+ raised ZeroDivisionError: division by zero") as caught:
        three.train(loader(), cell=cell(os.getpid()), scheduler="schedule", shares=shares)
    assert "in rate" in caught.value.remote_traceback
    run = three.orch.run
    assert run is not None and len(run.history) == 3
    assert difference(run.model(), PlainTraining(three.folder, loader()).epochs(limit=3).model) <= 1e-9
    three.ensure(3)
    assert three.train(loader(), epochs=1).state == "done"


def test_printed_lines_arrive_with_names_and_a_flood_is_cut_but_kept_on_disk(three: Session) -> None:
    victim = three.workers[2]
    name = victim.name
    # A line that is not ended when the worker reports its state: neither may get lost.
    cell = CELL.format(folder=str(three.folder)) + "\nprint('a module was built', end='')\n"
    victim.trap("forward", 2, "print", lines=10_000)
    three.train(loader(), epochs=1, cell=cell)
    victim.trap("forward", 2, "print", lines=1)
    three.train(loader(), epochs=1, cell=cell)
    lines = eventually(
        lambda: "lines left out" in "\n".join(three.orch.log(name, 5000)) and three.orch.log(name, 5000),
        20,
        "the gap is told",
    )
    assert lines.count("a module was builtline 0") == 2
    here = [line for line in lines if line.startswith("line ")]
    assert 300 <= len(here) < 3000 and here[0] == "line 1"
    assert any(line.startswith(f"{name} | line ") for line in three.orch.log(n=5000))
    files = list(three.orch.log_folder.glob(f"worker-{name}-*.log"))
    assert len(files) == 1
    kept = files[0].read_text().splitlines()
    assert [line for line in kept if line.startswith("line ")] == [f"line {k}" for k in range(1, 10_000)]
    assert not [line for line in kept if "\x1e" in line]
    assert (three.orch.log_folder / f"{name}.log").exists()
    eventually(lambda: victim.handle.status().state == "ready", 10, "its state is known")


# --------------------------------------------------------------------------------------------------- ways to train


def test_bf16_learns_like_float32(three: Session) -> None:
    run = three.train(loader(dtype=torch.float32), precision="bf16")
    losses = plain(three, loader(dtype=torch.float32), dtype=torch.float32).epochs(2).losses
    assert [record["loss"] for record in run.history] == pytest.approx(losses, abs=0.03)
    assert next(run.model().parameters()).dtype == torch.float32


def loss_scales(three: Session) -> list[float]:
    """The scale in each worker's own scaler."""
    replica_set, job = three.orch._replica_sets.trained, Job(three.orch._cluster)  # type: ignore[arg-type]
    assert replica_set is not None
    replica_set.attach(job)
    with job.attached():
        ranks = replica_set.in_step(job)
        states = [replica_set._fetch_from(job, rank, 20) for rank in ranks]
    return [state["scaler"]["scale"] for state in states if state is not None]


def test_an_overflow_on_one_worker_is_skipped_by_all(three: Session) -> None:
    three.workers[0].trap("loss", 3, "inf")
    run = three.train(
        loader(dtype=torch.float32), precision="fp16", optimizer="SGD", optimizer_args={"lr": 0.1}, epochs=2
    )
    assert [record["step"] for record in run.history if record["skipped"]] == [3]
    assert loss_scales(three) == [32768.0] * 3
    assert "parameters differ" not in " ".join(three.orch.status().notes)
    oracle = plain(three, loader(dtype=torch.float32), dtype=torch.float32, optimizer="SGD", optimizer_args={"lr": 0.1})
    step, calls = oracle.optimizer.step, [0]

    def skip_third(*args: Any) -> Any:
        calls[0] += 1
        return None if calls[0] == 3 else step(*args)

    oracle.optimizer.step = skip_third  # type: ignore[method-assign]
    assert difference(run.model(), oracle.epochs(2).model) <= 2e-3


@pytest.mark.parametrize("site", ["workers", "orchestrator"])
def test_accumulation_with_a_tail_that_does_not_divide(three: Session, site: str) -> None:
    run = three.train(loader(101, 16), epochs=2, accumulation_steps=3, optimizer_site=site)
    oracle = plain(three, [])
    batches = loader(101, 16)
    losses = []
    for _ in range(2):
        rows = list(batches)
        for start in range(0, len(rows), 3):
            group = rows[start : start + 3]
            whole = (torch.cat([x for x, _ in group]), torch.cat([y for _, y in group]))
            oracle.batches = [whole]
            oracle.epochs(1)
            losses.append(oracle.losses[-1])
    assert [len(group) for group in (losses, run.history)] == [6, 6]
    assert [record["loss"] for record in run.history] == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), oracle.model) <= 1e-9
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)


def test_the_master_copy_of_the_orchestrator_trains_the_same(three: Session) -> None:
    run = three.train(loader(), optimizer_site="orchestrator", max_grad_norm=1e9)
    three.assert_undisturbed(run, plain(three, loader()).epochs(2))
    assert run.wire.parameter_bytes > run.wire.gradient_bytes > 0


class Diary:
    """Notes every call; stops the run at a validation."""

    def __init__(self, stop_at: int) -> None:
        self.stop_at = stop_at
        self.calls: list[str] = []

    def on_step(self, run: Run, record: dict[str, Any]) -> None:
        self.calls.append(f"step {record['step']}")

    def on_epoch(self, run: Run, record: dict[str, Any]) -> None:
        self.calls.append(f"epoch {record['epoch']} of {record['samples']}")

    def on_validation(self, run: Run, record: dict[str, Any]) -> bool:
        self.calls.append(f"validation after {record['step']}")
        return record["step"] >= self.stop_at


def test_a_callback_stops_the_run_early(three: Session) -> None:
    diary = Diary(stop_at=6)
    held_out = DataLoader(data(50), batch_size=20)
    run = three.train(loader(), epochs=9, val_loader=held_out, val_interval=3, callbacks=[diary])
    assert run.state == "stopped"
    assert diary.calls == [
        "step 1", "step 2", "step 3", "validation after 3", "step 4", "epoch 1 of 101", "step 5", "step 6",
        "validation after 6",
    ]  # fmt: skip
    oracle = plain(three, loader()).epochs(9, limit=6)
    assert difference(run.model(), oracle.model) <= 1e-9
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)
    x, y = data(50).tensors
    with torch.no_grad():
        expected = float(torch.nn.functional.cross_entropy(oracle.model.eval()(x), y))
    assert run.validations[-1]["loss"] == pytest.approx(expected, abs=1e-12)
    assert run.validations[-1]["samples"] == 50


def test_a_plateau_scheduler_follows_the_validation(three: Session) -> None:
    settings = {"factor": 0.5, "patience": 0, "threshold": 0.5}
    held_out = DataLoader(data(50), batch_size=20)
    run = three.train(
        loader(), epochs=4, val_loader=held_out, optimizer_args={"lr": 0.02}, scheduler="ReduceLROnPlateau",
        scheduler_args=settings, scheduler_interval="validation",
    )  # fmt: skip
    oracle = plain(three, loader(), optimizer_args={"lr": 0.02})
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(oracle.optimizer, **settings)  # type: ignore[arg-type]
    x, y = data(50).tensors
    for _ in range(4):
        oracle.epochs(1)
        with torch.no_grad():
            schedule.step(float(torch.nn.functional.cross_entropy(oracle.model.eval()(x), y)))
    assert schedule.get_last_lr() == [0.02 * 0.5**3]
    assert difference(run.model(), oracle.model) <= 1e-9


def test_validate_and_a_further_run_find_the_workers_as_they_are(three: Session) -> None:
    run = three.train(loader(), epochs=1)
    score = three.orch.validate(DataLoader(data(50), batch_size=7))
    x, y = data(50).tensors
    with torch.no_grad():
        outputs = run.model().eval()(x)
    assert score["samples"] == 50
    assert score["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, y)), abs=1e-12)
    assert score["accuracy"] == pytest.approx(float((outputs.argmax(1) == y).double().mean()))


# ---------------------------------------------------------------------------------------------------------- the end


def test_nothing_is_left_after_close_in_the_middle_of_a_run(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    orch = Orchestrator(DistributedConfig(num_workers=1, precision="fp64"))
    port = orch.open().port
    orch.launch_workers(1)
    orch.wait_for_workers(timeout=60)
    orch.share(CELL.format(folder=str(tmp_path)), "net")
    orch.register_model("Net")
    seen = threading.Event()

    class Seen:
        def on_step(self, run: Run, record: dict[str, Any]) -> None:
            seen.set()

    run = orch.start_training(loader(), num_epochs=10_000, criterion="loss_fn", detach=True, callbacks=[Seen()])
    assert seen.wait(30)
    orch.close()
    assert run.done and run.state == "stopped"
    assert {child.pid for child in psutil.Process().children(recursive=True)} == children
    left = [t for t in threading.enumerate() if t not in threads and t.name.startswith("guava")]
    eventually(lambda: not [t for t in left if t.is_alive()], 5, f"threads end: {left}")
    listening = {c.laddr.port for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert port not in listening
    orch.close()  # again is fine


def test_tasks_and_tokens_of_the_user_s_code_come_back(three: Session) -> None:
    cell = CELL.format(folder=str(three.folder)).replace(
        "hidden = torch.relu(self.first(x))",
        "with energy_task('whole'), energy_task('first layer'):\n            hidden = torch.relu(self.first(x))",
    )
    cell = "from guava_nb import energy_task\n" + cell + "\ndef tokens_of(batch):\n    return batch[0].numel()\n"
    seen: list[Any] = []

    class Watch:
        def on_epoch(self, run: Run, record: dict[str, Any]) -> None:
            seen.append(run.energy_record())

    run = three.train(loader(), epochs=2, cell=cell, tokens="tokens_of", callbacks=[Watch()])
    oracle = plain(three, loader()).epochs(2)
    assert difference(run.model(), oracle.model) <= 1e-9  # naming and counting change nothing
    record = run.energy_record()
    assert [step["tokens"] for step in run.history] == [320, 320, 320, 50] * 2
    assert record["tokens"] == 2 * 101 * 10 and run.report()["tokens"] == record["tokens"]
    assert [row["tokens"] for row in record["workers"]] == [10 * row["samples"] for row in record["workers"]]
    assert sum(row["samples"] for row in record["workers"]) == 2 * 101
    assert seen[0]["workers"][0]["samples"] > 0  # while it goes on too
    assert {row["task"] for row in record["tasks"]} == {"whole", "first layer"}
    assert {row["worker"] for row in record["tasks"]} == set(three.ready())
    for row in record["tasks"]:
        assert row["times"] == len(run.history) and 0 < row["seconds"] < record["seconds"] and row["joules"] is None
    assert record["j_per_token"] is None  # no sensor is read on these machines, and nothing is guessed
    again = three.train(loader(), epochs=1)
    assert again.energy_record()["tasks"] == [] and again.energy_record()["tokens"] is None
    assert run.energy_record()["workers"] == record["workers"]  # what is over is not counted anew
    with pytest.raises(ConfigError, match=r"tokens 'tokens_of' returned a tensor of shape \(.*one number"):
        three.train(loader(), cell=cell.replace("batch[0].numel()", "batch[0].sum(1)"), tokens="tokens_of")
