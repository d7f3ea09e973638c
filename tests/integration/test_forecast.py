"""Forecasts and budgets against the bytes that real worker processes exchange over TLS."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb.errors import ConfigError
from guava_nb.forecast.forecast import Forecast
from guava_nb.training.run import Run
from tests.integration.test_group_modes import BLOCKS
from tests.support.processes import ROOT, Session


def loader(rows: int = 240) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(
        torch.randn(rows, 10, generator=generator, dtype=torch.float64),
        torch.randint(0, 4, (rows,), generator=generator),
    )
    return DataLoader(data, batch_size=48, shuffle=True, generator=torch.Generator().manual_seed(7))


def options(**more: Any) -> dict[str, Any]:
    return {"criterion": "loss_fn", "optimizer": "AdamW", "optimizer_args": {"lr": 0.01}, "fresh": True, **more}


def shared(session: Session, mode: str = "data", **settings: Any) -> None:
    session.orch.set_mode(mode, path="relay", **settings)
    session.orch.share(BLOCKS.format(folder=str(session.folder)), "net")
    session.orch.register_model("Deep", {"width": 128})


def used(run: Run) -> int:
    return run.wire.out_bytes + run.wire.in_bytes


def assert_close(made: Forecast, run: Run) -> None:
    assert made.run_bytes == pytest.approx(used(run), rel=0.05), (made, run.wire)


@pytest.fixture(scope="module")
def pool_without_compression(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        folder = tmp_path_factory.mktemp("pool")
        session = Session(folder, relayed=True, num_workers=3, compression="off", checkpoint_dir=str(folder))
        try:
            session.ensure(3)
            yield session
        finally:
            session.close()


@pytest.fixture
def pool(pool_without_compression: Session) -> Session:
    """Three workers, each behind a relay of its own."""
    pool_without_compression.ensure(3)
    return pool_without_compression


def test_the_lines_are_measured_before_anything_went_over_them(tmp_path: Path) -> None:
    session = Session(tmp_path, relayed=True, rate_bytes_s=2e6)
    try:
        session.ensure(2)
        shared(session)
        made = session.orch.forecast(loader(), None, 2, **options())
        out, back = made.rates_bytes_s
        assert out is not None and back is not None and 1e6 < out < 8e6 and 1e6 < back < 8e6  # two lines of 2 MB/s
        assert made.seconds == pytest.approx(max(made.run.out_bytes / out, made.run.in_bytes / back))
        assert any("measured just now with" in note for note in made.notes)
        shown = [(w.rate_out_bytes_s, w.rate_in_bytes_s) for w in session.orch.status().workers]
        assert sum(rate[0] for rate in shown) == out
        again = session.orch.forecast(loader(), None, 2, **options())  # known now
        assert not any("measured just now" in note for note in again.notes)
        (late,) = [worker for worker in session.ensure(3) if worker.name == "w3"]
        assert late.relay is not None
        late.relay.refuse()  # its visit cannot reach us
        partly = session.orch.forecast(loader(), None, 2, **options())
        assert any(note.startswith("The line to w3 is not in these rates: ") for note in partly.notes)
        assert partly.rates_bytes_s[0] == out
    finally:
        session.close()


def test_data_mode_takes_what_was_forecast_and_the_dry_run_changes_nothing(pool: Session) -> None:
    shared(pool)
    train, val, before = loader(), loader(96), pool.orch.run
    torch.manual_seed(4)
    state = torch.get_rng_state()
    prepared = [member.samples for member in pool.orch._open_cluster().members()]
    made = pool.orch.forecast(train, val, 2, **options())
    assert torch.equal(torch.get_rng_state(), state) and pool.orch.run is before
    assert [member.samples for member in pool.orch._open_cluster().members()] == prepared
    run = pool.orch.start_training(train, val, 2, progress=False, **options())
    assert_close(made, run)


@pytest.mark.parametrize(
    ("schedule", "wire", "rows", "val_rows"),
    [("gpipe", "fp32", 240, 96), ("1f1b", "fp32", 102, 54), ("gpipe", "int8", 240, 96)],  # a short last batch
)
def test_a_pipeline_takes_what_was_forecast(pool: Session, schedule: str, wire: str, rows: int, val_rows: int) -> None:
    shared(pool, "pipeline", micro_batches=4, pipeline_schedule=schedule)
    made = pool.orch.forecast(loader(rows), loader(val_rows), 3, **options(wire=wire))
    run = pool.orch.start_training(loader(rows), loader(val_rows), 3, progress=False, **options(wire=wire))
    assert_close(made, run)
    assert made.to_dict()["run"]["activation_bytes"] == pytest.approx(run.wire.activation_bytes, rel=0.05)


def test_shared_layers_and_zero_take_about_what_was_forecast(pool: Session) -> None:
    for mode, settings, tolerance in (
        ("zero", {"zero_stage": 2}, 0.05),
        ("tensor", {"tensor_plan": {"1.linear": "colwise"}}, 0.1),
    ):
        shared(pool, mode, **settings)
        made = pool.orch.forecast(loader(), None, 3, **options())
        run = pool.orch.start_training(loader(), None, 3, progress=False, **options())
        assert made.run_bytes == pytest.approx(used(run), rel=tolerance), (mode, made, run.wire)


def test_a_budget_is_not_passed_in_a_pipeline_and_the_run_goes_on(pool: Session, tmp_path: Path) -> None:
    shared(pool, "pipeline", micro_batches=4)
    needed = pool.orch.forecast(loader(), None, 4, **options()).run_bytes
    assert needed is not None
    limit, path, losses = int(needed * 0.75), tmp_path / "stopped.pt", []
    more: dict[str, Any] = {}
    for _ in range(5):
        run = pool.orch.start_training(
            loader(), None, 4, progress=False, budget_bytes=limit, save_path=path, **{**options(), **more}
        )
        losses += [record["loss"] for record in run.history]
        assert used(run) <= limit
        if run.state == "done":
            break
        assert run.state == "stopped" and run.history and str(path) in run.status().message
        assert f"step {torch.load(path, weights_only=True)['step'] + 1} of 20" in run.status().message
        more = {"resume": path, "fresh": False}
    assert run.state == "done" and more
    whole = pool.orch.start_training(loader(), None, 4, progress=False, **options())
    assert losses == pytest.approx([record["loss"] for record in whole.history], abs=1e-9)
    with pytest.raises(ConfigError, match="is too small"):
        pool.orch.start_training(loader(), None, 4, progress=False, budget_bytes=100_000, **options())


def test_connections_that_break_do_not_make_a_run_pass_its_budget(pool: Session) -> None:
    shared(pool)
    worker, cuts = pool.ensure(3)[0], []

    class Cutting:
        def on_step(self, run: Run, record: dict[str, Any]) -> None:
            if record["step"] % 4 == 0 and len(cuts) < 3:
                with contextlib.suppress(AssertionError, StopIteration):  # the one before is not mended yet
                    worker.link("bulk").cut()
                    cuts.append(record["step"])

    needed = pool.orch.forecast(loader(), None, 8, **options()).run_bytes
    assert needed is not None
    limit = needed // 2
    run = pool.orch.start_training(
        loader(), None, 8, progress=False, budget_bytes=limit, callbacks=[Cutting()], **options()
    )
    assert run.state == "stopped" and cuts and used(run) <= limit
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)
