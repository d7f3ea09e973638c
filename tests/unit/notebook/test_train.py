"""What words of a line of %guava_train stand for, beyond what the table of options tells."""

from __future__ import annotations

from pathlib import Path
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


def test_a_folder_that_takes_no_files_is_told_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def line(folder: Path) -> Any:
        words = f"--model Net --loss L --data loader --checkpoint-dir {folder}"
        return training_arguments(TRAIN.parse(words, NAMES), NAMES)

    assert line(tmp_path / "new")["checkpoint_dir"] == tmp_path / "new" and list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="there is no folder"):
        line(tmp_path / "new" / "deep")

    def closed(dir: Path) -> Any:
        raise OSError(30, "Read-only file system", str(dir))

    monkeypatch.setattr("guava_nb.notebook.train.tempfile.TemporaryFile", closed)
    told = rf"--checkpoint-dir {tmp_path}: {tmp_path} takes no files \(Read-only file system\); name another folder"
    with pytest.raises(UsageError, match=told):
        line(tmp_path)
