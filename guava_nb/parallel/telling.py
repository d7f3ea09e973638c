"""What a spread model looks like, in one sentence for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from guava_nb.parallel.plans import Plan

__all__ = ["describe"]

_WORDS = {
    "column": "columns of {}",
    "row": "rows of {}",
    "head": "classes of {}",
    "vocab": "words of {}",
    "attention": "heads of {}",
}


def describe(begins: Sequence[str], plan: Plan) -> str:
    """Say where stages begin and what ranks share; "" where there is neither.

    Args:
        begins: full name of the module that each stage begins with; empty without stages.
        plan: of the whole model.
    """
    texts = []
    if len(begins) > 1:
        stages = ", ".join(f"{number + 1} with {name}" for number, name in enumerate(begins))
        texts.append(f"stages begin: {stages}")
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
