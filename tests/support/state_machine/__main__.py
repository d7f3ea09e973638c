"""Play many runs and print what they came to: `python -m tests.support.state_machine [--seconds N] [--seed N]`.

Without a seed the present time is the first one; a violation is printed with what repeats it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter

from guava_nb.protocol.messages import MESSAGE_KINDS
from tests.support.explorer.search import Violation
from tests.support.state_machine.machine import Play, ground, play

_WORKERS = ("honest", "honest", "slow", "buggy", "hostile")
_EXCHANGES = ("star", "star", "site", "group", "parts")
_FAULTS = ("cut", "die", "join", "late", "leave", "interrupt")


def _drawn(seed: int) -> Play:
    luck = random.Random(seed)
    exchange = luck.choice(_EXCHANGES)
    workers = tuple(luck.choice(_WORKERS) for _ in range(luck.choice((1, 2, 3))))
    if exchange in ("group", "parts") and len(workers) < 2:
        workers += ("honest",)
    faults = dict.fromkeys(luck.sample(_FAULTS, luck.choice((0, 1, 2, 3))), 1)
    return Play(
        exchange, workers, seed, most=luck.choice((10, 40, 120)), faults=faults, cached=luck.random() < 0.3,
        validates=luck.random() < 0.4, ahead=luck.choice((0, 1, 2)),
    )  # fmt: skip


def main(words: list[str]) -> int:
    """Play until the time is up; returns 1 where an invariant did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.state_machine")
    parser.add_argument("--seconds", type=float, default=600.0, help="for so long (default: 600)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first run")
    asked = parser.parse_args(words)
    states, sent, seed = Counter[str](), Counter[str](), asked.seed
    failed, until = 0, time.monotonic() + asked.seconds
    warnings.simplefilter("ignore", UserWarning)  # what a liar found out about its batches
    with ground():
        while time.monotonic() < until:
            played = _drawn(seed)
            try:
                outcome = play(played)
                states[f"{played.exchange} {outcome.state}"] += 1
                sent.update({record.__name__: count for record, count in outcome.sent.items()})
            except Violation as violation:
                failed = 1
                print(f"--seed {seed}: {played.exchange} {played.workers} {played.faults}: {violation}", flush=True)
            seed += 1
    print(f"{seed - asked.seed} runs from seed {asked.seed}: {dict(sorted(states.items()))}")
    least = sorted((sent[record.__name__], record.__name__) for record in MESSAGE_KINDS.values())[:3]
    print(f"{sum(sent.values())} messages beside the workers' own, of each record at least {least}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
