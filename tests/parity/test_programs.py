"""Programs as users write them: equal to plain PyTorch, or refused or told with a true sentence; each once in some mode.

The whole table is printed by `python -m tests.parity.programs`; see tests/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parity.programs.table import CELLS, MODES, PROGRAMS, Cell, Table, covering
from tests.support.processes import ROOT


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        made = Table(tmp_path_factory.mktemp("programs"))
        try:
            yield made
        finally:
            made.close()


@pytest.mark.parametrize("cell", covering(), ids=str)
def test_a_program_is_right_or_says_why_not(table: Table, cell: Cell) -> None:
    if cell.awaits:
        pytest.xfail(f"awaits {cell.awaits}")
    outcome = table.run(cell)
    assert outcome.is_right, f"{outcome.kind}: {outcome.text}"


def test_the_cells_that_run_here_cover_programs_modes_and_workers() -> None:
    chosen = covering()
    assert {cell.program for cell in chosen} == set(PROGRAMS)
    assert {(cell.mode, cell.workers) for cell in chosen} == {(mode, count) for mode in MODES for count in (2, 3)}
    assert set(chosen) <= set(CELLS) and len(PROGRAMS) >= 73
