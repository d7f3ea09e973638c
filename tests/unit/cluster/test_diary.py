from __future__ import annotations

import re
import threading
from pathlib import Path

from guava_nb.cluster import diary
from guava_nb.cluster.diary import Diary
from guava_nb.cluster.notices import Notices


def test_each_sentence_is_a_line_with_its_time_under_its_session(tmp_path: Path) -> None:
    path = tmp_path / "new" / "session.diary.txt"
    for session in ("one", "two"):
        book = Diary(lambda: path, session)
        assert book.path is None
        notices = Notices(book.add)
        notices.add("w1 joined:\n CPU")
        notices.replace("w1 left", "run")
        assert book.path == path
    assert re.fullmatch(
        r"(-- session (one|two)\n[\d-]+ [\d:]+ w1 joined: CPU\n[\d-]+ [\d:]+ w1 left\n){2}", path.read_text()
    )
    assert path.stat().st_mode & 0o077 == 0


def test_before_the_session_and_on_a_bad_disk_nothing_happens(tmp_path: Path) -> None:
    Diary(lambda: None, "one").add("early")
    (tmp_path / "file").touch()
    Diary(lambda: tmp_path / "file" / "diary.txt", "one").add("lost")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_it_grows_to_twice_its_limit_at_most(tmp_path: Path) -> None:
    path = tmp_path / "diary.txt"
    book = Diary(lambda: path, "one")
    for _ in range(5):
        book.add("x" * diary._MOST_BYTES)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["diary.txt", "diary.txt.1"]


def test_lines_of_many_threads_stay_whole(tmp_path: Path) -> None:
    book = Diary(lambda: tmp_path / "diary.txt", "one")
    threads = [threading.Thread(target=lambda: [book.add("word " * 20) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    lines = (tmp_path / "diary.txt").read_text().splitlines()
    assert len(lines) == 81 and all(line.count("word") == 20 for line in lines[1:])
