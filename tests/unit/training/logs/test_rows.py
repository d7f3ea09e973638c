"""A reader on another thread gets each committed row once, and what is done again once more."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from guava_nb.training.logs.rows import RunReader
from guava_nb.training.run import Run


def step(number: int, learning_rate: float | None = 0.1, epoch: int = 1, loss: float = 1.0) -> dict[str, Any]:
    return {"step": number, "epoch": epoch, "loss": loss, "samples": 4, "learning_rate": learning_rate}


def made(steps: int = 0) -> Run:
    run = Run("run-1", "data", 1, None)
    for number in range(1, steps + 1):
        run.add_step(step(number))
    return run


def test_each_row_comes_once_and_counts_on_from_the_runs_before() -> None:
    run = made(2)
    reader = RunReader(run, steps_before=10, epochs_before=3)
    run.add_validation({"step": 2, "loss": 0.5, "accuracy": None, "samples": 4, "matrix": [[1]]})
    run.add_epoch({"step": 2, "epoch": 1, "loss": 1.0, "samples": 8, "figure": 0})
    back, rows = reader.read(is_over=False)
    assert back is None and [(row.kind, row.step) for row in rows] == [
        ("steps", 11), ("steps", 12), ("validations", 12), ("epochs", 12)
    ]  # fmt: skip
    assert rows[2].values == {"step": 12, "loss": 0.5, "accuracy": None, "samples": 4}
    epoch = rows[3].values
    assert (epoch["epoch"], epoch["learning_rate"], epoch["joules"]) == (4, 0.1, None)
    assert reader.read(is_over=True) == (None, [])


def test_a_learning_rate_that_a_worker_tells_a_moment_later_is_waited_for_but_not_at_the_end() -> None:
    run = made(1)
    run.add_step(step(2, learning_rate=None))
    reader = RunReader(run)
    assert [row.step for row in reader.read(is_over=False)[1]] == [1]
    run.history[1]["learning_rate"] = 0.2
    assert [row.values["learning_rate"] for row in reader.read(is_over=False)[1]] == [0.2]
    run.add_step(step(3, learning_rate=None))
    assert [row.step for row in reader.read(is_over=True)[1]] == [3]


def test_joules_of_an_epoch_are_those_of_all_workers_and_of_none_where_one_is_missing(monkeypatch: Any) -> None:
    run = made(1)
    told = [{"joules": 5.0, "epochs": [2.0]}, {"joules": 4.0, "epochs": [1.0]}, {"joules": None}]
    monkeypatch.setattr(Run, "energy", property(lambda run: told))
    monkeypatch.setattr(Run, "joules", property(lambda run: 9.0))
    run.add_epoch({"step": 1, "epoch": 1, "loss": 1.0, "samples": 4, "figure": 0})
    rows = RunReader(run).read(is_over=False)[1]
    assert [row.values["joules"] for row in rows] == [9.0, 3.0]
    told[1]["epochs"] = [None]
    assert [row.kind for row in RunReader(run).read(is_over=False)[1]] == ["steps"], "it is waited for"
    assert RunReader(run).read(is_over=True)[1][1].values["joules"] is None


@given(st.lists(st.tuples(st.sampled_from("srfk"), st.integers(0, 30)), max_size=40))
def test_what_was_written_is_the_history_whatever_the_run_goes_back_over_or_a_writer_loses(
    moves: list[tuple[str, int]],
) -> None:
    run, kept, loss = made(), list[tuple[int, float]](), 0.0
    reader = RunReader(run, 100)

    def read(is_lost: bool = False) -> None:
        back, rows = reader.read(is_over=True)
        if back is not None:
            kept[:] = [one for one in kept if one[0] <= back]
        if rows and is_lost:
            back = reader.forget(rows)
            kept[:] = [one for one in kept if one[0] <= back]
        elif rows:
            kept.extend((row.step, row.values["loss"] or 0.0) for row in rows)

    for move, number in moves:
        loss += 1
        if move == "s":
            run.add_step(step(len(run.history) + 1, loss=loss))
        elif move == "r":
            run.rewind(min(number, len(run.history)))
        else:
            read(is_lost=move == "f")
    read()
    assert kept == [(100 + record["step"], record["loss"]) for record in run.history]
