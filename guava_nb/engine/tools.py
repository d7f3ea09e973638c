"""Which exchange and which evaluation go with an ensemble: replicas have a star, parts of one model have a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from guava_nb.engine.credit import Credit
from guava_nb.engine.ensemble import Ensemble
from guava_nb.engine.evaluation import Evaluation
from guava_nb.engine.group_ensemble import GroupEnsemble, GroupLost
from guava_nb.engine.group_evaluation import GroupEvaluation
from guava_nb.engine.group_exchange import GroupExchange
from guava_nb.engine.star import OnApplied, OnCommit, StarExchange

if TYPE_CHECKING:
    from guava_nb.engine.job import Job

__all__ = ["AnyEvaluation", "AnyExchange", "GroupLost", "evaluation_for", "tools_for"]

AnyEvaluation = Evaluation | GroupEvaluation
AnyExchange = StarExchange | GroupExchange


def evaluation_for(job: Job, ensemble: Ensemble) -> AnyEvaluation:
    """Return what validates on this ensemble."""
    return GroupEvaluation(job, ensemble) if isinstance(ensemble, GroupEnsemble) else Evaluation(job, ensemble)


def tools_for(
    job: Job, ensemble: Ensemble, on_commit: OnCommit, on_applied: OnApplied, credit: Credit
) -> tuple[AnyEvaluation, AnyExchange]:
    """Return what validates on this ensemble and what does its steps."""
    evaluation = evaluation_for(job, ensemble)
    if isinstance(ensemble, GroupEnsemble):
        return evaluation, GroupExchange(job, ensemble, on_commit, on_applied, credit)
    return evaluation, StarExchange(job, ensemble, on_commit, on_applied, credit)
