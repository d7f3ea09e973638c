"""Checkpoints between processes, and interrupts of a script: state is always that of a commit."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from guava_nb.errors import CheckpointError, ConfigError
from guava_nb.training.run import Run
from tests.support.console import Console
from tests.support.processes import CELL, PlainTraining, Session, data, difference, eventually, loader

SCRIPT = """
import os, torch
from pathlib import Path
from tests.support.processes import CELL, Session, loader, data
from torch.utils.data import DataLoader

folder = Path({folder!r})
session = Session(folder, num_workers=2, interrupt_grace_s=1.5, grace_s=10)
workers = session.ensure(2)
in_order = DataLoader(data(), batch_size=32)

class Tell:
    def on_step(self, run, record):
        print("step", record["step"], flush=True)

def outcome(run):
    torch.save(run.model().state_dict(), folder / "model.pt")
    losses = [record["loss"] for record in run.history]
    return [run.state, losses, run.lost_samples, run.duplicated_samples, sorted(session.ready())]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("script")


@pytest.fixture(scope="module")
def script(folder: Path) -> Iterator[Console]:
    """Another process that orchestrates two workers of its own."""
    with Console() as console:
        console.run(SCRIPT.format(folder=str(folder)))
        yield console
        console.run("session.close()")
        left = "without_servers(psutil.Process().children(recursive=True))"
        assert console.run(f"import psutil; from tests.support.warm import without_servers; answer = {left}") == []


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / "model.pt", weights_only=True)
    return found


# ------------------------------------------------------------------------------------------------------ checkpoints


class StopAt:
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Run, record: dict[str, Any]) -> bool:
        return record["step"] == self.step


#: Dropout as well: its masks depend on how the rows are shared out, so both sides deal to two of their workers.
TWO_OF_THREE = {"shares": (1, 1, 0), "model_args": {"dropout": 0.25}}


@pytest.fixture(scope="module")
def uninterrupted(pool_of_three: Session) -> tuple[list[float], dict[str, torch.Tensor]]:
    pool_of_three.ensure(3)
    run = pool_of_three.train(loader(), epochs=5, **TWO_OF_THREE)
    return [record["loss"] for record in run.history], run.model().state_dict()


@pytest.mark.parametrize("steps", [8, 10])  # of four an epoch: at its end, and in its middle
def test_resuming_in_another_process_equals_the_uninterrupted_run_bit_for_bit(
    three: Session, script: Console, folder: Path, tmp_path: Path,
    uninterrupted: tuple[list[float], dict[str, torch.Tensor]], steps: int,
) -> None:  # fmt: skip
    losses, final = uninterrupted
    path = tmp_path / "half.pt"
    run = three.train(loader(), epochs=5, callbacks=[StopAt(steps)], **TWO_OF_THREE)
    assert [record["loss"] for record in run.history] == losses[:steps]
    assert three.orch.save_checkpoint(path) == path

    content = torch.load(path, weights_only=True)
    assert content["step"] == steps - 1 and content["position"]["samples"] == (101 if steps == 8 else 64)
    plain_model = PlainTraining(three.folder, []).model
    plain_model.load_state_dict(content["model"])
    assert difference(plain_model, run.model()) == 0.0
    plain_optimizer = torch.optim.AdamW(plain_model.parameters())
    plain_optimizer.load_state_dict(content["optimizer"])
    assert plain_optimizer.param_groups[0]["lr"] == 0.01

    state, rest, lost, duplicated, _ = script.run(
        "answer = outcome(session.train(loader(), epochs=5, model_args={'dropout': 0.25}, "
        f"resume={str(path)!r}, fresh=False))"
    )
    assert (state, lost, duplicated) == ("done", 0, 0)
    assert rest == losses[steps:]
    assert all(torch.equal(final[name], value) for name, value in weights(folder).items())


@pytest.mark.parametrize("hook", ["on_step", "on_epoch", "on_validation"])
def test_a_callback_may_save(three: Session, tmp_path: Path, hook: str) -> None:
    path = tmp_path / "best.pt"

    def save(run: Run, record: dict[str, Any]) -> bool:
        three.orch.save_checkpoint(path)
        return hook == "on_step" and record["step"] == 6

    callback = type("Save", (), {hook: staticmethod(save)})()
    held_out = DataLoader(data(50), batch_size=20)
    began = time.monotonic()
    run = three.train(loader(), epochs=2, val_loader=held_out, callbacks=[callback])
    assert time.monotonic() - began < 30
    content = torch.load(path, weights_only=True)
    assert content["step"] == len(run.history) - 1
    saved = PlainTraining(three.folder, []).model
    saved.load_state_dict(content["model"])
    assert difference(saved, run.model()) == 0.0


def test_a_checkpoint_taken_during_the_run_is_that_of_a_commit(three: Session, tmp_path: Path) -> None:
    run = three.train(loader(), epochs=60, detach=True)
    path = three.orch.save_checkpoint(tmp_path / "during.pt")
    content = torch.load(path, weights_only=True)
    run.stop()
    oracle = PlainTraining(three.folder, loader()).epochs(60, limit=content["step"] + 1)
    saved = PlainTraining(three.folder, []).model
    saved.load_state_dict(content["model"])
    assert difference(saved, oracle.model) <= 1e-9
    position = content["position"]
    assert position["epoch"] * 4 + position["batches"] == content["step"] + 1


def test_what_cannot_be_resumed_is_refused(three: Session, tmp_path: Path) -> None:
    run = three.train(loader(), epochs=1)
    path = three.orch.save_checkpoint(tmp_path / "small.pt")
    cell = CELL.format(folder=str(three.folder))
    with pytest.raises(
        CheckpointError, match=r"belongs to another model .*first.weight: \(16, 10\) in the file, \(24, 1"
    ):
        three.train(loader(), cell=cell.replace("width=16", "width=24"), resume=path)
    with pytest.raises(CheckpointError, match=r"not in the file: head.*not in the model: last"):
        three.train(loader(), cell=cell.replace("self.last", "self.head"), resume=path)
    with pytest.raises(CheckpointError, match=r"was made with optimizer AdamW, this run asks for SGD"):
        three.train(loader(), epochs=2, optimizer="SGD", optimizer_args={"lr": 0.1, "momentum": 0.9}, resume=path)
    cut = tmp_path / "cut.pt"
    cut.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match=r"cut\.pt cannot be read as a checkpoint"):
        three.train(loader(), resume=cut)
    with pytest.raises(
        CheckpointError, match=r"there is no checkpoint .*smal\.pt; in .* there are: cut\.pt, small\.pt"
    ):
        three.train(loader(), resume=tmp_path / "smal.pt")
    # A loaded checkpoint is compared with the model that a call names, not with that of the last run.
    three.train(loader(), epochs=1, cell=cell.replace("width=16", "width=24"))
    assert three.orch.load_checkpoint(path) == {"step": 4, "epoch": 1}
    with pytest.raises(CheckpointError, match=r"another model than Net\(dropout=0.5\), the one asked for now"):
        three.train(loader(), epochs=2, cell=cell.replace("self.last", "self.head"), model_args={"dropout": 0.5},
                    fresh=False)  # fmt: skip
    resumed = three.train(loader(), epochs=2, fresh=False)
    assert len(resumed.history) == 4, "the refused call left it loaded"
    assert (resumed.status().step, resumed.status().steps_before) == (4, 4)
    # A refusal leaves nothing behind: the next run starts where it was told to.
    again = three.train(loader(), epochs=1)
    assert difference(again.model(), run.model()) == 0.0


def test_a_new_session_asks_the_model_of_a_checkpoint_without_being_told_which(three: Session, tmp_path: Path) -> None:
    three.train(loader(), epochs=1, model_args={"dropout": 0.25})
    path = three.orch.save_checkpoint(tmp_path / "net.pt")
    expected = three.orch.validate(loader(), progress=False)
    new = Session(three.folder, num_workers=1)
    try:
        new.ensure(1)
        with pytest.raises(
            ConfigError, match=r"no model is named yet: name one of a shared cell on this line, --model"
        ):
            new.orch.validate(loader(), "loss_fn")
        new.orch.load_checkpoint(path)
        with pytest.raises(ConfigError, match=r"named yet \(.*net\.pt was made with Net\(dropout=0\.25\)\): name one"):
            new.orch.validate(loader(), "loss_fn")
        # A name that a shared cell only imports is not called because a file says so.
        new.orch.share("from torch.nn import Linear as Net", "net")
        with pytest.raises(ConfigError, match="no model is named yet"):
            new.orch.validate(loader())
        new.orch.share(CELL.format(folder=str(three.folder)), "net")
        found = new.orch.validate(loader(), "loss_fn", progress=False)
        assert found["samples"] == expected["samples"] and abs(found["loss"] - expected["loss"]) < 1e-12
        # What a run had to say goes when the next one begins; who came stays.
        new.train(loader(), epochs=2, resume=path, fresh=False, optimizer_args={"lr": 0.5},
                  model_args={"dropout": 0.25})  # fmt: skip
        new.orch._open_cluster().notice("something of this run")
        assert "of this run" in " ".join(new.orch.status().notes)
        new.train(loader(), epochs=1)
        (joined,) = new.orch.status().notes
        assert "w1 joined" in joined
    finally:
        new.close()


# -------------------------------------------------------------------------------------------------------- interrupts


@pytest.mark.timeout(150)
def test_interrupts_at_random_points_of_one_script(script: Console, folder: Path) -> None:
    oracle = PlainTraining(folder, DataLoader(data(), batch_size=32))
    dice = random.Random(7)
    for number in range(5):
        step, spins = dice.randint(1, 23), dice.randint(0, 40_000)
        seen = len(script.lines)
        script.start(
            f"answer = outcome(session.train(in_order, epochs=400, callbacks=[Tell()], fresh={number == 0}, progress=True))"
        )
        script.wait_line(rf"step {step}$", since=seen)
        for _ in range(spins):  # somewhere inside a step, each time elsewhere
            pass
        script.interrupt()
        state, losses, lost, duplicated, ready = script.finish(30)
        assert (state, lost, duplicated) == ("stopped", 0, 0)
        assert step <= len(losses) < 1600 and ready == ["w1", "w2"]
        oracle.losses.clear()
        oracle.epochs(400, limit=len(losses))
        assert losses == pytest.approx(oracle.losses, abs=1e-12)
        model = PlainTraining(folder, []).model
        model.load_state_dict(weights(folder))
        assert difference(model, oracle.model) <= 1e-9
    assert "Traceback" not in "\n".join(script.lines)


def test_a_step_that_does_not_end_is_given_up_after_the_grace(script: Console, folder: Path) -> None:
    script.run("workers[1].trap('backward', 3)")
    script.start("answer = outcome(session.train(in_order, epochs=400))")
    eventually(lambda: list(folder.glob("*.reached")), 40, "the worker reaches its trap")
    script.interrupt()
    began = time.monotonic()
    state, losses, lost, duplicated, ready = script.finish(30)
    # 1.5 s for the step, 1.5 s more for the state, which the other worker has.
    assert 1.4 <= time.monotonic() - began <= 8
    assert (state, len(losses), lost, duplicated, ready) == ("stopped", 2, 0, 0, ["w1", "w2"])
    script.run("workers[1].release()")
    state, losses, lost, duplicated, _ = script.run("answer = outcome(session.train(in_order, epochs=1, fresh=False))")
    assert (state, lost, duplicated) == ("done", 0, 0)
    oracle = PlainTraining(folder, DataLoader(data(), batch_size=32)).epochs(1, limit=2).epochs(1)
    model = PlainTraining(folder, []).model
    model.load_state_dict(weights(folder))
    assert losses == pytest.approx(oracle.losses[2:], abs=1e-12)
    assert difference(model, oracle.model) <= 1e-9
