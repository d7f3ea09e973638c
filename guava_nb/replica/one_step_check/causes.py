"""Why a batch in pieces comes to something else than the whole one: one cause after another is taken away."""

from __future__ import annotations

import functools
from typing import Any

from guava_nb.replica.one_step_check.differences import Measured, differ, is_counted_unlike, is_spanned, is_sum
from guava_nb.replica.one_step_check.taken_away import WithoutFrequencies, is_repeated
from guava_nb.replica.one_step_check.treated_first import Pieces, treated_first

__all__ = [
    "BACKWARD", "BATCH_STATISTICS", "COUNT", "COUPLED", "FREQUENCY", "RANDOMNESS", "STATE", "SUM", "TERM", "TREATED", "WEIGHTS",
    "causes_of",
]  # fmt: skip

#: Causes of a difference.
BATCH_STATISTICS, RANDOMNESS, WEIGHTS, COUPLED = "batch_statistics", "randomness", "weights", "coupled"
#: The loss adds its samples up where a mean was expected; a term of it that is no sum over samples counts in each piece.
SUM, TERM = "sum", "term"
#: The counts that a step returns for pieces do not add up to that of the whole batch.
COUNT = "count"
#: Embeddings divide gradients by how often an index stands in the batch.
FREQUENCY = "frequency"
#: The user's step calls backward by itself: that gradient counts in full, whatever the share of the samples.
BACKWARD = "backward"
#: Something out of reach changes with each call: the same batch gives another loss with the same random numbers.
STATE = "state"
#: What augments or prepares a batch compares its samples, and the loss does not.
TREATED = "treated"


def causes_of(trial: Any, whole: Pieces, pieces: Pieces, one: Measured) -> tuple[str, ...]:
    """Take away one cause after another, and see whether the difference goes with it.

    Args:
        trial: measures, a `whole_against_cut.Trial`.
        whole, pieces: that came to different numbers.
        one: of the whole.
    """
    if differ(one, trial.measure(whole)):
        return (STATE,)
    if differ(one, trial.measure(whole, seed=1)) or any("." in name for name in trial.unruly):
        return (RANDOMNESS,)  # streams of the user's own begin nowhere else with another seed
    causes = []
    with trial.fixed_statistics() as fixed:
        if fixed:
            causes.append(BATCH_STATISTICS)
            one = trial.measure(whole)
            if not differ(one, trial.measure(pieces)):
                return tuple(causes)
        if trial.has_backward or trial.has_gathered:
            return (*causes, BACKWARD if trial.has_backward else COUPLED)
        if trial.preprocessing.is_any and _is_by_treatment(trial, whole, pieces):
            return (*causes, TREATED)
        parts = [trial.measure([piece]) for piece in pieces]
        with WithoutFrequencies() as evenly:
            if not differ(trial.measure(whole), trial.measure(pieces)) and evenly.found:
                return (*causes, FREQUENCY)
    if is_counted_unlike(one, parts):
        return (*causes, COUNT)
    if is_sum(one, parts):
        return (*causes, SUM)
    if is_repeated(one, parts, functools.partial(trial.measure, whole), trial.model):
        return (*causes, TERM)
    return (*causes, WEIGHTS if is_spanned(one, parts) else COUPLED)


def _is_by_treatment(trial: Any, whole: Pieces, pieces: Pieces) -> bool:
    """Whether pieces that are cut from the batch as `augment` and `preprocess` left it come to what it does."""
    try:
        with treated_first(trial, whole, pieces) as (batch, parts):
            return not differ(trial.measure(batch), trial.measure(parts))
    except Exception:  # of the user's functions, or what they return cannot be cut
        return False
