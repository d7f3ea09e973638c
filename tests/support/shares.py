"""One long table done by several processes: each takes blocks of its cells, and their lines and counts come together again."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["BLOCK", "Share", "add_arguments", "own_share", "run_jobs", "say_counts"]

#: Neighbours in a table share their mode, whose change costs more than a cell: they stay together.
BLOCK = 6
_COUNTS = "counts of this share: "
Cell = TypeVar("Cell")
Share = tuple[int, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--jobs N`, and the `--share K/N` that such a run gives each of its processes."""
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that share the cells; one for two cores is right"
    )
    parser.add_argument("--share", type=_share, help=argparse.SUPPRESS)


def _share(text: str) -> Share:
    number, of = text.split("/")
    return int(number), int(of)


def own_share(cells: Sequence[Cell], share: Share | None, block: int = BLOCK) -> list[Cell]:
    """The cells of one share: all of them together are all cells, each once."""
    if share is None:
        return list(cells)
    return [cell for place, cell in enumerate(cells) if place // block % share[1] == share[0]]


def say_counts(counts: Counter[str], share: Share | None) -> None:
    """Print the counts: in words, or for the process that puts the shares together."""
    if share is not None:
        print(_COUNTS + json.dumps(counts), flush=True)
    else:
        print(
            f"{sum(counts.values())} cells: " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        )


def run_jobs(module: str, words: Sequence[str], jobs: int) -> Counter[str]:
    """Run `python -m MODULE WORDS --share K/JOBS` for every K at one time, print their lines as they come, add their counts.

    A process that ends without its counts is counted as "share without an end", with its last lines printed.
    """
    total: Counter[str] = Counter()
    lock = threading.Lock()

    def one(number: int) -> None:
        command = [sys.executable, "-m", module, *words, "--share", f"{number}/{jobs}"]
        counted = False
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                with lock:
                    if line.startswith(_COUNTS):
                        total.update(json.loads(line.removeprefix(_COUNTS)))
                        counted = True
                    else:
                        print(line, end="", flush=True)
        if not counted:
            with lock:
                total["share without an end"] += 1

    threads = [threading.Thread(target=one, args=(number,)) for number in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return total
