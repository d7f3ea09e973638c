"""Workers are shared among tests: each process costs seconds of importing torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.processes import Session


@pytest.fixture(scope="session")
def pool_of_three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    from tests.support.processes import ROOT, Session  # not by the process that only hands out tests: it needs no torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        session = Session(tmp_path_factory.mktemp("pool"), num_workers=3, hash_every_steps=2)
        try:
            yield session
        finally:
            session.close()


@pytest.fixture
def three(pool_of_three: Session) -> Session:
    """A session with three worker processes on this machine."""
    pool_of_three.ensure(3)
    return pool_of_three
