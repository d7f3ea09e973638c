"""What a live panel had room for once, it keeps."""

from __future__ import annotations

from guava_nb.notebook.panel.surfaces import Steady
from guava_nb.render import Progress, Table, View


def view(facts: dict[str, str], notes: tuple[str, ...] = (), bar: bool = True) -> View:
    workers = Table(("worker",), (("w",),))
    return View("training", "", Progress(1, 2) if bar else None, (Table((), tuple(facts.items())), workers), notes)


def test_a_fact_that_is_no_more_leaves_its_row_and_a_note_its_line() -> None:
    steady = Steady()
    steady.of(view({"wire": "1 B", "loaded": "2 batches"}, ("w was lost", "w is back")))
    later = steady.of(view({"wire": "2 B"}, ("w is back",)))
    assert later.tables[0].rows == (("wire", "2 B"), ("loaded", "-"))
    assert later.tables[1].rows == (("w",),)
    assert len(later.notes) == 2 and not later.notes[1].strip()


def test_it_begins_anew_where_a_bar_comes() -> None:
    steady = Steady()
    assert steady.of(view({"a": "1"}, ("x",), bar=False)) == view({"a": "1"}, ("x",), bar=False)
    assert steady.of(view({"wire": "1 B"})).tables[0].rows == (("wire", "1 B"),)
