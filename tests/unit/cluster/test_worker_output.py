from __future__ import annotations

from pathlib import Path

import pytest

from guava_nb.cluster.worker_output import KEPT_CHARS, KEPT_LINES, KEPT_WORKERS, MAX_LINE, OutputLog
from guava_nb.processes.pipe import ending_text


def test_lines_by_worker_with_names_in_front_of_all(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "logs")
    log.add("a", "stdout", ["one"])
    log.add("b", "stderr", ["two"], dropped=3)
    assert log.tail("a") == ["one"]
    assert log.tail() == [
        "a | one",
        "b | [stderr] two",
        "b | [3 lines left out here; the worker's own log file has them]",
    ]
    assert log.tail("nobody") == []
    assert log.path("a").read_text().endswith("one\n")


def test_new_lines_are_told_apart_by_their_number_and_not_by_their_words() -> None:
    log = OutputLog(None)
    log.add("a", "stdout", ["same"])
    seen = log.count("a")
    log.add("a", "stdout", ["same", "same"])
    assert log.since("a", seen) == (["same", "same"], 3)
    assert log.since("a", 3) == ([], 3) and log.since("b", 0) == ([], 0)
    log.add("a", "stdout", [str(k) for k in range(3 * KEPT_LINES)])
    lines, _ = log.since("a", 3)
    assert str(2 * KEPT_LINES) in lines[0] and lines[1:] == [str(k) for k in range(2 * KEPT_LINES, 3 * KEPT_LINES)]


def test_memory_is_bounded() -> None:
    log = OutputLog(None)
    log.add("a", "stdout", [str(k) for k in range(3 * KEPT_LINES)])
    assert len(log.tail("a", 10 * KEPT_LINES)) == KEPT_LINES


def test_the_tail_of_a_dead_worker_adds_only_what_had_not_come() -> None:
    log = OutputLog(None)
    log.add("a", "stdout", ["1", "2"])
    log.add_tail("a", ["1", "2", "segmentation fault"])
    assert log.tail("a") == ["1", "2", "segmentation fault"]


@pytest.mark.parametrize(
    ("status", "tail", "said"),
    [
        (7, ["bye", ""], "exit status 7; last line: bye"),
        (-9, ["fw 32"], "signal 9 (killed; often by the system for lack of memory); last line: fw 32"),
        (-15, [], "signal 15; it printed nothing"),
        (-11, ["Fatal Python error: X", '  File "<cell a>", line 3', "np.core"],
         'signal 11; last line: Fatal Python error: X at File "<cell a>", line 3'),
    ],
)  # fmt: skip
def test_the_end_of_a_process_in_words(status: int, tail: list[str], said: str) -> None:
    assert ending_text(status, tail) == said


def test_a_worker_s_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    log = OutputLog(tmp_path)
    log.add("../../evil", "stdout", ["x"])
    assert log.path("../../evil").parent == tmp_path
    assert [p.name for p in tmp_path.iterdir()] == [".._.._evil.log"]


def test_a_line_without_an_end_is_cut() -> None:
    log = OutputLog(None)
    log.add("a", "stdout", ["x" * MAX_LINE, "y" * (MAX_LINE + 7)])
    assert log.tail("a") == ["x" * MAX_LINE, "y" * MAX_LINE + " [7 characters more]"]


def test_lines_in_memory_are_bounded_in_bytes_and_by_workers() -> None:
    log = OutputLog(None)
    for _ in range(5):
        log.add("w", "stdout", ["x" * 5_000_000] * 400)
    assert sum(map(len, log.tail("w", 10_000))) <= KEPT_CHARS
    for k in range(3 * KEPT_WORKERS):
        log.add(f"v{k}", "stdout", ["a"])
    assert log.tail("w") == [] and len(log.tail(None)) == KEPT_WORKERS and log.tail(f"v{3 * KEPT_WORKERS - 1}") == ["a"]
