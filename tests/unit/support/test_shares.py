"""Shares of a table: each cell in exactly one of them, and their counts and lines together."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import shares

PROGRAM = """
import argparse
from collections import Counter
from tests.support import shares
parser = argparse.ArgumentParser()
shares.add_arguments(parser)
args = parser.parse_args()
if args.share and args.share[0] == 1 and args.jobs == 7:
    raise SystemExit("broken")
mine = shares.own_share(range(20), args.share)
for cell in mine:
    print("cell", cell)
shares.say_counts(Counter(right=len(mine)), args.share)
"""


@given(st.integers(0, 200), st.integers(1, 40))
def test_each_cell_is_in_one_share(cells: int, jobs: int) -> None:
    found = [cell for number in range(jobs) for cell in shares.own_share(range(cells), (number, jobs))]
    assert sorted(found) == list(range(cells))
    assert shares.own_share(range(cells), None) == list(range(cells))


def test_the_lines_and_counts_of_all_processes_come_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "table_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).resolve().parents[3]}")
    assert shares.run_jobs("table_program", [], 3) == Counter(right=20)
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(f"cell {cell}" for cell in range(20))
    broken = shares.run_jobs("table_program", ["--jobs", "7"], 2)
    assert broken["share without an end"] == 1
    assert "broken" in capsys.readouterr().out
