"""What only one worker has in rounds of local steps, and how a person is told that it is lost."""

from __future__ import annotations

from guava_nb.cluster.cluster import Cluster
from guava_nb.protocol.messages import RunSpec

__all__ = ["tell_own_state_lost"]


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
