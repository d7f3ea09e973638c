"""What a run notes for the process that follows: places after each step, whatever was cut off."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from guava_nb.errors import CheckpointError
from guava_nb.orchestrator.run_record import LastRun, RunRecord
from guava_nb.protocol.messages import Factory, RoundSpec, RunSpec
from guava_nb.training.plan import Position

SPEC = RunSpec(model=Factory("Net"), criterion=Factory("MSELoss"), step=None, optimizer=Factory("SGD"), scheduler=None)
BEGINNING = Position()


def feed(epoch: int, batches: int) -> dict[str, Any]:
    return {"version": 1, "epoch": epoch, "batches": batches, "start": {"torch": "start"}, "now": {"torch": "now"}}


def recorded(path: Path, steps: int, at: Position = BEGINNING, first: int = 0) -> RunRecord:
    record = RunRecord(path, "run-3", SPEC)
    for step in range(first, first + steps):
        record.issued(step, at, 2, 16, lambda: feed(at.epoch, at.batches), step)
    return record


def test_nothing_is_read_where_nothing_was_written(tmp_path: Path) -> None:
    assert LastRun.read(tmp_path / "one.run") is None


@given(st.integers(1, 30), st.integers(0, 5), st.integers(0, 100))
def test_each_step_that_was_issued_has_its_place(tmp_path_factory: Any, steps: int, epoch: int, before: int) -> None:
    path = tmp_path_factory.mktemp("record") / "one.run"
    at = Position(epoch, before, 8 * before)
    recorded(path, steps, at, first=7)
    last = LastRun.read(path)
    assert last is not None and (last.run_id, last.last_step) == ("run-3", 6 + steps)
    for done in range(steps + 1):
        place = last.position(6 + done)
        assert (place.epoch, place.batches, place.samples) == (epoch, before + 2 * done, 8 * before + 16 * done)
        assert place.feed is not None and place.feed["batches"] == place.batches
        assert (place.feed["now"] is None) == bool(done)  # the random state is known at the beginning only
    with pytest.raises(CheckpointError, match="place in the data is not known"):
        last.position(7 + steps)


def test_steps_that_are_issued_again_count_from_what_is_committed(tmp_path: Path) -> None:
    path = tmp_path / "one.run"
    record = recorded(path, 5)
    record.issued(2, Position(0, 4, 32), 2, 16, lambda: feed(0, 4), 2)
    last = LastRun.read(path)
    assert last is not None and last.places == {1: (0, 4, 32), 2: (0, 6, 48)}


def test_the_log_of_the_run_is_known_to_the_process_that_follows(tmp_path: Path) -> None:
    path = tmp_path / "one.run"
    RunRecord(path, "run-3", SPEC, lambda: ("run-3-now", 40, 2)).issued(0, BEGINNING, 2, 16, lambda: feed(0, 0), 0)
    last = LastRun.read(path)
    assert last is not None and last.log == ("run-3-now", 40, 2)
    recorded(path, 1)
    last = LastRun.read(path)
    assert last is not None and last.log is None


def test_a_run_whose_workers_have_all_ended_is_lost_and_its_newest_checkpoint_is_named(tmp_path: Path) -> None:
    path, files = tmp_path / "one.run", tmp_path / "checkpoints" / "run-3-now"
    facts = {"workers": ["local-1", "local-2"], "files": str(files)}
    RunRecord(path, "run-3", SPEC, facts=lambda: facts).issued(0, BEGINNING, 2, 16, lambda: feed(0, 0), 0)
    assert LastRun.lost(path, ["local-1"]) == "", "another worker may come back"
    lost = LastRun.lost(path, ["local-1", "local-2"])
    assert "run-3 was trained by workers of that kernel alone (local-1, local-2)" in lost and "train anew" in lost
    files.parent.mkdir()
    for step, kind in ((5, ""), (9, "best-"), (7, "")):
        (newest := files.with_name(f"run-3-now-{kind}step-{step}.pt")).touch()
        os.utime(newest, (1_700_000_000 + step, 1_700_000_000 + step))
    assert f"--resume {files}-best-step-9.pt" in LastRun.lost(path, ["local-1", "local-2"])
    recorded(path, 1)
    assert LastRun.lost(path, ["local-1"]) == "" == LastRun.lost(None, ["local-1"]), "nothing is known of its workers"


def test_what_workers_may_hold_and_no_file_has_is_told_before_another_run_gives_it_up(tmp_path: Path) -> None:
    path, files = tmp_path / "one.run", tmp_path / "checkpoints" / "run-3-now"
    assert LastRun.held(path) == ""
    facts = {"workers": ["lab-1"], "files": str(files)}
    record = RunRecord(path, "run-3", SPEC, facts=lambda: facts)
    for step in range(3):
        record.issued(step, BEGINNING, 2, 16, lambda: feed(0, 0), 0)
    record.close()
    held = LastRun.held(path)
    assert (
        "(lab-1) may hold what run-3 trained up to step 3" in held and "--resume session" in held and "--fresh" in held
    )
    RunRecord.note_saved(path, 1)
    assert LastRun.held(path) != "", "the last step is in no file"
    RunRecord.note_saved(path, 2)
    last = LastRun.read(path)
    assert LastRun.held(path) == "" and last is not None and (last.saved_step, last.last_step) == (2, 2)
    RunRecord.note_saved(tmp_path / "another.run", 2)
    assert not (tmp_path / "another.steps").exists()


def test_a_new_epoch_begins_a_new_record(tmp_path: Path) -> None:
    path = tmp_path / "one.run"
    record = recorded(path, 5)
    record.issued(5, Position(1, 0, 0), 2, 16, lambda: feed(1, 0), 5)
    last = LastRun.read(path)
    assert last is not None and last.places == {4: (1, 0, 0), 5: (1, 2, 16)}


@given(st.integers(0, 60))
def test_a_line_that_was_cut_off_does_not_count(tmp_path_factory: Any, cut: int) -> None:
    path = tmp_path_factory.mktemp("record") / "one.run"
    recorded(path, 6).close()
    steps = path.with_suffix(".steps")
    whole = steps.read_bytes()
    steps.write_bytes(whole[: max(0, len(whole) - cut)])
    last = LastRun.read(path)
    assert last is not None
    assert last.places == {step: (0, 2 * (step + 1), 16 * (step + 1)) for step in range(-1, last.last_step + 1)}


@pytest.mark.parametrize("damage", [b"", b"PK", b"\x80\x04."])
def test_a_damaged_record_is_as_none(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "one.run"
    recorded(path, 2)
    path.write_bytes(damage)
    assert LastRun.read(path) is None


def test_what_is_forgotten_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "one.run"
    recorded(path, 2).close()
    RunRecord.forget(path)
    assert list(tmp_path.iterdir()) == []


def test_the_steps_of_another_record_are_not_its_own(tmp_path: Path) -> None:
    """As when the process is killed after the one file was replaced and before the other was begun."""
    recorded(tmp_path / "one.run", 5)
    recorded(tmp_path / "new.run", 0).issued(0, BEGINNING, 1, 4, lambda: feed(0, 0), 0)
    (tmp_path / "new.run").replace(tmp_path / "one.run")
    last = LastRun.read(tmp_path / "one.run")
    assert last is not None and last.places == {-1: (0, 0, 0)}


def test_a_disk_that_takes_nothing_ends_no_run_and_leaves_no_old_record(tmp_path: Path) -> None:
    path, told = tmp_path / "one.run", []
    recorded(path, 5)
    (tmp_path / "one.steps").unlink()
    (tmp_path / "one.steps").mkdir()  # cannot be opened for writing, whoever runs this
    record = RunRecord(path, "run-4", SPEC, tell=told.append)
    for step in range(3):
        record.issued(step, BEGINNING, 1, 4, lambda: feed(0, 0), 0)
    assert len(told) == 1 and "cannot be noted" in told[0] and not path.exists()
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(("each", "batches"), [(1, (3, 3, 1)), (2, (6, 6, 3))])
def test_a_round_of_local_steps_counts_as_many_steps_as_it_has(
    tmp_path: Path, each: int, batches: tuple[int, ...]
) -> None:
    """Two rounds of three steps and one of what is left; the record begins at round 5, after 17 steps."""
    path, spec = tmp_path / "one.run", replace(SPEC, rounds=RoundSpec("average", 1.0, 0.0, each))
    record, at = RunRecord(path, "run-3", spec), Position(1, 2 * each, 32)
    for number, count in enumerate(batches):
        record.issued(5 + number, at, count, 16, lambda: feed(1, 2 * each), 17)
    last = LastRun.read(path)
    assert last is not None
    assert [last.steps_after(step) for step in (4, 5, 6, 7)] == [17, 20, 23, 23 + -(-batches[-1] // each)]
    assert LastRun("run-3", {"rounds": None}, {7: (0, 16, 99)}, {}).steps_after(7) == 8
