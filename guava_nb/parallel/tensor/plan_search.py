"""Finding a tensor plan: from the user's patterns, or from what the model's modules look like.

A column layer followed by a row layer of the same module is the pair that saves most: activations between them are
split and one sum ends it. Whether a forward bears that is proven by running it (split_trial.py); where it does not, or cannot
be run alone, layers that are large are split with whole activations around each, which is right for any forward and
costs more traffic.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from guava_nb.config.modes import PLAN_KINDS, check_plan
from guava_nb.errors import ConfigError
from guava_nb.parallel.tensor.plan_candidates import PlanCandidate
from guava_nb.parallel.tensor.split_trial import SplitTrial
from guava_nb.parallel.tensor.tensor_layers import ranges_of
from guava_nb.parallel.tensor.tensor_plan import Plan, Region, Split, try_plan

__all__ = ["make_plan", "module_fingerprint"]

# Whether what was shown of one module holds for another: what can be told apart without reading code.
#
# Blocks of a model mostly differ in the values of their weights only, so one try serves them all. Anything else that
# their forwards could look at must be the same: numbers and texts by value, buffers and other tensors by value, and
# whatever has no value that can be compared, such as a function or an object of the user's, must be the same one.

#: Compared by value; `type` too, since 1, 1.0 and True are equal.
_VALUES = (int, float, str, bytes, bool, complex, type(None), torch.dtype, torch.device)
#: Of torch's own in every module; parameters, buffers and children are looked at by their names.
_TORCHS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_MOST_BYTES = 1 << 26


def module_fingerprint(module: nn.Module) -> Hashable:
    """Return a key that two living modules share only if they do the same, whatever the values of their weights."""
    first: dict[int, str] = {}
    return tuple(
        (name, id(type(part)), _attributes(part), _parameters(part, name, first), _buffers(part))
        for name, part in module.named_modules(remove_duplicate=False)
    )


def _attributes(part: nn.Module) -> Hashable:
    return tuple((key, _value(value)) for key, value in part.__dict__.items() if key not in _TORCHS)


def _parameters(part: nn.Module, prefix: str, first: dict[int, str]) -> Hashable:
    """Shapes, and which of them are one parameter."""
    return tuple(
        (name, None)
        if parameter is None
        else (
            name,
            first.setdefault(id(parameter), f"{prefix}.{name}"),
            tuple(parameter.shape),
            str(parameter.dtype),
            parameter.requires_grad,
        )
        for name, parameter in part._parameters.items()
    )


def _buffers(part: nn.Module) -> Hashable:
    return tuple((name, _value(buffer)) for name, buffer in part._buffers.items())


def _value(value: Any) -> Hashable:
    if type(value) in _VALUES:
        return type(value).__name__, repr(value)
    if type(value) in (list, tuple, torch.Size):
        return type(value).__name__, tuple(map(_value, value))
    if isinstance(value, dict):
        return id(type(value)), tuple((_value(key), _value(child)) for key, child in value.items())
    if type(value) in (set, frozenset):
        return type(value).__name__, frozenset(map(_value, value))
    if isinstance(value, Tensor) and value.layout == torch.strided and value.nbytes <= _MOST_BYTES:
        return str(value.dtype), tuple(value.shape), _digest(value)
    return "this one", id(value)


def _digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor of any shape, "" of one without elements."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest() if flat.numel() else ""


_Layer = TypeVar("_Layer", bound=nn.Module)

#: A layer that is in no pair is split only when it is large: the traffic is the same for a small one.
_LARGE = 1 << 16


def make_plan(model: nn.Module, patterns: Mapping[str, str], ranks: int) -> Plan:
    """Return the plan for a whole model.

    Args:
        model: whole; it is not changed.
        patterns: shell pattern over module names to one of `PLAN_KINDS`, the first that matches counts; empty finds a plan,
            and nothing but "replicate" finds one for the rest of the model.
        ranks: how many share each layer.

    Raises:
        ConfigError: a pattern fits nothing, a size cannot be split, or nothing in the model can be.
    """
    search = _Search(model, ranks)
    only_less = all(kind == "replicate" for kind in patterns.values())
    plan = search.automatic(search.under(patterns)) if only_less else search.from_patterns(patterns)
    if not plan.splits:
        raise ConfigError(
            f"nothing in this model can be shared by {ranks} workers: no attention with {ranks} heads or more, no pair of "
            f"Linear layers, no embedding without max_norm and scale_grad_by_freq, no Linear of {_LARGE} weights (layers with "
            "hooks stay whole); name layers in tensor_plan (--plan), or use another mode"
        )
    return _under_all_names(plan, search.aliases)


@dataclass(slots=True)
class _Search:
    model: nn.Module
    ranks: int
    modules: dict[str, nn.Module] = field(init=False)
    tied: dict[str, set[str]] = field(init=False)
    aliases: dict[str, list[str]] = field(init=False)
    places: Counter[nn.Module | None] = field(init=False)
    proofs: dict[Hashable, tuple[Plan | None, bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules())
        self.tied = _ties(self.modules)
        self.aliases = _aliases(self.model)
        self.places = Counter(child for module in self.modules.values() for child in module._modules.values())

    # ------------------------------------------------------------------------------------------------------ automatic

    def under(self, patterns: Mapping[str, str]) -> set[str]:
        """Return the modules that patterns name, and all inside them."""
        tops = tuple(f"{name}." for name in self._matched(patterns))
        return {name for name in self.modules if f"{name}.".startswith(tops)} if tops else set()

    def automatic(self, without: Set[str] = frozenset()) -> Plan:
        plan, spare = Plan({}), Plan({})
        for name, module in self.modules.items():
            if _is_bare(module, nn.MultiheadAttention) and self._splits_heads(module) and not self._is_tied(name):
                plan |= Plan({name: Split("attention")}) if name not in without else Plan({})
        for name in self.modules:
            own = self._linears(name)
            for proposal in self._proposals(name, own):
                if not (proposal.names & (set(plan.splits) | without)):
                    found, _ = self.prove(proposal)
                    plan |= found.under(name) if found else Plan({})
                    spare |= Plan({}) if found else proposal.joined().under(name)
        plan |= self._rest(set(plan.splits) | without)
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
        if not _is_bare(module, nn.Linear) or self._is_tied(name):
            return False
        return module.weight.numel() >= _LARGE and module.out_features >= self.ranks

    def _all_vocab(self, names: set[str], taken: set[str]) -> bool:
        kinds = [self.modules[name] for name in names]
        fits = all(_is_vocab(m) or _is_bare(m, nn.Linear) for m in kinds)
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

    def _proposals(self, name: str, own: Mapping[str, nn.Linear]) -> list[PlanCandidate]:
        heads = PlanCandidate.heads_of(self.modules[name], name, own, self.ranks)
        return [*([heads] if heads else []), *PlanCandidate.pairs_of(name, own, self.ranks)]

    def _linears(self, name: str) -> dict[str, nn.Linear]:
        return {
            child: m
            for child, m in self.modules[name].named_children()
            if _is_bare(m, nn.Linear) and not self._is_tied(f"{name}.{child}".strip("."))
        }

    def prove(self, proposal: PlanCandidate) -> tuple[Plan | None, bool]:
        module = self.modules[proposal.parent]
        if any(self.places[self.modules[name]] > 1 for name in proposal.names) or _has_hooks_inside(module):
            # It runs in two places, of which a try sees one; or what hooks do with activations lies outside the module.
            return None, True
        key = (module_fingerprint(module), repr(proposal.plans))
        if key not in self.proofs:
            ran = False
            self.proofs[key] = (None, False)
            for plan in proposal.plans:
                proof: SplitTrial = try_plan(module, proposal.width, self.ranks, plan)
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
                hooked = "" if _is_bare(self.modules[hits[0]], type(self.modules[hits[0]])) else " with hooks"
                raise ConfigError(
                    f"tensor_plan (--plan) {pattern!r}: {kind!r} does not fit {hits[0]!r}, which is a {cls}{hooked}"
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
        for proposal in self._proposals(parent, own):
            if name.rpartition(".")[2] in proposal.local and proposal.follows(chosen):
                return self._user_proposal(proposal)
        kind = "column" if kinds[name] == "colwise" else "row"
        return Plan({name: Split(kind, ranges_of(size, self.ranks))})

    def _user_proposal(self, proposal: PlanCandidate) -> Plan:
        found, ran = self.prove(proposal)
        if found is None and not ran:
            # It cannot be tried alone, and the user says so; the first step checks that gradients agree.
            return proposal.plans[0].under(proposal.parent)
        return (found or proposal.joined()).under(proposal.parent)


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


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return the further names of each module that has several, by its first one."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return {first: others for first, *others in names.values() if others}


def _under_all_names(plan: Plan, aliases: Mapping[str, list[str]]) -> Plan:
    """A stage of a pipeline may hold a module by its second name only."""
    splits = {name: plan.splits[first] for first in plan.splits for name in (first, *aliases.get(first, ()))}
    attributes = {n: plan.attributes[first] for first in plan.attributes for n in (first, *aliases.get(first, ()))}
    regions = [other for region in plan.regions for other in (region, *_elsewhere(region, aliases))]
    return Plan(splits, attributes, tuple(regions), plan.partial)


def _elsewhere(region: Region, aliases: Mapping[str, list[str]]) -> list[Region]:
    prefix, _, row = region.row.rpartition(".")
    columns = [name.rpartition(".")[2] for name in region.columns]
    return [Region(tuple(f"{other}.{name}" for name in columns), f"{other}.{row}") for other in aliases.get(prefix, ())]


def _is_bare(module: nn.Module, *classes: type[_Layer]) -> TypeGuard[_Layer]:
    """Whether a module is of one of these classes, not of a subclass, and has no hooks: those stay on the whole module only."""
    return type(module) in classes and not _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def _has_hooks_inside(module: nn.Module) -> bool:
    return any(_has_hooks(part) for part in module.modules() if part is not module)


def _is_vocab(module: nn.Module) -> bool:
    return _is_bare(module, nn.Embedding) and module.max_norm is None and not module.scale_grad_by_freq


def _fits(module: nn.Module, kind: str) -> bool:
    if kind == "vocab":
        return _is_vocab(module) or _is_bare(module, nn.Linear)
    if kind == "colwise":
        return _is_bare(module, nn.Linear, nn.MultiheadAttention)
    return kind in ("replicate", "partial") or _is_bare(module, nn.Linear)


def _some(modules: Mapping[str, nn.Module]) -> str:
    return ", ".join([name for name in modules if name][:8])
