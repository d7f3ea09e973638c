"""Finding a tensor plan: from the user's patterns, or from what the model's modules look like.

A column layer followed by a row layer of the same module is the pair that saves most: activations between them are
split and one sum ends it. Whether a forward bears that is proven by running it (proof.py); where it does not, or cannot
be run alone, layers that are large are split with whole activations around each, which is right for any forward and
costs more traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from guava_nb.config.modes import PLAN_KINDS, check_plan
from guava_nb.errors import ConfigError
from guava_nb.parallel.plans import Plan, Region, Split, prove_plan
from guava_nb.parallel.proof import Proof
from guava_nb.parallel.tensor_layers import ranges_of

__all__ = ["make_plan"]

_HEADS = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads", "nhead", "nheads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
_WIDTHS = ("embed_dim", "n_embd", "hidden_size", "d_model", "dim", "inner_dim", "all_head_size", "hidden_dim", "width")
#: A layer that is in no pair is split only when it is large: the traffic is the same for a small one.
_LARGE = 1 << 16


def make_plan(model: nn.Module, patterns: Mapping[str, str], ranks: int) -> Plan:
    """Return the plan for a whole model.

    Args:
        model: whole; it is not changed.
        patterns: shell pattern over module names to one of `PLAN_KINDS`, the first that matches counts; empty finds a plan.
        ranks: how many share each layer.

    Raises:
        ConfigError: a pattern fits nothing, a size cannot be split, or nothing in the model can be.
    """
    search = _Search(model, ranks)
    plan = search.from_patterns(patterns) if patterns else search.automatic()
    if not plan.splits:
        raise ConfigError(
            f"nothing in this model can be shared by {ranks} workers: no attention with {ranks} heads or more, no pair of "
            f"Linear layers, no embedding, no Linear of {_LARGE} weights; name layers in tensor_plan (--plan), or use another "
            "mode"
        )
    return plan


@dataclass(slots=True)
class _Search:
    model: nn.Module
    ranks: int
    modules: dict[str, nn.Module] = field(init=False)
    tied: dict[str, set[str]] = field(init=False)
    proofs: dict[str, tuple[Plan | None, bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules())
        self.tied = _ties(self.modules)

    # ------------------------------------------------------------------------------------------------------ automatic

    def automatic(self) -> Plan:
        plan, spare = Plan({}), Plan({})
        for name, module in self.modules.items():
            if type(module) is nn.MultiheadAttention and self._splits_heads(module) and not self._is_tied(name):
                plan |= Plan({name: Split("attention")})
        for name in self.modules:
            own = self._linears(name)
            for proposal in [_Proposal.heads_of(self, name, own), *_Proposal.pairs_of(self, name, own)]:
                if proposal is not None and not (proposal.names & set(plan.splits)):
                    found, _ = self.prove(proposal)
                    plan |= found.under(name) if found else Plan({})
                    spare |= Plan({}) if found else proposal.joined().under(name)
        plan |= self._rest(set(plan.splits))
        # A small layer with whole activations around it costs more traffic than it saves, unless there is nothing else.
        return plan if plan.splits else spare

    def _rest(self, taken: set[str]) -> Plan:
        splits: dict[str, Split] = {}
        for name, module in self.modules.items():
            if name in taken or name in splits:
                continue
            together = self.tied.get(name, {name})
            if _is_vocab(module) and self._all_vocab(together, taken):
                splits.update({other: self._vocab(other) for other in sorted(together)})
            elif self._is_large(name, module):
                assert isinstance(module, nn.Linear)
                splits[name] = Split("column", ranges_of(module.out_features, self.ranks))
        return Plan(splits)

    def _is_large(self, name: str, module: nn.Module) -> bool:
        if type(module) is not nn.Linear or self._is_tied(name):
            return False
        return module.weight.numel() >= _LARGE and module.out_features >= self.ranks

    def _all_vocab(self, names: set[str], taken: set[str]) -> bool:
        kinds = [self.modules[name] for name in names]
        fits = all(_is_vocab(m) or type(m) is nn.Linear for m in kinds)
        return fits and not (names & taken) and min(len(m.weight) for m in kinds) >= self.ranks  # type: ignore[arg-type]

    def _vocab(self, name: str) -> Split:
        module = self.modules[name]
        ranges = ranges_of(len(module.weight), self.ranks)  # type: ignore[arg-type]
        return Split("vocab" if isinstance(module, nn.Embedding) else "head", ranges)

    def _splits_heads(self, module: nn.MultiheadAttention) -> bool:
        return module.num_heads >= self.ranks and module.bias_k is None and not module.add_zero_attn

    def _is_tied(self, name: str) -> bool:
        prefix = f"{name}."
        return name in self.tied or any(other.startswith(prefix) for other in self.tied)

    def _linears(self, name: str) -> dict[str, nn.Linear]:
        return {
            child: m
            for child, m in self.modules[name].named_children()
            if type(m) is nn.Linear and not self._is_tied(f"{name}.{child}".strip("."))
        }

    def prove(self, proposal: _Proposal) -> tuple[Plan | None, bool]:
        module = self.modules[proposal.parent]
        key = f"{type(module)} {_numbers(module)} {module!r} {[tuple(p.shape) for p in module.parameters()]} {proposal.key}"
        if key not in self.proofs:
            ran = False
            self.proofs[key] = (None, False)
            for plan in proposal.plans:
                proof: Proof = prove_plan(module, proposal.width, self.ranks, plan)
                ran = ran or proof.ran
                self.proofs[key] = (None, ran)
                if proof.equal:
                    found = Plan(plan.splits, plan.attributes, plan.regions, proof.partial)
                    self.proofs[key] = (found, True)
                    break
                if not proof.ran:
                    break
        return self.proofs[key]

    # ------------------------------------------------------------------------------------------------- user's patterns

    def from_patterns(self, patterns: Mapping[str, str]) -> Plan:
        kinds = self._matched(patterns)
        plan = Plan({}, partial=tuple(self._partial(kinds)))
        for name, kind in kinds.items():
            if kind == "vocab":
                plan |= self._user_vocab(name, kinds)
            elif kind in ("colwise", "rowwise") and name not in plan.splits:
                plan |= self._user_layers(name, kinds)
        return plan

    def _matched(self, patterns: Mapping[str, str]) -> dict[str, str]:
        check_plan(patterns)
        kinds: dict[str, str] = {}
        for pattern, kind in patterns.items():
            hits = [name for name in self.modules if name and fnmatchcase(name, pattern)]
            if not hits:
                raise ConfigError(
                    f"tensor_plan (--plan) {pattern!r} matches no module; modules here are {_some(self.modules)}"
                )
            fits = [name for name in hits if _fits(self.modules[name], kind)]
            if not fits:
                cls = type(self.modules[hits[0]]).__name__
                raise ConfigError(
                    f"tensor_plan (--plan) {pattern!r}: {kind!r} does not fit {hits[0]!r}, which is a {cls}"
                )
            for name in fits:
                kinds.setdefault(name, kind)
        return kinds

    def _partial(self, kinds: Mapping[str, str]) -> Iterator[str]:
        for name, kind in kinds.items():
            if kind == "partial":
                yield from (f"{name}.{parameter}" for parameter, _ in self.modules[name].named_parameters())

    def _user_vocab(self, name: str, kinds: Mapping[str, str]) -> Plan:
        together = self.tied.get(name, {name})
        others = sorted(other for other in together if kinds.get(other) != "vocab")
        if others:
            raise ConfigError(
                f"{name!r} shares its weight with {others[0]!r}; tensor_plan (--plan) must give both 'vocab'"
            )
        rows = len(self.modules[name].weight)  # type: ignore[arg-type]
        self._check_size(name, rows, "rows")
        return Plan({name: self._vocab(name)})

    def _check_size(self, name: str, size: int, what: str) -> None:
        if size < self.ranks:
            raise ConfigError(f"{name!r} has {size} {what}, tp {self.ranks} needs {self.ranks} at least")

    def _user_layers(self, name: str, kinds: Mapping[str, str]) -> Plan:
        module = self.modules[name]
        if self._is_tied(name):
            raise ConfigError(
                f"{name!r} shares a weight with {sorted(self.tied.get(name, {name}))}; only 'vocab' splits both"
            )
        if isinstance(module, nn.MultiheadAttention):
            self._check_size(name, module.num_heads, "heads")
            if not self._splits_heads(module):
                raise ConfigError(
                    f"{name!r} has add_bias_kv or add_zero_attn, which heads cannot share; leave it whole"
                )
            return Plan({name: Split("attention")})
        assert isinstance(module, nn.Linear)
        size, what = (module.out_features, "outputs") if kinds[name] == "colwise" else (module.in_features, "inputs")
        self._check_size(name, size, what)
        parent = name.rpartition(".")[0]
        own = {
            c: m for c, m in self._linears(parent).items() if kinds.get(f"{parent}.{c}".strip(".")) in PLAN_KINDS[:2]
        }
        chosen = {c: kinds[f"{parent}.{c}".strip(".")] for c in own}
        for proposal in [_Proposal.heads_of(self, parent, own), *_Proposal.pairs_of(self, parent, own)]:
            if proposal is not None and name.rpartition(".")[2] in proposal.local and proposal.follows(chosen):
                return self._user_proposal(proposal)
        kind = "column" if kinds[name] == "colwise" else "row"
        return Plan({name: Split(kind, ranges_of(size, self.ranks))})

    def _user_proposal(self, proposal: _Proposal) -> Plan:
        found, ran = self.prove(proposal)
        if found is None and not ran:
            # It cannot be tried alone, and the user says so; the first step checks that gradients agree.
            return proposal.plans[0].under(proposal.parent)
        return (found or proposal.joined()).under(proposal.parent)


@dataclass(slots=True)
class _Proposal:
    """Column and row layers of one module, and ways to split them with split activations between."""

    parent: str
    width: int
    columns: dict[str, int]
    row: tuple[str, int]
    plans: list[Plan]
    ranks: int

    @property
    def local(self) -> set[str]:
        return {*self.columns, self.row[0]}

    @property
    def names(self) -> set[str]:
        return {f"{self.parent}.{name}".strip(".") for name in self.local}

    @property
    def key(self) -> str:
        return f"{sorted(self.local)}"

    def follows(self, chosen: Mapping[str, str]) -> bool:
        """Whether the user gave these layers these roles."""
        return chosen.get(self.row[0]) == "rowwise" and all(chosen.get(name) == "colwise" for name in self.columns)

    def joined(self) -> Plan:
        """The split that is right for every forward: whole activations around each layer."""
        splits = {name: Split("column", ranges_of(out, self.ranks)) for name, out in self.columns.items()}
        name, size = self.row
        return Plan({**splits, name: Split("row", ranges_of(size, self.ranks))})

    @staticmethod
    def pairs_of(search: _Search, parent: str, own: Mapping[str, nn.Linear]) -> list[_Proposal]:
        """Layers that widen, one or several alike, followed by one that narrows again."""
        found: list[_Proposal] = []
        waiting: dict[str, nn.Linear] = {}
        for name, linear in own.items():
            ups = {n: m for n, m in waiting.items() if m.out_features == linear.in_features}
            if ups and linear.in_features >= search.ranks and len({m.in_features for m in ups.values()}) == 1:
                found.append(_Proposal._pair(search, parent, ups, name, linear))
                waiting = {}
            else:
                waiting[name] = linear
        return found

    @staticmethod
    def _pair(search: _Search, parent: str, ups: Mapping[str, nn.Linear], name: str, down: nn.Linear) -> _Proposal:
        ranges = ranges_of(down.in_features, search.ranks)
        splits = {n: Split("column", ranges, joined=False) for n in ups}
        plan = Plan({**splits, name: Split("row", ranges, joined=False)}, regions=(Region(tuple(ups), name),))
        columns = {n: m.out_features for n, m in ups.items()}
        width = next(iter(ups.values())).in_features
        return _Proposal(parent, width, columns, (name, down.in_features), [plan], search.ranks)

    @staticmethod
    def heads_of(search: _Search, parent: str, own: Mapping[str, nn.Linear]) -> _Proposal | None:
        """Projections to heads and one from them, in a module that knows its number of heads."""
        module, names = search.modules[parent], list(own)
        heads = _number(module, _HEADS)
        key_heads = _number(module, _KEY_HEADS) or heads
        if heads is None or key_heads is None or len(own) < 2 or min(heads, key_heads) < search.ranks:
            return None
        ins, out = {n: own[n] for n in names[:-1]}, own[names[-1]]
        if heads % key_heads or out.in_features % heads or len({m.in_features for m in ins.values()}) != 1:
            return None
        shape = _Heads(heads, key_heads, out.in_features // heads, search.ranks)
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
        return _Proposal(parent, width, columns, row, plans, search.ranks)


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


def _numbers(module: nn.Module) -> dict[str, object]:
    return {k: v for k, v in module.__dict__.items() if isinstance(v, int | float | str | bool)}


def _ties(modules: Mapping[str, nn.Module]) -> dict[str, set[str]]:
    """Return, of each module with a shared parameter, the modules that share it."""
    users: dict[int, set[str]] = {}
    for name, module in modules.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), set()).add(name)
    found: dict[str, set[str]] = {}
    for names in users.values():
        if len(names) > 1:
            for name in names:
                found.setdefault(name, set()).update(names)
    return found


def _is_vocab(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and module.max_norm is None and not module.scale_grad_by_freq


def _fits(module: nn.Module, kind: str) -> bool:
    if kind == "vocab":
        return _is_vocab(module) or type(module) is nn.Linear
    if kind == "colwise":
        return type(module) in (nn.Linear, nn.MultiheadAttention)
    return kind in ("replicate", "partial") or type(module) is nn.Linear


def _some(modules: Mapping[str, nn.Module]) -> str:
    return ", ".join([name for name in modules if name][:8])
