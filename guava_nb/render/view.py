"""What is shown, before anyone decided how: titles, facts, tables, a progress.

Text and HTML are two renderings of one `View`, so the plain-text twin can never tell another story than the panel.
"""

from __future__ import annotations

from dataclasses import dataclass

from guava_nb.status import DeviceUse, Points

__all__ = ["Curve", "Progress", "Table", "View"]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of finished strings. Without `columns` it is a list of facts: a name and a value per row.

    Attributes:
        faint: numbers of the rows of what is gone.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    faint: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far something is; `total` is None while it is not known."""

    done: int
    total: int | None
    unit: str = "step"

    @property
    def fraction(self) -> float | None:
        """Done over total between 0 and 1, None while the total is unknown."""
        return None if not self.total else min(1.0, self.done / self.total)


@dataclass(frozen=True, slots=True)
class Curve:
    """What charts show where pictures can be shown.

    Attributes:
        losses, val: in training and in validation.
        scores: what validations measured beside the loss, by name.
        last_step: of the whole run; None while it is not known.
        devices: how they were used.
    """

    losses: Points
    val: Points = ()
    scores: tuple[tuple[str, Points], ...] = ()
    learning_rates: Points = ()
    gradient_norms: Points = ()
    last_step: int | None = None
    devices: tuple[DeviceUse, ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """One thing to show.

    Attributes:
        title: one or two words, "training" for instance.
        headline: the numbers that change, short enough for one line beside a progress bar.
        progress: what a bar shows; None draws no bar.
        tables: shown in order; tables without rows are left out.
        notes: one sentence each.
        curve: for a picture; text and tables tell the same without it.
    """

    title: str
    headline: str = ""
    progress: Progress | None = None
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    curve: Curve | None = None
