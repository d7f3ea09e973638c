"""The fault matrix: what a fault at a phase in a mode comes to is what was written down before; a covering set of its cells.

The whole is printed by `python -m tests.faults.matrix`; see tests/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.matrix.bench import Bench
from tests.faults.matrix.cells import CELLS, FAULTS, MODES, PHASES, Cell, covering, senseless
from tests.support.covered import is_covered
from tests.support.processes import ROOT


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        made = Bench(tmp_path_factory.mktemp("matrix"))
        try:
            yield made
        finally:
            made.close()


@pytest.mark.parametrize("cell", covering(), ids=str)
def test_a_fault_comes_to_what_was_written_down(bench: Bench, cell: Cell) -> None:
    outcome = bench.run(cell)
    assert outcome.is_right, f"{outcome.kind}: {outcome.text}"


def test_the_cells_that_run_here_cover_phases_faults_and_modes() -> None:
    assert set(covering()) <= set(CELLS) and len(set(covering())) == len(covering())
    table = ("tests/faults/test_matrix.py", test_a_fault_comes_to_what_was_written_down.__name__)
    chosen = [cell for cell in covering() if not is_covered(*table, str(cell))]
    assert {cell.phase for cell in chosen} == set(PHASES)
    assert {cell.fault for cell in chosen} == set(FAULTS)
    assert {cell.mode for cell in chosen} == set(MODES)


def test_every_cell_that_is_left_out_says_why() -> None:
    every = {(mode, phase, fault) for mode in MODES for phase in PHASES for fault in FAULTS}
    assert {place for place in every if not senseless(*place)} == {(c.mode, c.phase, c.fault) for c in CELLS}
