"""The blocks of a model: modules that repeat, found without knowing any architecture.

A block is a member of a ModuleList or Sequential whose members, two or more, are of one class and have parameters.
Containers inside blocks do not count again.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from guava_nb.errors import ConfigError

__all__ = ["matching", "repeated_blocks"]


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost repeated blocks by their names, in order."""
    found: dict[str, nn.Module] = {}
    _search(model, "", found)
    return found


def _search(module: nn.Module, prefix: str, found: dict[str, nn.Module]) -> None:
    children = list(module.named_children())
    if isinstance(module, nn.ModuleList | nn.Sequential):
        kinds: dict[type[nn.Module], list[tuple[str, nn.Module]]] = {}
        for name, child in children:
            if any(True for _ in child.parameters()) and any(True for _ in child.children()):
                kinds.setdefault(type(child), []).append((name, child))
        repeated = {name: child for members in kinds.values() if len(members) > 1 for name, child in members}
        found.update({prefix + name: child for name, child in children if name in repeated})
        children = [(name, child) for name, child in children if name not in repeated]
    for name, child in children:
        _search(child, f"{prefix}{name}.", found)


def matching(model: nn.Module, patterns: Sequence[str], setting: str, must_match: bool = True) -> dict[str, nn.Module]:
    """Return the modules whose names match any of the patterns; "*" alone is every repeated block.

    Args:
        model: where to look.
        patterns: shell patterns over full module names, for instance "layers.*".
        setting: what they were given for, for the message.
        must_match: whether a pattern that finds nothing is a mistake.

    Raises:
        ConfigError: a pattern matches no module.
    """
    named = dict(model.named_modules())
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        hits = (
            repeated_blocks(model)
            if pattern == "*"
            else {name: m for name, m in named.items() if name and fnmatchcase(name, pattern)}
        )
        if not hits and must_match:
            names = ", ".join(name for name in list(named)[1:9])
            problem = "finds no repeated block" if pattern == "*" else "matches no module"
            raise ConfigError(f"{setting} {pattern!r} {problem}; modules here are {names}")
        chosen.update(hits)
    return {name: module for name, module in named.items() if name in chosen}
