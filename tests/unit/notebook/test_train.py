"""What words of a line of %guava_train stand for, beyond what the table of options tells."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.error import UsageError

from guava_nb.notebook.commands import TRAIN
from guava_nb.notebook.train import training_arguments

ONE, TWO, THREE = object(), object(), object()
NAMES = {"loader": [1], "one": ONE, "more": [TWO, THREE], "made": lambda: ONE}


def callbacks(word: str) -> Any:
    args = TRAIN.parse(f"--model Net --loss L --data loader --callbacks {word}", NAMES)
    assert args is not None
    return training_arguments(args, NAMES)["callbacks"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("one", [ONE]),
        ("one,more", [ONE, TWO, THREE]),
        ("'one, one'", [ONE, ONE]),
        ("'[made()] + more'", [ONE, TWO, THREE]),
    ],
)
def test_callbacks_are_objects_and_lists_of_the_notebook_by_name(word: str, expected: list[object]) -> None:
    assert callbacks(word) == expected


def test_an_unknown_callback_is_named_with_the_near_one() -> None:
    with pytest.raises(UsageError, match=r"--callbacks oen: this notebook has no variable oen.*one"):
        callbacks("oen")
