"""Which parameters a forward used, and gradients of zero for those it did not.

FSDP2 reduces whatever gradients a module has, so all replicas must have the same ones; and where a module's parameter
goes unused on one replica only, they have not. So a module that is sharded gives each of its parameters that its
outputs do not depend on a gradient of zero. What was truly used is remembered: a parameter that nobody used anywhere
must end with no gradient at all, as in plain PyTorch, where AdamW leaves it alone. Outputs that are views are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["Touch", "tensors_in"]


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


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors_in(entry)
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors_in(entry)


class Touch:
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
    nodes = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
    # The nodes themselves, not their ids: Python's side of a node that nobody holds goes, and its id goes to another.
    seen = {tensor.grad_fn for tensor in tensors_in(inputs) if tensor.grad_fn is not None}
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
    if isinstance(output, Tensor):
        return output.clone() if output.requires_grad and output._base is not None else output
    if isinstance(output, list | tuple):
        entries = [_owned(entry) for entry in output]
        if all(new is old for new, old in zip(entries, output, strict=True)):
            return output
        return type(output)(*entries) if hasattr(output, "_fields") else type(output)(entries)
    if isinstance(output, dict):
        for key, entry in output.items():
            if (own := _owned(entry)) is not entry:
                output[key] = own
    return output


def _touched(output: Any, unused: list[nn.Parameter]) -> Any:
    """Hang the unused parameters on the first floating-point tensor of the output."""
    if isinstance(output, Tensor):
        return _Touch.apply(output, *unused) if output.is_floating_point() else output  # type: ignore[no-untyped-call]
    if isinstance(output, list | tuple):
        for number, entry in enumerate(output):
            if any(t.is_floating_point() for t in tensors_in(entry)):
                entries = [*output[:number], _touched(entry, unused), *output[number + 1 :]]
                return type(output)(*entries) if hasattr(output, "_fields") else type(output)(entries)
    if isinstance(output, dict):
        for key, entry in output.items():
            if any(t.is_floating_point() for t in tensors_in(entry)):
                output[key] = _touched(entry, unused)
                return output
    return output
