"""ZeRO 2 and 3: torch's FSDP2 over the replicas, with sums instead of means and parameters that need not be used.

`fully_shard` is applied to the repeated blocks and then to the rest as one; replicas run these together, whatever each of
them uses (`shared_units.py`). Stage 2 keeps a block's parameters between forward and backward, stage 3 gathers them a
second time. A scalar or an empty parameter cannot be sharded along its rows; it stays whole, and the code that sums whole
gradients sums it too, after backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from guava_nb.errors import ConfigError
from guava_nb.parallel.blocks import repeated_blocks
from guava_nb.parallel.replicas.call_order import Habit
from guava_nb.parallel.replicas.shared_units import SharedUnits

__all__ = ["Sharded", "gathered_in", "shard_over_data"]

_HALF = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class Sharded:
    """What sharding a model over its replicas needs around each step.

    Attributes:
        root: the sharded model.
        units: the modules that have a group of their own.
        names: full names of the sharded parameters, in order.
        factor: what a loss must be multiplied with, so that FSDP2's mean is a sum.
        replicas: the group of the replicas.
        groups: modules with a group of their own, the model last.
        told: of the step whose sums are complete: whether a replica strayed, and how many used each parameter,
            `[1 + names]` on the device; None where it was read.
    """

    root: nn.Module
    units: SharedUnits
    names: list[str]
    factor: float
    replicas: dist.ProcessGroup
    groups: list[FSDPModule] = field(default_factory=list)
    told: Tensor | None = None

    def drop_unused(self, named: Mapping[str, nn.Parameter]) -> None:
        """A parameter that no replica used gets no gradient, as in plain PyTorch; call `end_step` before the next forward.

        Waits for the device only where this replica did not use a parameter that has a gradient.
        """
        device = next(iter(named.values())).device
        used = self.units.used
        mine = [float(name in used) for name in self.names]
        self.told = torch.tensor([float(self.units.strayed), *mine], device=device)
        dist.all_reduce(self.told, group=self.replicas)
        unsure = [place for place, name in enumerate(self.names) if name not in used and named[name].grad is not None]
        if unsure:
            _, *counts = self.told.tolist()
            for place in unsure:
                if not counts[place]:
                    named[self.names[place]].grad = None

    def end_step(self) -> None:
        """Agree on the next pass; does nothing where no step's sums were completed since."""
        if self.told is not None:
            told, self.told = self.told, None
            self.units.settle(bool(told[0]))

    def release(self) -> None:
        """Free gathered parameters."""
        for group in self.groups:
            group.reshard()

    def recover(self) -> None:
        """Let FSDP2 forget an iteration that raised; before torch 2.12 it cannot, and a new group is needed."""
        for group in self.groups[-1:]:
            if self.units.began and hasattr(group, "reset_iter_state"):
                group.reset_iter_state()


def shard_over_data(
    model: nn.Module, stage: int, mesh: DeviceMesh, full_names: Mapping[str, str], habit: Habit
) -> Sharded:
    """Shard a model's parameters over the ranks of a one-dimensional mesh.

    Args:
        model: changed in place.
        stage: 2 or 3.
        mesh: the replicas.
        full_names: local parameter name to full name.
        habit: what is known of the model's calls.

    Raises:
        ConfigError: one layer mixes dtypes, or this torch cannot leave a scalar parameter whole.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # FSDP2 cuts rows of row-major memory (channels_last is none)
    whole = {p for p in model.parameters() if p.ndim == 0 or p.numel() == 0}
    units = SharedUnits(mesh.get_group(), next(model.parameters()).device, habit)
    sharded = Sharded(model, units, [], 1.0, mesh.get_group())
    taken: set[str] = set()
    for target, module in _targets(model, whole):
        parameters = {n: p for n, p in module.named_parameters() if p not in whole and not isinstance(p, DTensor)}
        # Sharding replaces parameters, so names tell which are taken; a tie has its first name everywhere.
        local = {n: f"{target}.{n}".lstrip(".") for n in parameters}
        own = {n: full_names[name] for n, name in local.items() if name not in taken}
        taken |= set(local.values())
        if not own and module is not model:
            continue
        sharded.names += own.values()
        half = next((p.dtype for n, p in module.named_parameters() if n in own and p.dtype in _HALF), None)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
        # The root is needed again at once when backward begins, so gathering it twice would free nothing.
        again = stage == 3 and module is not model
        ignored = {"ignored_params": whole} if whole else {}
        shard = partial(fully_shard, module, mesh=mesh, reshard_after_forward=again, mp_policy=policy, **ignored)
        try:
            units.add(module, target, own, shard)
        except TypeError as error:
            shapes = f"{len(whole)} parameters without rows"
            raise ConfigError(
                f"ZeRO {stage}: torch {torch.__version__} cannot shard {shapes}; use zero_stage=1 (--zero 1)"
            ) from error
        assert isinstance(module, FSDPModule)
        sharded.groups.append(module)
    sharded.factor = _sum_not_mean(sharded.groups, mesh.size())
    return sharded


def gathered_in(model: nn.Module, stage: int) -> list[tuple[list[nn.Parameter], bool]]:
    """Return the parameters that are gathered together, group by group, and whether they are gathered again for backward.

    Args:
        model: whole; it is not changed.
        stage: 2 or 3.
    """
    whole = {p for p in model.parameters() if p.ndim == 0 or p.numel() == 0}
    taken: set[int] = set()
    found = []
    for _, module in _targets(model, whole):
        own = [p for p in module.parameters() if p not in whole and id(p) not in taken]
        taken |= {id(p) for p in own}
        if own:
            found.append((own, stage == 3 and module is not model))
    return found


def _sum_not_mean(groups: list[FSDPModule], ranks: int) -> float:
    for group in groups:
        if not hasattr(group, "set_force_sum_reduction_for_comms"):
            return float(ranks)
        # A plain sum: gloo has no mean, and a mean would have to be undone.
        group.set_force_sum_reduction_for_comms(True)
        group.set_gradient_divide_factor(1.0)
    return 1.0


def _targets(model: nn.Module, whole: set[nn.Parameter]) -> list[tuple[str, nn.Module]]:
    """Modules that get a group of their own, inner ones first, the whole model last.

    Raises:
        ConfigError: it is one module of torch.jit.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(
            "the whole model is one module of torch.jit, and ZeRO 2 and 3 cannot gather its parameters: build it of plain "
            "modules, call it from the forward of one, or use data mode or zero_stage=1 (--zero 1)"
        )
    closed = {name: m for name, m in repeated_blocks(model).items() if _is_closed(model, m)}
    blocks = {name: m for name, m in closed.items() if not isinstance(m, torch.jit.ScriptModule)}
    targets: list[tuple[str, nn.Module]] = []
    for name, block in [*blocks.items(), ("", model)]:
        taken = {id(p) for _, target in targets for p in target.parameters()}
        targets += _of_other_dtype(name, block, taken, whole)
        targets.append((name, block))
    return targets


def _is_closed(model: nn.Module, block: nn.Module) -> bool:
    """Whether no parameter of a block is used outside it: FSDP2 knows ties inside one group only."""
    inside = {id(m) for m in block.modules()}
    own = {id(p) for p in block.parameters()}
    outside = (m for m in model.modules() if id(m) not in inside)
    return not any(id(p) in own for m in outside for p in m._parameters.values() if p is not None)


def _of_other_dtype(
    prefix: str, root: nn.Module, taken: set[int], whole: set[nn.Parameter]
) -> list[tuple[str, nn.Module]]:
    """One group holds one dtype: layers that differ from most of their group become groups of their own."""
    rest = [p for p in root.parameters() if id(p) not in taken and p not in whole]
    sizes: dict[torch.dtype, int] = {}
    for parameter in rest:
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    if len(sizes) < 2:
        return []
    most = max(sizes, key=lambda dtype: (sizes[dtype], str(dtype)))
    found = []
    for name, module in root.named_modules():
        own = {p.dtype for p in module._parameters.values() if p is not None and id(p) not in taken and p not in whole}
        if own - {most}:
            full = f"{prefix}.{name}".strip(".")
            if len(own) > 1 or module is root or any(True for _ in module.children()):
                kinds = ", ".join(sorted(str(dtype) for dtype in own | {most}))
                raise ConfigError(
                    f"ZeRO 2 and 3 need one dtype per layer, and {full or 'the model itself'} mixes {kinds}; use zero_stage=1 "
                    "(--zero 1)"
                )
            found.append((full, module))
    return found
