"""What a spread model looks like, in one sentence for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from guava_nb.parallel.tensor.tensor_plan import Plan

__all__ = ["describe"]

#: How far above its fair share a stage may be before somebody should look at it.
_UNEVEN = 1.7

_WORDS = {
    "column": "columns of {}",
    "row": "rows of {}",
    "head": "classes of {}",
    "vocab": "words of {}",
    "attention": "heads of {}",
}


def describe(begins: Sequence[str], counts: Sequence[int], plan: Plan) -> str:
    """Say where stages begin and what ranks share; "" where there is neither.

    Args:
        begins: full name of the module that each stage begins with; empty without stages.
        counts: parameters of each stage.
        plan: of the whole model.
    """
    texts = []
    if len(begins) > 1:
        sized = zip(begins, counts, strict=True)
        stages = ", ".join(f"{at + 1} with {name} ({count:,} parameters)" for at, (name, count) in enumerate(sized))
        texts.append(f"stages begin: {stages}")
        most, fair = max(counts), sum(counts) / len(counts)
        if most > _UNEVEN * fair:
            texts.append(
                f"stage {counts.index(most) + 1} has {most / fair:.1f} times its fair share, because the model can be cut "
                "at calls of whole modules only: call its blocks one by one in the model's forward, or put them into an "
                "nn.Sequential"
            )
    kinds: dict[str, list[str]] = {}
    for name, split in plan.splits.items():
        kinds.setdefault(split.kind, []).append(name)
    if kinds:
        parts = [_WORDS[kind].format(_collapsed(names)) for kind, names in kinds.items()]
        texts.append(f"shared out: {'; '.join(parts)}; all else is whole on every worker")
    return ". ".join(texts)


def _collapsed(names: Iterable[str]) -> str:
    """Names of blocks that repeat, once: "blocks.*.up (x6)"."""
    counts: dict[str, list[str]] = {}
    for name in names:
        counts.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name), []).append(name)
    return ", ".join(f"{pattern} (x{len(same)})" if len(same) > 1 else same[0] for pattern, same in counts.items())
