"""Which parameters a forward used, and gradients of zero for those it did not.

FSDP2 reduces whatever gradients a module has, so all replicas must have the same ones; and where a module's parameter
goes unused on one replica only, they have not. So a module that is sharded gives each of its parameters that its
outputs do not depend on a gradient of zero. What was truly used is remembered: a parameter that nobody used anywhere
must end with no gradient at all, as in plain PyTorch, where AdamW leaves it alone. Outputs that are views are copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from guava_nb.nested import leaves, map_leaves

__all__ = ["UnusedParameters"]


class _Touch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.shapes = [(p.shape, p.dtype, p.device) for p in parameters]
        # A view would do, but FSDP2 warns of views; this is rare and one activation.
        return output.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes)
        return (gradient, *zeros)


class UnusedParameters:
    """A forward hook for modules that will be sharded; to be registered before they are.

    Attributes:
        used: full names that took part in a loss since `clear`.
    """

    def __init__(self) -> None:
        """Nothing was used yet."""
        self.used: set[str] = set()
        self.counting = True

    def clear(self) -> None:
        """Begin anew."""
        self.used.clear()

    def watch(self, module: nn.Module, names: Mapping[str, str]) -> None:
        """Watch a module whose own group has the parameters `names`: local name to full name."""

        def hook(watched: nn.Module, args: Any, output: Any) -> Any:
            if not torch.is_grad_enabled():
                return output
            output = _owned(output)
            present = dict(watched.named_parameters())
            here = {name: present[name] for name in names if present[name].requires_grad}
            reached = _leaves(output, args)
            unused = [p for p in here.values() if id(p) not in reached]
            if self.counting:
                self.used.update(names[name] for name, p in here.items() if id(p) in reached)
            return _touched(output, unused) if unused else output

        module.register_forward_hook(hook)


def _leaves(output: Any, inputs: Any) -> set[int]:
    """Return the ids of the leaves that `output` depends on, not looking behind `inputs`."""
    nodes = [tensor.grad_fn for tensor in leaves(output) if tensor.grad_fn is not None]
    # The nodes themselves, not their ids: Python's side of a node that nobody holds goes, and its id goes to another.
    seen = {tensor.grad_fn for tensor in leaves(inputs) if tensor.grad_fn is not None}
    found = set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(id(leaf))
        nodes.extend(following for following, _ in node.next_functions if following is not None)
    return found


def _owned(output: Any) -> Any:
    """Return the output with copies in place of views.

    FSDP2 hangs the hook that gathers parameters for backward on what a module returns. A view that is changed in place
    later (`x = block(x); x += y`) loses it: ZeRO 3 then fails in backward, ZeRO 2 may leave gradients unsummed. torch only
    warns of it, at every view, also of those that nobody changes. A copy costs one activation and takes both away.
    """
    if not any(map(_is_view, leaves(output))):
        return output
    return map_leaves(output, lambda tensor: tensor.clone() if _is_view(tensor) else tensor)


def _is_view(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor._base is not None


def _touched(output: Any, unused: list[nn.Parameter]) -> Any:
    """Hang the unused parameters on the first floating-point tensor of the output."""
    first = next((tensor for tensor in leaves(output) if tensor.is_floating_point()), None)
    if first is None:
        return output
    touched = _Touch.apply(first, *unused)  # type: ignore[no-untyped-call]
    return map_leaves(output, lambda tensor: touched if tensor is first else tensor)
