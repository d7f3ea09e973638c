"""`%guava_predict --show`: predictions beside what the data set says, with a picture of both where the samples are images."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from IPython.core.error import UsageError

from guava_nb.notebook.display import show, show_png
from guava_nb.render.confusion import confusion_view, counts_of

__all__ = ["check_can_show", "show_classes"]

#: Samples that are loaded again to be compared; loading them all may take as long as predicting did.
_MOST_SAMPLES = 2_000
_MOST_IMAGES = 12
_MOST_CLASSES = 1_000


def check_can_show(loader: Any) -> None:
    """Refuse what --show cannot do, before anything is predicted.

    Raises:
        UsageError: the data has no samples by index.
    """
    dataset = getattr(loader, "dataset", None)
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UsageError(
            "--show looks up each sample in the data set by its index, and this data has no indices: give a DataLoader over a "
            "data set with __getitem__ and __len__, or leave --show out"
        )


def show_classes(loader: Any, found: Any, ui: str) -> None:
    """Show how predictions and targets agree: a table; and where pages show pictures, who is taken for whom, and samples.

    Raises:
        UsageError: the samples are no (input, class).
    """
    best = np.asarray(found["predictions"]).reshape(found["total_samples"], -1)[:, 0]
    known = np.flatnonzero(np.asarray(found["sample_ids"]) >= 0)
    chosen = known[:: max(1, -(-len(known) // _MOST_SAMPLES))]
    if not len(chosen):
        raise UsageError(
            "--show compares predictions with the classes of their samples, and this loader does not tell which sample each row "
            "is: give a DataLoader over a data set with indices, or leave --show out. The results themselves are complete"
        )
    samples = [loader.dataset[int(found["sample_ids"][row])] for row in chosen]
    targets, predicted = [_class_of(sample) for sample in samples], [int(best[row]) for row in chosen]
    count = 1 + max(*targets, *predicted)
    names = _names_of(loader.dataset, count)
    note = f"compared on {len(chosen)} of {found['total_samples']} samples" if len(chosen) < len(best) else ""
    show(confusion_view(targets, predicted, names, note), ui)
    if ui in ("text", "none") or count > _MOST_CLASSES:
        return
    from guava_nb.render.pictures import classes_png  # matplotlib takes a second

    order = sorted(range(len(samples)), key=lambda k: predicted[k] == targets[k])[:_MOST_IMAGES]  # mistakes first
    images = [_image_of(samples[k][0]) for k in order]
    drawn = [k for k, image in zip(order, images, strict=True) if image is not None]
    titles = [_title(names, targets[k], predicted[k]) for k in drawn]
    shown = [image for image in images if image is not None]
    counts = counts_of(targets, predicted, count)
    show_png(classes_png(counts, names, shown, titles), "classes, and samples with their predictions")


def _title(names: Sequence[str], target: int, predicted: int) -> tuple[str, bool]:
    taken = names[predicted] if predicted >= 0 else "not sure"
    return (taken, True) if target == predicted else (f"{taken}, is {names[target]}", False)


def _class_of(sample: Any) -> int:
    with contextlib.suppress(TypeError, ValueError, IndexError, KeyError):
        target = np.asarray(sample[1])
        if target.size == 1 and (number := int(target.reshape(()))) == float(target.reshape(())) and number >= 0:
            return number
    raise UsageError(
        "--show needs samples of the form (input, class), with the class as a whole number from 0 on, and the samples of this "
        "data set are others: leave --show out. The results themselves are complete"
    )


def _names_of(dataset: Any, count: int) -> list[str]:
    given = getattr(dataset, "classes", None)
    named = [str(name) for name in given] if isinstance(given, list | tuple) else []
    return [named[k] if k < len(named) else str(k) for k in range(count)]


def _image_of(value: Any) -> np.ndarray | None:
    """An input as a picture, [rows, columns] or [rows, columns, 3], between 0 and 1; None where it is none."""
    try:
        image = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    if image.ndim == 3 and image.shape[0] in (1, 3) and image.shape[2] not in (1, 3):
        image = image.transpose(1, 2, 0)
    image = image[:, :, 0] if image.ndim == 3 and image.shape[2] == 1 else image
    if image.ndim not in (2, 3) or min(image.shape[:2]) < 4 or (image.ndim == 3 and image.shape[2] != 3):
        return None
    if not np.isfinite(image).all():
        return None
    low, high = float(image.min()), float(image.max())
    return (image - low) / ((high - low) or 1.0)
