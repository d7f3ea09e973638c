"""How a batch is read, in words: told to people, and read again from what they give back.

    cut: image [8, 3, 64, 64], label [8]; cut on axis 1: frames [12, 8, 5]; one per sample: boxes [8]; whole: anchors [9, 4]

A part is named by its keys with dots between; the two of a pair are `inputs` and `targets`, a batch that is one tensor is
`batch`. A name stands for everything in it. Shapes are for people, and left out when the words are read. Knows only text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from guava_nb.errors import ConfigError
from guava_nb.nested import Path

__all__ = ["CUT", "WHOLE", "Given", "told"]

CUT, LISTS, WHOLE = "cut", "one per sample", "whole to every worker"
_SECTION = re.compile(r"\s*(?:(cut on axis (\d+)|cut|one per sample)|whole(?: to every worker)?)\s*:(.+)", re.DOTALL)
_MOST = 12  # parts of one kind that are told


class Given:
    """What a user says.

    Args:
        text: in the words above; "" says nothing.

    Attributes:
        names: of the parts, to the axis of their samples; -1: they have none.

    Raises:
        ConfigError: the text is none of this kind.
    """

    def __init__(self, text: str) -> None:
        self.names: dict[str, int] = {}
        for section in filter(str.strip, re.sub(r"\[[^\]]*\]", "", text).split(";")):
            found = _SECTION.fullmatch(section)
            if found is None:
                raise ConfigError(
                    f"batch= (--batch) has {section.strip()!r}; say it like 'cut: image, label; cut on axis 1: frames; "
                    "one per sample: boxes; whole: anchors', with the names that the status shows"
                )
            axis = -1 if found[1] is None else int(found[2] or 0)
            names = [name.strip() for name in found[3].split(",")]
            self.names.update({name: axis for name in names if name and not re.fullmatch(r"\d+ more", name)})

    def axis(self, name: str) -> int | None:
        """What was said of a part, or of what it is in: its axis, or -1; None: nothing."""
        while name not in self.names and "." in name:
            name = name.rpartition(".")[0]
        return self.names.get(name)

    def cut(self) -> list[tuple[str, int]]:
        """The parts that were named as having samples, with their axes."""
        return [(name, axis) for name, axis in self.names.items() if axis >= 0]

    def missing(self, names: Collection[str]) -> str:
        """The first name that is none of these; "" for none."""
        return next((name for name in self.names if name not in names), "")

    @staticmethod
    def name(path: Path, pair: bool) -> str:
        """A part's name; `pair`: the batch is a pair of inputs and targets."""
        keys = [re.sub(r"[,;:.\[\]]", "_", str(key)).strip() for key in path]
        if pair and keys:
            keys[0] = ("inputs", "targets")[int(path[0])]
        return ".".join(keys) or "batch"


def told(parts: Mapping[Path, tuple[str, str]], axes: Mapping[Path, int | None], lists: Collection[Path]) -> str:
    """Say how parts are read.

    Args:
        parts: name and shape of each, by its path.
        axes: of each, that has the samples; None: it travels whole.
        lists: those that are lists.
    """
    sections: dict[str, list[str]] = {}
    for path, (name, shape) in parts.items():
        axis = axes[path]
        kind = WHOLE if axis is None else LISTS if path in lists else f"cut on axis {axis}" if axis else CUT
        sections.setdefault(kind, []).append(f"{name} {shape}")
    return "; ".join(f"{kind}: {', '.join(_few(names))}" for kind, names in sorted(sections.items(), key=_order))


def _few(names: list[str]) -> list[str]:
    return names if len(names) <= _MOST + 1 else [*names[:_MOST], f"{len(names) - _MOST} more"]


def _order(section: tuple[str, list[str]]) -> tuple[bool, bool, str]:
    return section[0] == WHOLE, section[0] == LISTS, section[0]
