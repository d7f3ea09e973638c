from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.data.codec import unpack
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.split import RowSplitter
from guava_nb.protocol.messages import Factory, ParallelSpec, RunSpec
from guava_nb.replica.replica import Replica
from guava_nb.training.first_step_check import (
    first_rows,
    has_whole_twin,
    is_looked_at_whole,
    is_round,
    later_checks,
    weights_of_pieces,
    weights_to_send,
)
from guava_nb.training.step_check.findings import Question
from tests.support.training import spec as run_spec

PLAIN = RunSpec(model=Factory("Net"), criterion=Factory("MSELoss"), step=None, optimizer=Factory("SGD"), scheduler=None)


def spread(**shape: object) -> RunSpec:
    return msgspec.structs.replace(PLAIN, parallel=ParallelSpec(**shape))


@pytest.mark.parametrize(
    ("spec", "weights", "pieces"),
    [
        (PLAIN, [1.0], (1.0,)),
        (PLAIN, [1.0, 0.0], (1.0,)),
        (PLAIN, [1.0, 1.0], (1.0, 1.0)),
        (PLAIN, [2.0, 1.0, 1.0], (2.0, 1.0, 1.0)),
        (PLAIN, [0.0, 2.0, 1.0], (2.0, 1.0)),
        (spread(mode="tensor", tp=2), [1.0, 1.0], (1.0,)),
        (spread(mode="zero", dp=3, zero_stage=3), [1.0, 1.0, 1.0], (1.0, 1.0, 1.0)),
        (spread(mode="pipeline", pp=2, micro_batches=1), [1.0, 1.0], (1.0,)),
        (spread(mode="pipeline", pp=2, micro_batches=4), [1.0, 1.0], (0.25,) * 4),
        (spread(mode="hybrid", dp=2, tp=2), [1.0, 1.0, 3.0, 3.0], (1.0, 3.0)),
    ],
)
def test_what_is_cut(spec: RunSpec, weights: list[float], pieces: tuple[float, ...]) -> None:
    assert weights_of_pieces(spec, weights) == pieces


@given(st.integers(2, 40), st.data(), st.booleans())
def test_a_question_has_the_first_samples_whole_and_cut(rows: int, data: st.DataObject, at_workers: bool) -> None:
    asked = data.draw(st.integers(2, rows))
    content = torch.arange(rows)
    batch = LoadedBatch(0, content, tuple(range(rows)), rows, source=int(at_workers))
    message, buffers = Question(batch, content, (1.0, 2.0), RowSplitter()).message(
        "run-1", 3, asked, data.draw(st.booleans())
    )
    came = unpack(message.batch, memoryview(b"".join(bytes(buffer) for buffer in buffers)))
    assert came[0].tolist() == list(range(asked)) and message.rows[0] == asked == sum(message.rows[1:])
    assert [len(piece) for piece in came[1:]] == ([] if at_workers else list(message.rows[1:]))
    assert torch.cat(came[1:] or [came[0]]).tolist() == came[0].tolist()


class Counted(torch.nn.Linear):
    """Keeps more than tensors in its state dict."""

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state


@pytest.mark.parametrize("shape", [{"mode": "zero", "dp": 2, "zero_stage": 3}, {"mode": "tensor", "tp": 2}])
def test_a_model_that_keeps_more_than_tensors_is_checked_with_its_present_weights(shape: dict[str, object]) -> None:
    master = Replica(run_spec(), lambda name: torch.nn, torch.device("cpu"), Counted(2, 2))
    replicas: Any = SimpleNamespace(spec=spread(**shape), master=master, from_seed=False, step=1, master_step=1)
    assert has_whole_twin(replicas)
    sent = weights_to_send(replicas)
    assert sent is not None and sent["model"]["_extra_state"] == {"steps": 3}


def test_whole_batches_are_looked_at_again_ever_more_rarely() -> None:
    assert [step + 1 for step in range(1100) if is_looked_at_whole(step)] == [256, 1024]


def test_what_comes_every_few_steps_falls_on_a_step_that_is_checked() -> None:
    checked = [step for step in range(1, 2000) if is_round(step)]
    assert checked == [10, 60, 600] and later_checks(600) == len({4, 8, 16, 32, 64, 128, 256, 512, 10, 60, 600})
    assert later_checks(16) == 4 and later_checks(20) == 5 and later_checks(3) == 0
    assert all(
        any(step % every == 0 for step in checked) for every in (2, 3, 4, 5, 6, 10, 12, 15, 20, 25, 30, 50, 100, 200)
    )


def test_shares_that_part_other_samples_than_pieces_of_two_say_more() -> None:
    for rows, weights, says_more in ((6, (1, 1), True), (8, (1, 1), False), (8, (1, 1, 1), True), (3, (1, 1), False)):
        batch = LoadedBatch(0, torch.arange(rows), tuple(range(rows)), rows)
        assert Question(batch, batch.batch, weights, RowSplitter()).is_cut_finer(rows) == says_more
    assert Question(batch, batch.batch, (1, 1), RowSplitter()).is_cut_finer(2)


def test_small_batches_are_looked_at_whole() -> None:
    assert [first_rows(rows) for rows in (2, 8, 16, 17, 512)] == [2, 8, 16, 8, 8]
