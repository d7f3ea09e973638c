"""How often to exchange, chosen over throttled lines with steps played by real workers. Rates are an order of magnitude apart."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from guava_nb.orchestrator import sync_advice
from tests.support.processes import PlainTraining, Session, difference, loader

#: 26,000 parameters of float64 and steps of at least 0.2 s: 1 s and more an exchange at 0.2 MB/s, a few ms on loopback.
SLOW_BYTES_S, WIDTH = 2e5, 1700
CELL = """
import time
from torch import nn

class Slow(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.last = nn.Linear(10, width), nn.Linear(width, 4)

    def forward(self, x):
        time.sleep(0.2)
        return self.last(self.first(x).relu())

class Stage(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.line = nn.Linear(inner, outer)

    def forward(self, x):
        time.sleep(0.004 * len(x))
        return self.line(x)

def staged():
    return nn.Sequential(Stage(10, 200), Stage(200, 4))
"""


def options(**more: Any) -> dict[str, Any]:
    return {"criterion": "CrossEntropyLoss", "optimizer": "SGD", "optimizer_args": {"lr": 0.01}, "fresh": True, **more}


def told(session: Session, begin: str) -> list[str]:
    return [text for _, text in session.orch._notices.numbered(20) if text.startswith(begin)]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    made = Session(tmp_path_factory.mktemp("auto"), relayed=True, rate_bytes_s=SLOW_BYTES_S, compression="off")
    try:
        made.ensure(2)
        yield made
    finally:
        made.close()


def quicken(session: Session, patch: pytest.MonkeyPatch) -> None:
    """Make the lines as fast as they get, and have them be known for that: a busy machine may measure anything."""
    paces = sync_advice._paces
    for worker in session.workers:
        assert worker.relay is not None
        for way in worker.relay._ways.values():
            way.rate_bytes_s = None
    patch.setattr(
        sync_advice,
        "_paces",
        lambda *known: [replace(one, up_bytes_s=1e9, down_bytes_s=1e9, round_trip_s=0.0) for one in paces(*known)],
    )


def test_step_sync_that_would_take_longer_than_one_worker_is_told_before_it_begins(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a size and a time that are worth measuring nothing is asked; so these are set down to what a test can send."""
    monkeypatch.setattr("guava_nb.orchestrator.sync_advice._WORTH_BYTES", 1000)
    monkeypatch.setattr("guava_nb.orchestrator.sync_advice._WORTH_S", 0.01)
    with pytest.warns(UserWarning, match=r"in every step over these lines would take longer than w\d alone"):
        run = session.train(loader(64), 1, model_args={"width": 600}, optimizer="SGD", optimizer_args={"lr": 0.01})
    plain = PlainTraining(session.folder, loader(64), "SGD", {"lr": 0.01}, width=600).epochs(1)
    assert difference(run.model(), plain.model) <= 1e-9  # steps that were played beforehand left nothing
    assert run.report()["sync"] == "step" and len(told(session, "an exchange in every step over these lines")) == 1


def test_a_pipelines_schedule_is_chosen_by_its_lines_and_what_stages_compute(session: Session) -> None:
    session.orch.share(CELL, "net")
    session.orch.register_model("staged")
    session.orch.set_mode("pipeline", path="relay", pipeline_schedule="auto")
    try:
        made = session.orch.forecast(loader(96), None, 1, **options())
        (sentence,) = [note for note in made.notes if note.startswith("schedule auto: ")]
        run = session.orch.start_training(loader(96), num_epochs=1, progress=False, **options())
    finally:
        session.orch.set_mode("data")
    assert told(session, "schedule auto: ") == [sentence]  # nothing is measured twice
    trained = session.orch._replica_sets.trained
    assert trained is not None and trained.spec.parallel is not None
    chosen = trained.spec.parallel
    assert chosen.micro_batches > 1 and f"{chosen.schedule} with {chosen.micro_batches} micro-batches" in sentence
    assert "there and back" in sentence and run.lost_samples == 0
    assert made.run_bytes == pytest.approx(run.wire.out_bytes + run.wire.in_bytes, rel=0.05)


def test_a_slow_line_gets_rounds_and_a_fast_one_gets_exact_steps(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.orch.share(CELL, "net")
    session.orch.register_model("Slow", {"width": WIDTH})
    made = session.orch.forecast(loader(), None, 1, **options(sync="auto"))
    assert made.sync is not None and made.sync.sync == "local" and made.steps == 4
    assert "an exchange after each" in repr(made) and "(chosen)" in repr(made) and "alone" in repr(made)
    assert len(made.ways()) == 7 and all(row[2] != "-" for row in made.ways())
    assert "of which the largest" not in made.sync.sentence  # too few steps for that
    long = session.orch.forecast(loader(), None, 1000, **options(sync="auto"))
    assert long.sync is not None and "of which the largest 1/64 travels" in long.sync.sentence
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a line over which alone may be faster
        run = session.orch.start_training(loader(), num_epochs=1, progress=False, **options(sync="auto"))
    assert (run.report()["sync"], run.report()["steps"]) == ("local", 4)
    (sentence,) = told(session, "sync auto: an exchange after each")
    assert "(sync_delay)" in sentence and "sent as int4 (wire)" in sentence
    assert told(session, "While the pseudo-gradients of a round travel") and told(
        session, "the pseudo-gradients of a round of several workers travel as int4"
    )

    # A way that the user chose is compared all the same.
    compared = session.orch.forecast(loader(), None, 1, **options())
    assert compared.sync is not None and [way.every for way in compared.sync.ways][:2] == [0, 1]
    assert compared.sync.warning.startswith("an exchange in every step over these lines would take longer than w")
    assert compared.sync.warning in compared.answers() and not compared.sync.sentence

    # So are rounds of sparse messages: an exchange in every step would send all, whatever theirs send.
    sparse = session.orch.forecast(loader(), None, 1, **options(sync="local", sync_every=2, outer="partial"))
    assert sparse.sync is not None and sparse.sync.ways[1].run_bytes == pytest.approx(
        compared.sync.ways[1].run_bytes, rel=0.1
    )
    assert (sparse.sync.ways[2].run_bytes or 0) < (compared.sync.ways[1].run_bytes or 0) / 4

    quicken(session, monkeypatch)
    run = session.orch.start_training(loader(), num_epochs=1, progress=False, **options(sync="auto"))
    assert run.report()["sync"] == "step"
    assert "less than a quarter" in told(session, "sync auto: an exchange in every step")[0]
    assert len(run.history) == 4 and run.lost_samples == 0
