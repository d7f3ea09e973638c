"""Whether a parameter of which this rank holds a part is read outside the layer that knows so: looked at on the first batch.

A layer of a tensor group answers for its own forward, and FSDP2 gathers parameters for the forward of the module that holds
them. A penalty on all weights, a forward that takes another layer's weight, or an average of parameters kept in buffers
would compute with a part as if it were the whole. And what a forward writes into gathered parameters is thrown away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless
from torch.overrides import TorchFunctionMode

from guava_nb.errors import ConfigError
from guava_nb.nested import leaves
from guava_nb.parallel.unloaded import is_dtensor, is_optimized, is_sharded_module

__all__ = ["PartsInUse", "is_compiled", "writes"]

#: Attributes of a tensor that give its numbers or its sizes; all others are the same for a part.
_TELLING = {"data", "T", "mT", "H", "mH", "real", "imag", "shape"}
_SILENT = {
    Tensor.dim, Tensor.is_floating_point, Tensor.is_complex, Tensor.__hash__, Tensor.requires_grad_, Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook, torch.is_floating_point, torch.is_complex, torch.is_tensor,
}  # fmt: skip


#: What acts on each element alone: right on parts too, as long as all that meet are parts cut alike (a moving average).
_ELEMENTWISE = {
    "detach", "data", "clone", "copy_", "lerp", "lerp_", "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_",
    "__rmul__", "zero_", "clamp", "clamp_", "clip", "clip_", "clamp_min_", "clamp_max_",
}  # fmt: skip


#: Methods that end like those that change numbers, and change none.
_METADATA = {
    "requires_grad_",
    "detach_",
    "share_memory_",
    "retain_grad",
    "__init__",
    "__index__",
    "__int__",
    "__invert__",
}


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile wraps the model or a module of it."""
    return any(m._compiled_call_impl is not None or is_optimized(m) for m in model.modules())


def writes(func: Callable[..., Any], kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether a function, as a `TorchFunctionMode` sees it, changes the tensor that it is given first, or one given as `out`."""
    name = _name(func)
    if name in _METADATA or (name == "data" and func.__name__ != "__set__"):
        return False
    in_place = name.endswith("_") and not name.endswith("__") and not name.startswith("__")
    return (
        in_place
        or name in ("__setitem__", "data")
        or name.startswith("__i")
        or bool(kwargs and kwargs.get("out") is not None)
    )


class PartsInUse:
    """Watches the first pass in training and in evaluation, and the 4th, 8th, 16th and so on, since code may begin to do more.

    Args:
        model: this rank's, spread already; its split layers have `layouts`.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the layers that know of their parts."""
        self._model = model
        self._layers = [module for module in model.modules() if "layouts" in module.__dict__]
        # A mode would be traced into a compiled module, which would then be compiled twice.
        self._is_compiled = is_compiled(model)
        self._passes = {True: 0, False: 0}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Raise inside where a part is read as if it were the whole, in a pass that is watched.

        Raises:
            ConfigError: which parameter, by what, and what to do.
        """
        training = self._model.training
        self._passes[training] = number = self._passes[training] + 1
        if number in (2, 3) or number & (number - 1) or self._is_compiled:
            yield
            return
        parts = {id(p): name for name, p in self._model.named_parameters() if is_dtensor(p)}
        own = {id(getattr(layer, name)) for layer in self._layers for name in layer.__dict__["layouts"]}
        parts |= {id(p): name for name, p in self._model.named_parameters() if id(p) in own}
        if not parts:
            yield
            return
        mode = _Watch(self._model, parts)
        hooks = [layer.register_forward_pre_hook(mode.enter, prepend=True) for layer in self._layers]
        hooks += [layer.register_forward_hook(mode.leave, always_call=True) for layer in self._layers]
        try:
            with mode, _no_functional_call():
                yield
        finally:
            for hook in hooks:
                hook.remove()


@contextlib.contextmanager
def _no_functional_call() -> Iterator[None]:
    """Refuse a call of a sharded module with given parameters inside: what FSDP2 gathers and sums are its own."""
    call = stateless._functional_call

    def refusing(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(is_sharded_module(part) for part in module.modules()):
            name = type(module).__name__.removeprefix("FSDP")
            raise ConfigError(
                f"torch.func.functional_call gives {name} parameters, and ZeRO 2 and 3 gather those of the model itself, and sum "
                "their gradients: use data mode or zero_stage=1 (--zero 1)"
            )
        return call(module, *args, **kwargs)

    stateless._functional_call = refusing
    try:
        yield
    finally:
        stateless._functional_call = call


class _Watch(TorchFunctionMode):
    def __init__(self, model: nn.Module, parts: Mapping[int, str]) -> None:
        super().__init__()
        self._model, self._parts, self._inside = model, dict(parts), 0
        self._is_sharded = any(is_dtensor(p) for p in model.parameters())
        self._gathered: set[int] = set()
        self._made: list[Tensor] = []  # keeps the numbers of what was made of parts from being given again

    def enter(self, *_: Any) -> None:
        self._inside += 1

    def leave(self, *_: Any) -> None:
        self._inside -= 1

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Look at what a function is given, then run it."""
        if self._is_sharded and args and self._is_gathered(args[0]):
            return self._on_gathered(func, args, kwargs or {})
        if self._inside or not _reads(func):
            return self._run(func, args, kwargs or {})
        given = list(leaves((args, kwargs or {})))
        parts = [tensor for tensor in given if id(tensor) in self._parts]
        if not parts:
            return self._run(func, args, kwargs or {})
        name = self._parts[id(parts[0])]
        alike = all(id(one) in self._parts and one.shape == parts[0].shape for one in given if one.numel() != 1)
        if _name(func) not in _ELEMENTWISE or not alike:
            raise ConfigError(_text(name, func, is_dtensor(parts[0])))
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._parts[id(result)] = name
            self._made.append(result)
        return result

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function, and see that it changes nothing that was gathered, as `embedding` with max_norm does."""
        if not self._is_sharded:
            return func(*args, **kwargs)
        gathered = [(one, one._version) for one in leaves((args, kwargs)) if self._is_gathered(one)]
        result = func(*args, **kwargs)
        changed = next((one for one, version in gathered if one._version != version), None)
        if changed is not None:
            raise self._written(changed, _name(func))
        return result

    def _written(self, tensor: Tensor, by: str) -> ConfigError:
        """Return the error of a write into a gathered parameter of any shape."""
        by, way = f"by {by}", "keep what moves without gradients in buffers, or use"
        if by.startswith("by embedding"):
            by += " with max_norm"
            way = "renormalise the whole weight in the forward, with torch.no_grad(): weight.renorm_(2, 0, max_norm), and use"
        return ConfigError(
            f"the forward writes into {self._name_of(tensor)}, {by}, and with ZeRO 2 and 3 that is a gathered copy, which is "
            f"thrown away: {way} data mode or zero_stage=1 (--zero 1)"
        )

    def _is_gathered(self, value: Any) -> bool:
        """Whether it is a parameter that FSDP2 gathered for this forward, or shares its memory."""
        whole = isinstance(value, nn.Parameter) and not is_dtensor(value) and value.ndim > 0
        return whole or id(value) in self._gathered

    def _on_gathered(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = _name(func)
        if args[0].numel() and not args[0].untyped_storage().size():  # reading it would end the process
            raise ConfigError(
                f"{self._name_of(args[0])} is read by {name} after the forward that gathered it, and with ZeRO 2 and 3 its "
                "memory is given back then: keep such work inside the model's forward, or use data mode or zero_stage=1 "
                "(--zero 1)"
            )
        if writes(func, kwargs):
            raise self._written(args[0], name)
        part = next((one for one in leaves((args, kwargs)) if id(one) in self._parts), None)
        if part is not None:
            raise ConfigError(_text(self._parts[id(part)], func, is_sharded=True))
        result = self._run(func, args, kwargs)
        if name in ("data", "detach") and isinstance(result, Tensor):
            self._gathered.add(id(result))
            self._made.append(result)
        return result

    def _name_of(self, tensor: Tensor) -> str:
        return next((repr(name) for name, p in self._model.named_parameters() if p is tensor), "a parameter")


def _reads(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return name == "__get__" and getattr(func.__self__, "__name__", "") in _TELLING  # type: ignore[attr-defined]
    return func not in _SILENT


def _name(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]


def _text(parameter: str, func: Callable[..., Any], is_sharded: bool) -> str:
    layer = parameter.rpartition(".")[0]
    if is_sharded:
        way = (
            "with ZeRO 2 and 3 each worker holds a part of it until the model itself is called: let the step call model(...) "
            "and nothing inside it, and do such work in the model's forward; or use data mode or zero_stage=1 (--zero 1)"
        )
    else:
        way = (
            "in tensor mode each worker holds a part of it: keep the layer whole with "
            f'tensor_plan={{"{layer}": "replicate"}} (--plan), or use another mode. An L2 penalty, for example, can be '
            "weight_decay of SGD or Adam instead"
        )
    return f"{parameter!r} is read outside its layer, by {_name(func)}, and {way}"
