"""The user's files as records: what is read, what is left out, what is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from guava_nb.errors import ConfigError
from guava_nb.spec import user_files
from guava_nb.spec.user_files import read_files


def test_files_and_folders_by_their_own_names(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_bytes(b"A = 1\r\n")
    package = tmp_path / "parts"
    (package / "__pycache__").mkdir(parents=True)
    (package / "__pycache__" / "x.py").write_text("")
    (package / ".hidden").write_text("secret")
    (package / "heads.py").write_text("B = 'ü'\n")
    (package / "weights.bin").write_bytes(b"\xff\x00")
    files, notes = read_files([tmp_path / "mine.py", package])
    assert {file.path: file.text for file in files} == {"mine.py": "A = 1\r\n", "parts/heads.py": "B = 'ü'\n"}
    assert all(hashlib.sha256(file.text.encode()).hexdigest() == file.sha256 for file in files)
    assert [note for note in notes if "weights.bin is no text" in note] == notes and len(notes) == 1


def test_what_cannot_be_sent_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.bin").write_bytes(b"\x00")
    (tmp_path / "json.py").write_text("")
    for name, words in (("nowhere.py", "no file or folder"), ("data.bin", "is no text"), ("json.py", "would hide")):
        with pytest.raises(ConfigError, match=words):
            read_files([tmp_path / name])
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(folder)
    with pytest.raises(ConfigError, match=r"two files are called same\.py"):
        read_files([tmp_path / "one" / "same.py", tmp_path / "two" / "same.py"])
    monkeypatch.setattr(user_files, "_MOST_BYTES", 5)
    (tmp_path / "one" / "more.py").write_text("more")
    with pytest.raises(ConfigError, match="these are more than"):
        read_files([tmp_path / "one"])
    (tmp_path / "long.py").write_text("123456")
    with pytest.raises(ConfigError, match="of at most"):
        read_files([tmp_path / "long.py"])


@pytest.mark.parametrize("given", ["..", "/", "~"])
def test_a_folder_that_holds_more_than_code_is_refused(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "secret.txt").write_text("s")
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(ConfigError, match="holds more than your code, and every worker would get it"):
        read_files([given])
