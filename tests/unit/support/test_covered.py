"""Cells that others cover are named by file, test and id; a name that fits nothing, and a test of which none is left, is told."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from tests.support import covered

ROOT = Path(__file__).resolve().parents[3]
TABLE = {"tests/test_a.py": {"test_one": ("red-(2|3)", "blue-2")}}


def problems(*cells: str) -> list[str]:
    with mock.patch.object(covered, "COVERED", TABLE):
        return covered.stale(("tests/test_a.py", "test_one", cell) for cell in cells)


def test_a_whole_id_is_matched_in_its_own_test_only() -> None:
    with mock.patch.object(covered, "COVERED", TABLE):
        assert covered.is_covered("tests/test_a.py", "test_one", "red-3")
        assert not covered.is_covered("tests/test_a.py", "test_one", "red-31")
        assert not covered.is_covered("tests/test_a.py", "test_two", "red-3")
        assert not covered.is_covered("tests/test_b.py", "test_one", "red-3")


def test_a_name_of_no_cell_and_a_test_without_cells_are_told() -> None:
    assert problems("red-2", "red-3", "blue-2", "blue-3") == []
    assert problems("red-2", "blue-3") == ["tests/test_a.py::test_one has no cell 'blue-2'"]
    assert problems("red-2", "blue-2") == ["tests/test_a.py::test_one has no cell left that runs without --whole"]


def test_files_that_were_not_collected_are_not_judged() -> None:
    with mock.patch.object(covered, "COVERED", TABLE):
        assert covered.stale([("tests/test_b.py", "test_one", "red-2")]) == []


def test_every_file_is_there() -> None:
    assert [file for file in covered.COVERED if not (ROOT / file).is_file()] == []
