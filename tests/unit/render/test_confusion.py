"""What is taken for what."""

from __future__ import annotations

from guava_nb.render import to_text
from guava_nb.render.confusion import confusion_view, counts_of


def test_the_most_frequent_mistakes_stand_first() -> None:
    targets, predicted = [0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 0, -1]
    view = confusion_view(targets, predicted, ["cat", "dog", "cow"], "compared on 6 of 60 samples")
    assert view.headline == "2 of 6 right, 33 %" and view.notes == ("compared on 6 of 60 samples",)
    assert view.tables[0].rows[0] == ("cat", "dog", "2", "67 %")
    assert ("cow", "not sure", "1", "100 %") in view.tables[0].rows
    assert counts_of(targets, predicted, 3) == [[1, 2, 0], [1, 1, 0], [0, 0, 0]]
    assert to_text(confusion_view([], [], [])) == "classes: no samples"
