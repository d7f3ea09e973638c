"""How a job ends that was told to stop, whatever happens while its state is brought here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from guava_nb.cluster.job import NobodyLeft, StopRequested
from guava_nb.sync.replica_set import GroupLost
from guava_nb.training.job import TrainingJob


@pytest.mark.parametrize("then", [StopRequested(), NobodyLeft()])
@pytest.mark.parametrize("is_held", [True, False])
def test_an_interrupt_or_a_loss_while_a_lost_groups_state_is_saved_does_not_fail_the_run(
    then: Exception, is_held: bool
) -> None:
    """The member that is asked first is lost; meanwhile the user interrupts again, or the others are lost too."""
    back: list[bool] = []

    def fetch() -> None:
        raise GroupLost("w0 was lost")

    def rescue() -> bool:
        raise then

    job: Any = SimpleNamespace(
        _fetch_in_time=fetch, replica_set=SimpleNamespace(at={1: 5} if is_held else {}), ready={1},
        suspects=set(), _recovery=SimpleNamespace(rescue=rescue, go_back=lambda: back.append(True)),
        _boundary=SimpleNamespace(calls=SimpleNamespace(answer=lambda: None)),
    )  # fmt: skip
    TrainingJob._settle(job)
    assert back == ([] if is_held else [True])
