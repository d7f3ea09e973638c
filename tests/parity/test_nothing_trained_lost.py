"""A run goes on from what the last one trained, or is refused until a file has it; only fresh, resume and weights throw it away.

One table: how things stood, by what the next run begins with.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from guava_nb import Callback, Orchestrator, Run
from guava_nb.errors import ConfigError, GuavaError
from tests.support.session import direct_session, said
from tests.support.training import loader

CELL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width={width}):
        super().__init__()
        self.first, self.last = nn.Linear(10, width), nn.Linear(width, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))

class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = nn.Linear(10, 4)

    def forward(self, x):
        return self.only(x)

def broken(outputs, targets):
    raise ValueError("no loss of this batch")
"""


class Once(nn.Module):
    """An instance of this module is registered."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.only(x)


def train(session: Orchestrator, **options: Any) -> Run:
    given: dict[str, Any] = {"num_epochs": 1, "optimizer_args": {"lr": 0.1}, "precision": "fp64", "progress": False}
    return session.start_training(loader(), **{**given, "optimizer": "SGD", **options})


class At(Callback):
    """Does something after the second step."""

    def __init__(self, do: Callable[[Run], None]) -> None:
        self._do = do

    def on_step(self, run: Run, record: dict[str, Any]) -> None:
        if len(run.history) == 2:
            self._do(run)


def _fail(run: Run) -> None:
    raise ValueError("the callback fails")


def _trained(session: Orchestrator, folder: Path) -> None:
    train(session)


def _brought_here(session: Orchestrator, folder: Path) -> None:
    train(session).model()


def _stopped(session: Orchestrator, folder: Path) -> None:
    assert train(session, callbacks=[At(Run.stop)]).state == "stopped"


def _failed(session: Orchestrator, folder: Path) -> None:
    with suppress(GuavaError, ValueError):
        train(session, callbacks=[At(_fail)])
    assert session.run is not None and session.run.state == "failed" and session.run.history


def _failed_at_once(session: Orchestrator, folder: Path) -> None:
    train(session)
    with suppress(GuavaError):
        train(session, criterion="broken")
    assert session.run is not None and session.run.state == "failed" and not session.run.history


def _validated(session: Orchestrator, folder: Path) -> None:
    train(session)
    session.validate(loader(), progress=False)


def _other_asked(session: Orchestrator, folder: Path) -> None:
    train(session)
    session.register_model("Other")
    session.validate(loader(), progress=False)


def _resumed(session: Orchestrator, folder: Path) -> None:
    train(session)
    session.save_checkpoint(folder / "early.pt")
    session.load_checkpoint(folder / "early.pt")
    train(session, num_epochs=2)


def _registered_again(session: Orchestrator, folder: Path) -> None:
    train(session)
    session.share(CELL.format(width=8), "net")
    session.register_model("Net")


BEFORE = (
    _trained, _brought_here, _stopped, _failed, _failed_at_once, _validated, _other_asked, _resumed, _registered_again,
)  # fmt: skip


def _other(session: Orchestrator) -> None:
    session.register_model("Other")


def _arguments(session: Orchestrator) -> None:
    session.register_model("Net", {"width": 9})


def _changed_cell(session: Orchestrator) -> None:
    session.share(CELL.format(width=9), "net")
    session.register_model("Net")


@pytest.mark.parametrize(
    ("before", "workers"), [*((one, 1) for one in BEFORE), (_trained, 2), (_failed_at_once, 2), (_stopped, 2)]
)
def test_a_run_goes_on_from_what_was_trained_or_is_refused_until_it_is_saved(
    before: Callable[[Orchestrator, Path], None], workers: int, tmp_path: Path
) -> None:
    with direct_session(workers) as session:
        session.share(CELL.format(width=8), "net")
        session.register_model("Net")
        before(session, tmp_path)
        last = session.run
        assert last is not None
        for change in (_other, _arguments, _changed_cell):
            change(session)
            with pytest.raises(ConfigError, match=r"this run would throw away .*%guava_save PATH.*--fresh"):
                train(session)
            session.share(CELL.format(width=8), "net")
            session.register_model("Net")
        # What is the same goes on: a step with a learning rate of 0 shows from where.
        same = train(session, optimizer_args={"lr": 0.0})
        assert "goes on from the weights of the last run" in said(session)
        assert _equal(same.model(), last.model())
        session.register_model(Once())
        with pytest.raises(ConfigError, match="another model was registered, and no file has it"):
            train(session)
        session.save_checkpoint(tmp_path / "kept.pt")  # as the refusal says
        train(session)
        session.register_model("Net")
        again = train(session, resume=tmp_path / "kept.pt", num_epochs=9, optimizer_args={"lr": 0.0})
        assert _equal(again.model(), last.model())


def _equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p.double(), q.double()) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_what_a_checkpoint_of_the_run_itself_has_is_saved(tmp_path: Path) -> None:
    with direct_session(2, checkpoint_dir=str(tmp_path)) as session:
        session.share(CELL.format(width=8), "net")
        session.register_model("Net")
        train(session, save_every=1)
        session.register_model("Other")
        train(session)
        assert "begins with new weights" in said(session)
        session.register_model("Net")
        with pytest.raises(ConfigError, match="would throw away what the last one trained in 4 steps"):
            train(session)
        train(session, fresh=True)
