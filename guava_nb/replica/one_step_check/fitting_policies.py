"""Which buffers workers would leave otherwise than one process, and by which rule they would not.

A buffer of whole numbers that goes up by 8 at each of two workers with 4 samples may count tokens, then both are added up, or
the length of the texts, then one is right. A batch, whole and in pieces, shows which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from guava_nb.parallel.replicas.buffer_policy import policy_of
from guava_nb.replica.one_step_check.differences import Measured, is_unlike

__all__ = ["unlike_buffers"]

#: By the policy that a person can name, those under which the pieces must come to the same as the whole: what is taken of one
#: worker must be alike at all of them, or another batch would show another one. In the order in which they are tried.
_NEEDED = {"first": {"first", "average"}, "sum": {"sum"}, "average": {"average"}}


def unlike_buffers(
    one: Measured, many: Measured, moved: Sequence[str], policies: str, counted: Mapping[str, bool],
    measure: Callable[..., Measured],
) -> tuple[tuple[str, ...], dict[str, str]]:  # fmt: skip
    """Return the buffers that pieces leave otherwise than the whole batch; of others the policy by which they do not.

    What the usual rules add up because it differs, and would take once where it happens to be alike, has the policy "sum", too.

    Args:
        one, many: of the whole batch, and of its pieces by the usual rules.
        moved: buffers that one of them changed.
        policies: the run's option.
        counted: what the usual rules took for a count of samples, by name.
        measure: measures the pieces once more, by other `policies`.
    """
    unlike = [name for name in moved if is_unlike(one.buffers[name], many.buffers.get(name))]
    # Of fractions the mean is right already, and a sum is not.
    unsure = {name for name in moved if not (counted.get(name) or one.buffers[name].is_floating_point())}
    free = [name for name in moved if policy_of(policies, name) == "auto" and (name in unlike or name in unsure)]
    fits = _fitting(free, one.buffers, {way: measure(policies=way).buffers for way in _NEEDED}) if free else {}
    fits = {name: policy for name, policy in fits.items() if name in unlike or policy == "sum"}
    return tuple(name for name in unlike if name not in fits), fits


def _fitting(
    names: Iterable[str], whole: Mapping[str, Tensor], cut: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, str]:
    """Return the first policy that gives a buffer the value `whole`, of its shape, by the buffer's name.

    Args:
        names: of the buffers.
        whole: their values after the whole batch.
        cut: by policy, their values after the pieces.
    """
    found: dict[str, str] = {}
    for name in names:
        fits = {policy for policy, after in cut.items() if not is_unlike(whole[name], after.get(name))}
        if policy := next((one for one, needed in _NEEDED.items() if fits >= needed), ""):
            found[name] = policy
    return found
