"""Ways in which the layers of one module could be shared with split activations between them; to be proven first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from guava_nb.parallel.tensor.tensor_layers import ranges_of
from guava_nb.parallel.tensor.tensor_plan import Plan, Region, Split

__all__ = ["PlanCandidate"]

_HEADS = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads", "nhead", "nheads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
_WIDTHS = ("embed_dim", "n_embd", "hidden_size", "d_model", "dim", "inner_dim", "all_head_size", "hidden_dim", "width")


@dataclass(slots=True)
class PlanCandidate:
    """Column and row layers of one module, and ways to split them with split activations between."""

    parent: str
    width: int
    columns: dict[str, int]
    row: tuple[str, int]
    plans: list[Plan]
    ranks: int

    @property
    def local(self) -> set[str]:
        """Names of the layers in their module."""
        return {*self.columns, self.row[0]}

    @property
    def names(self) -> set[str]:
        """Full names of the layers."""
        return {f"{self.parent}.{name}".strip(".") for name in self.local}

    def follows(self, chosen: Mapping[str, str]) -> bool:
        """Whether the user gave these layers these roles."""
        return chosen.get(self.row[0]) == "rowwise" and all(chosen.get(name) == "colwise" for name in self.columns)

    def joined(self) -> Plan:
        """The split that is right for every forward: whole activations around each layer."""
        splits = {name: Split("column", ranges_of(out, self.ranks)) for name, out in self.columns.items()}
        name, size = self.row
        return Plan({**splits, name: Split("row", ranges_of(size, self.ranks))})

    @staticmethod
    def pairs_of(parent: str, own: Mapping[str, nn.Linear], ranks: int) -> list[PlanCandidate]:
        """Layers that widen, one or several alike, followed by one that narrows again."""
        found: list[PlanCandidate] = []
        waiting: dict[str, nn.Linear] = {}
        for name, linear in own.items():
            ups = {n: m for n, m in waiting.items() if m.out_features == linear.in_features}
            if ups and linear.in_features >= ranks and len({m.in_features for m in ups.values()}) == 1:
                found.append(PlanCandidate._pair(parent, ups, name, linear, ranks))
                waiting = {}
            else:
                waiting[name] = linear
        return found

    @staticmethod
    def _pair(parent: str, ups: Mapping[str, nn.Linear], name: str, down: nn.Linear, ranks: int) -> PlanCandidate:
        ranges = ranges_of(down.in_features, ranks)
        splits = {n: Split("column", ranges, joined=False) for n in ups}
        plan = Plan({**splits, name: Split("row", ranges, joined=False)}, regions=(Region(tuple(ups), name),))
        columns = {n: m.out_features for n, m in ups.items()}
        width = next(iter(ups.values())).in_features
        return PlanCandidate(parent, width, columns, (name, down.in_features), [plan], ranks)

    @staticmethod
    def heads_of(module: nn.Module, parent: str, own: Mapping[str, nn.Linear], ranks: int) -> PlanCandidate | None:
        """Projections to heads and one from them, in a module that knows its number of heads."""
        names = list(own)
        heads = _number(module, _HEADS)
        key_heads = _number(module, _KEY_HEADS) or heads
        if heads is None or key_heads is None or len(own) < 2 or min(heads, key_heads) < ranks:
            return None
        ins, out = {n: own[n] for n in names[:-1]}, own[names[-1]]
        if heads % key_heads or out.in_features % heads or len({m.in_features for m in ins.values()}) != 1:
            return None
        shape = _Heads(heads, key_heads, out.in_features // heads, ranks)
        inside = shape.columns(ins)
        if not inside:
            return None
        columns = {n: m.out_features for n, m in ins.items()}
        width = next(iter(ins.values())).in_features
        plans = [
            Plan(
                {
                    **{n: Split("column", ranges, joined=False) for n, ranges in ways.items()},
                    names[-1]: Split("row", shape.cut(key_heads, shape.group * shape.size), joined=False),
                },
                {"": attributes},
                (Region(tuple(ins), names[-1]),),
            )
            for attributes in shape.attributes(module)
            for ways in inside
        ]
        row = (names[-1], out.in_features)
        return PlanCandidate(parent, width, columns, row, plans, ranks)


@dataclass(frozen=True, slots=True)
class _Heads:
    heads: int
    key_heads: int
    size: int
    ranks: int

    @property
    def group(self) -> int:
        return self.heads // self.key_heads

    def cut(self, units: int, unit: int, repeats: int = 1) -> list[list[tuple[int, int]]]:
        return ranges_of(units * unit * repeats, self.ranks, unit, repeats)

    def columns(self, ins: Mapping[str, nn.Linear]) -> list[dict[str, list[list[tuple[int, int]]]]]:
        """Ways to cut the projections, so that every rank has whole heads and their keys; empty: none."""
        if len(ins) == 1 and self.heads == self.key_heads:
            ((name, linear),) = ins.items()
            if linear.out_features == 3 * self.heads * self.size:
                # Query, key and value one after the other, or head after head.
                return [{name: self.cut(self.heads, self.size, 3)}, {name: self.cut(self.heads, 3 * self.size)}]
            return []
        found = {}
        for name, linear in ins.items():
            if linear.out_features == self.heads * self.size:
                found[name] = self.cut(self.key_heads, self.group * self.size)
            elif linear.out_features == self.key_heads * self.size:
                found[name] = self.cut(self.key_heads, self.size)
            else:
                return []
        return [found]

    def attributes(self, module: nn.Module) -> list[dict[str, tuple[int, ...]]]:
        """Every rank's number of heads; with the widths that follow from it, and without."""
        counts = [end - start for ((start, end),) in ranges_of(self.key_heads, self.ranks)]
        own = {n: tuple(c * self.group for c in counts) for n in _HEADS if _number(module, (n,)) == self.heads}
        own |= {n: tuple(counts) for n in _KEY_HEADS if _number(module, (n,)) == self.key_heads}
        full = self.heads * self.size
        widths = {
            n: tuple(c * self.group * self.size for c in counts) for n in _WIDTHS if _number(module, (n,)) == full
        }
        return [own | widths, own] if widths else [own]


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    own = module.__dict__
    return next((own[n] for n in names if isinstance(own.get(n), int) and not isinstance(own[n], bool)), None)
