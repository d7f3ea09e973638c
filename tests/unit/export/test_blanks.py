from __future__ import annotations

from pathlib import Path

from guava_nb.export.blanks import to_be_filled_in


def test_only_a_program_with_a_mark_is_to_be_filled_in(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("def build_data():\n    return 1\n", encoding="utf-8")
    assert to_be_filled_in(program) == ""
    program.write_text("# TO BE FILLED IN: the data\n", encoding="utf-8")
    assert to_be_filled_in(program).startswith(" ") and "--save-data" in to_be_filled_in(program)
