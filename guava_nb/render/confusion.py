"""Predicted classes beside true ones, as a view: how many are right, and what is taken for what. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from guava_nb.render.values import show_percent
from guava_nb.render.view import Table, View

__all__ = ["confusion_view", "counts_of"]

_MOST_ROWS = 10


def counts_of(targets: Sequence[int], predicted: Sequence[int], num_classes: int) -> list[list[int]]:
    """Return how often each class was taken for each: a row per true class, a column per predicted one."""
    pairs = Counter(zip(targets, predicted, strict=True))
    return [[pairs[is_, taken] for taken in range(num_classes)] for is_ in range(num_classes)]


def confusion_view(targets: Sequence[int], predicted: Sequence[int], names: Sequence[str], note: str = "") -> View:
    """Return the share that is right, and the most frequent mistakes.

    Args:
        predicted: -1 where the model was not sure enough.
        names: of the classes.
        note: a sentence below.
    """
    pairs = list(zip(targets, predicted, strict=True))
    wrong = Counter((is_, taken) for is_, taken in pairs if is_ != taken)
    right = len(pairs) - sum(wrong.values())
    rows = tuple(
        (names[is_], names[taken] if taken >= 0 else "not sure", str(count), show_percent(count / targets.count(is_)))
        for (is_, taken), count in wrong.most_common(_MOST_ROWS)
    )
    head = f"{right} of {len(pairs)} right, {show_percent(right / len(pairs))}" if pairs else "no samples"
    table = Table(("class", "taken for", "times", "of its class"), rows)
    return View("classes", head, None, (table,), (note,) if note else ())
