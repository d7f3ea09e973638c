"""Programs as users write them: equal to plain PyTorch, or refused or told with a true sentence; each once in some mode.

The whole table is printed by `python -m tests.parity.programs`; see tests/README.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

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
    outcome = table.run(cell)
    assert outcome.is_right, f"{outcome.kind}: {outcome.text}"


@pytest.mark.parametrize("mode", MODES)
def test_a_language_model_s_accuracy_and_perplexity(table: Table, mode: str) -> None:
    """On targets of which most are ignored: they count for neither figure."""
    program, orch = PROGRAMS["masked lm" if mode != "pipeline" else "gpt, tied embeddings"], table.session(3).orch
    assert table.run(Cell(3, program.name, mode)).kind == "equal"
    found = orch.validate(program.data(), progress=False)
    x, y = (torch.cat(parts) for parts in zip(*program.data(), strict=True))
    with torch.no_grad():
        outputs = orch.run.model().eval()(x)
    counts, loss = y != -100, functional.cross_entropy(outputs.flatten(0, 1), y.flatten())
    assert found["loss"] == pytest.approx(float(loss), abs=1e-12) and found["samples"] == len(x)
    assert found["accuracy"] == pytest.approx(float((outputs.argmax(-1) == y)[counts].double().mean()))
    assert found["perplexity"] == pytest.approx(float(loss.exp()))
    predicted = orch.predict(program.data(), raw=True, progress=False)["outputs"]
    with torch.no_grad():
        wanted = orch.run.model().eval()(program.data().dataset.tensors[0])
    assert torch.allclose(torch.as_tensor(predicted), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mode", ["data", "tensor", "zero 3"])
def test_the_perplexity_of_a_language_model_with_its_own_loss(table: Table, mode: str) -> None:
    program, orch = PROGRAMS["model with its own loss, dicts"], table.session(2).orch
    assert table.run(Cell(2, program.name, mode)).kind == "equal"
    found = orch.validate(program.data(), progress=False)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"])) and 0 <= found["accuracy"] <= 1


def test_shares_of_another_length_than_there_are_workers_are_refused(table: Table) -> None:
    outcome = table.run(Cell(3, "info nce on one worker", "data"))
    assert outcome.kind == "refused" and outcome.is_right, outcome.text


def test_the_cells_that_run_here_cover_programs_modes_and_workers() -> None:
    chosen = covering()
    assert {cell.program for cell in chosen} == set(PROGRAMS)
    assert {(cell.mode, cell.workers) for cell in chosen} == {(mode, count) for mode in MODES for count in (2, 3)}
    assert set(chosen) <= set(CELLS) and len(PROGRAMS) >= 73
