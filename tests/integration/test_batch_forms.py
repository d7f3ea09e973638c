"""Batches of other forms in modes that share a batch out or cut it into micro-batches, between real worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from guava_nb.errors import ConfigError
from guava_nb.training.run import Run
from tests.support import reading_programs as programs
from tests.support.processes import ROOT, PlainTraining, Session

CELL = "from tests.support.reading_programs import formed as Formed\n"


class Plain(PlainTraining):
    """The same stack in plain PyTorch."""

    def __init__(self, folder: Path, batches: Any) -> None:
        super().__init__(folder, batches)
        torch.manual_seed(0)
        self.model = programs.formed().double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        made = Session(tmp_path_factory.mktemp("forms"), num_workers=2, heartbeat_s=0.5, silence_s=4.0, path="relay")
        try:
            yield made
        finally:
            made.close()


def loader(collate: Any, samples: int = 30, batch_size: int = 8) -> DataLoader[Any]:
    return DataLoader(programs.Frames(samples), batch_size, collate_fn=collate)


def train(session: Session, mode: str, batches: Any, settings: dict[str, Any], **options: Any) -> Run:
    session.orch.set_mode(mode, path="relay", **settings)
    return session.train(batches, 2, CELL, **{"model": "Formed", "criterion": "CrossEntropyLoss", **options})


MODES = [("pipeline", {"micro_batches": 3}), ("zero", {"zero_stage": 3})]


@pytest.mark.parametrize(
    "collate", [programs.fields_and_labels, programs.frames_and_table], ids=lambda one: one.__name__
)
@pytest.mark.parametrize(("mode", "settings"), MODES, ids=lambda value: str(value).replace(" ", ""))
def test_it_equals_plain_pytorch(session: Session, collate: Any, mode: str, settings: dict[str, Any]) -> None:
    session.ensure(2)
    plain = Plain(session.folder, loader(collate)).epochs(2)
    run = train(session, mode, loader(collate), settings, val_loader=loader(collate, 21, 6))
    session.assert_undisturbed(run, plain)
    plain.model.eval()
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(plain.model(x), y, reduction="sum") for x, y in loader(collate, 21, 6)
        ]
        outputs = torch.cat([plain.model(x) for x, _ in loader(collate, 21, 6)])
    truth = float(sum(losses)) / 21
    assert run.validations[-1]["loss"] == pytest.approx(truth, abs=1e-12)
    assert session.orch.validate(loader(collate, 21, 6))["loss"] == pytest.approx(truth, abs=1e-12)
    raw = session.orch.predict(loader(collate, 21, 6), raw=True)["outputs"]
    assert torch.allclose(torch.as_tensor(raw), outputs, atol=1e-12)


@pytest.mark.parametrize(("mode", "settings"), MODES, ids=lambda value: str(value).replace(" ", ""))
def test_what_belongs_to_one_batch_is_refused(session: Session, mode: str, settings: dict[str, Any]) -> None:
    session.ensure(2)
    with pytest.raises(
        ConfigError, match=r"inputs\.table .* would travel whole to every worker, and its values change"
    ):
        train(session, mode, loader(programs.noise_and_labels), settings)
    assert session.orch.run is not None and session.orch.run.history == []


def test_what_a_split_function_cut_is_read_by_the_stages(session: Session) -> None:
    session.ensure(2)

    def split_fn(batch: Any, ranges: Any) -> list[Any]:
        (inputs, labels), parts = batch, []
        for start, stop in ranges:
            parts.append(({**inputs, "frames": inputs["frames"][:, start:stop]}, labels[start:stop]))
        return parts

    with pytest.raises(ConfigError, match=r"cannot be cut into the micro-batches of a pipeline.*micro_batches=1"):
        train(session, "pipeline", loader(programs.frames_and_table), {"micro_batches": 3}, split_fn=split_fn)
    plain = Plain(session.folder, loader(programs.frames_and_table)).epochs(2)
    run = train(session, "pipeline", loader(programs.frames_and_table), {"micro_batches": 1}, split_fn=split_fn)
    session.assert_undisturbed(run, plain)
