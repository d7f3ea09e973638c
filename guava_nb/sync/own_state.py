"""What only one worker has in rounds of local steps, and how a person is told that it is lost."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from guava_nb.cluster.cluster import Cluster
from guava_nb.protocol.messages import RunSpec, SavedState
from guava_nb.replica.buckets import BucketLayout, message_format

__all__ = [
    "MOST_WORKERS",
    "OwnParts",
    "deal_parts",
    "tell_not_kept",
    "tell_own_state_lost",
    "tell_parts_missing",
    "tell_sums_lost",
]

#: A checkpoint has room for the own parts of so many workers.
MOST_WORKERS = 1 << 12


@dataclass(frozen=True, slots=True)
class OwnParts:
    """What each worker keeps on its disk, beside a checkpoint, of what only it has.

    Attributes:
        number: of the part of the worker at the first place; those after it follow.
        count: of workers.
        step: after which that is.
        sums: what sums left out on their way to the workers, `[numel]` by bucket, which the orchestrator has.
    """

    number: int
    count: int
    step: int
    sums: Mapping[str, Tensor]

    @classmethod
    def new(cls, step: int, count: int, sums: Mapping[str, Tensor]) -> OwnParts:
        """Return parts with numbers that no others have."""
        return cls(MOST_WORKERS * (1 + secrets.randbits(38)), min(count, MOST_WORKERS), step, dict(sums))

    @property
    def record(self) -> dict[str, Any]:
        """What a checkpoint has of it, as plain data."""
        return {"number": self.number, "count": self.count, "sums": self.sums}

    @property
    def numbers(self) -> range:
        """Of all parts."""
        return range(self.number, self.number + self.count)


def deal_parts(numbers: Collection[int], found: Mapping[int, Collection[int]]) -> dict[int, int]:
    """Deal the parts that lie on workers' disks: one to a worker, to as many as can have one.

    Several workers may see the same disk.

    Args:
        numbers: of all parts.
        found: by rank the numbers that it sees.

    Returns:
        By rank the number of its part.
    """
    taken: dict[int, int] = {}  # by number who has it

    def gets_one(rank: int, seen: set[int]) -> bool:
        for number in found[rank]:
            if number in numbers and number not in seen:
                seen.add(number)
                if number not in taken or gets_one(taken[number], seen):
                    taken[number] = rank
                    return True
        return False

    for rank in sorted(found):
        gets_one(rank, set())
    return {rank: number for number, rank in taken.items()}


def tell_not_kept(cluster: Cluster, kept: Mapping[int, SavedState | Any]) -> None:
    """Tell which workers keep no part of their own for a checkpoint.

    Args:
        cluster: shows it.
        kept: by rank what came of the order to keep it.
    """
    for rank, saved in kept.items():
        is_kept = isinstance(saved, SavedState) and not saved.problem
        if not is_kept and rank in cluster.roster.ready():
            why = saved.problem if isinstance(saved, SavedState) else "it gave no answer in time"
            cluster.notice(
                f"{cluster.name(rank)} keeps nothing beside a checkpoint on its disk: {why}. A run that goes on from that "
                "checkpoint begins there with a copy of another worker's optimizer state"
            )


def tell_sums_lost(cluster: Cluster, spec: RunSpec, layout: BucketLayout, own: OwnParts | None) -> None:
    """Tell that a process that is gone took along what its sums had left out; nothing where sums leave nothing out.

    Args:
        cluster: shows it.
        spec, layout: of the run.
        own: what its workers kept; None where there is nothing of the kind.
    """
    are_short = own is not None and any(
        bucket.wire_format is not None and not bucket.is_mean_of_senders and not bucket.is_forwarded(own.count)
        for bucket in layout.buckets
    )
    if are_short:
        cluster.notice(
            f"what the sums of the rounds had left out ({message_format(spec)[0].name}) was in the process that is gone, and is "
            "lost: the run goes on from the same weights, and not bit for bit"
        )


def tell_parts_missing(cluster: Cluster, count: int, without: Collection[int], found: int) -> None:
    """Tell what a run that goes on from a checkpoint lacks of what its workers had; nothing where all of it is there.

    Args:
        cluster: shows it.
        count: of workers that kept a part.
        without: ranks that got none.
        found: how many got one.
    """
    if found < count:
        names = " and ".join(map(cluster.name, sorted(without)))
        then = f": {names} begins with a copy of another worker's" if names else ""
        cluster.notice(
            f"{count - found} of {count} workers' own parts of this checkpoint (sync='local': optimizer state, and what messages "
            f"had left out) are on no disk of a worker that is here, and are lost{then}. The run goes on from the same weights, "
            "and not bit for bit"
        )


def tell_own_state_lost(cluster: Cluster, spec: RunSpec, rank: int, happened: str) -> None:
    """Tell that a worker's own optimizer state, and what its messages left out, is lost; in step sync there is none.

    Args:
        cluster: shows it.
        spec: of the run that the worker took part in.
        rank: of the worker.
        happened: to it, such as "left".
    """
    if spec.rounds is None:
        return
    owed = cluster.roster.members[rank].owed
    rest = ", and how far its own weights were from the common ones" if spec.rounds.sync_delay else ""
    if owed:
        rest += f", and what its messages had left out so far, {owed:.2g} times the length of its last pseudo-gradient"
    cluster.notice(
        f"{cluster.name(rank)} {happened}, and what only it had in this run (sync='local') is lost: the state of its own "
        f"optimizer{rest}. The others keep theirs, a worker that joins gets a copy of another's optimizer state, and no "
        "sample is lost with it"
    )
