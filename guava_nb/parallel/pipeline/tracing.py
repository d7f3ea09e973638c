"""The outermost calls of a model as a graph: what runs after what, and which values flow between.

Only the modules that hold a cut point are looked into; everything else stays one call of a whole module, with its own
control flow, hooks and parameter names. An `nn.Sequential` needs no tracing at all.
"""

from __future__ import annotations

import dis
import functools
import keyword
import random
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from guava_nb.errors import ConfigError

__all__ = ["graph_of", "is_plain_sequential", "units_of"]

_ROOT = "model"
_OWN_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, "backward", "requires_grad_", "retain_grad")
_FACTORIES = ("zeros", "ones", "empty", "full", "eye", "rand", "randn", "arange", "linspace")


class _Single(nn.Module):
    """Calls the model as training does: with the inputs and nothing else, so that other arguments keep their defaults."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Any:
        return self.model(inputs)


_NOTHING = object()


class _OuterTracer(fx.Tracer):
    """Looks into the given modules only; assertions are left out, whatever they ask."""

    # A buffer can then be cut by a size that is not known yet: self.mask[:length].
    proxy_buffer_attributes = True

    def __init__(self, enter: Collection[str]) -> None:
        super().__init__()
        self.inside: list[nn.Module] = []
        self._enter = {_ROOT, *(f"{_ROOT}.{name}" for name in enter)}
        self._modes = _modes()

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        if _modes() != self._modes:
            raise ConfigError(
                "a forward that is cut into stages switches gradients or autocast on or off (torch.no_grad(), say), and stages "
                "run only the calls that they find in it: put what runs so into a submodule of its own, which switches in its "
                "own forward, or take a mode without stages"
            )
        return super().create_proxy(*args, **kwargs)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.inside.append(m)
        loop = _LOOPS.get(getattr(type(m), "forward", None))
        result = super().call_module(m, forward if loop is None else functools.partial(loop, m), args, kwargs)
        self.inside.pop()  # not after an error: the innermost one is where it happened
        return result

    def path_of_module(self, mod: nn.Module) -> str:
        try:
            return super().path_of_module(mod)
        except NameError as error:
            raise ConfigError(
                f"the model cannot be cut into stages: its forward calls a {type(mod).__name__} that is no submodule of the "
                "model (it lies in a plain list or dict, or outside, or is a slice of an nn.Sequential), and stages call "
                "submodules by their names: keep it in an nn.ModuleList or nn.ModuleDict, call it in the forward of a submodule "
                "of its own, or take a mode without stages"
            ) from error

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._enter and not is_plain_sequential(m)

    def to_bool(self, obj: fx.Proxy) -> bool:
        if _in_assertion(sys._getframe(1)):
            return True
        return bool(super().to_bool(obj))


def _encoder(
    module: nn.TransformerEncoder, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None
) -> Any:
    """What the forward of torch's encoder does while training: its own asks tensors which of its kernels would do."""
    if src_key_padding_mask is not None and mask is None and getattr(module, "use_nested_tensor", True):
        raise ConfigError(
            "an nn.TransformerEncoder with a padding mask packs its rows in evaluation, all layers at once; make it with "
            "enable_nested_tensor=False to cut between its layers"
        )
    given = {"src_mask": mask, "is_causal": bool(is_causal), "src_key_padding_mask": src_key_padding_mask}
    for layer in module.layers:
        src = layer(src, **given)
    return src if module.norm is None else module.norm(src)


_DECODER_MASKS = ("tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask", "tgt_is_causal")


def _decoder(module: nn.TransformerDecoder, tgt: Any, memory: Any, *masks: Any, **named: Any) -> Any:
    """The same for torch's decoder."""
    given = {**dict(zip((*_DECODER_MASKS, "memory_is_causal"), masks, strict=False)), **named}
    given["tgt_is_causal"] = bool(given.get("tgt_is_causal"))
    for layer in module.layers:
        tgt = layer(tgt, memory, **given)
    return tgt if module.norm is None else module.norm(tgt)


#: A causal mask is given as a mask in any case; the hint that it is one only chooses a kernel.
_LOOPS: dict[Any, Callable[..., Any]] = {
    nn.TransformerEncoder.forward: _encoder,
    nn.TransformerDecoder.forward: _decoder,
}


def is_plain_sequential(module: nn.Module) -> bool:
    """Whether calling the children one by one is all that calling the module does."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return getattr(type(module), "forward", None) is nn.Sequential.forward and not any(hooks)


def units_of(sequential: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield full name and module of everything a sequential calls, nested ones opened."""
    for name, child in sequential._modules.items():
        assert child is not None, "an nn.Sequential has no empty places"
        if is_plain_sequential(child):
            yield from units_of(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def graph_of(model: nn.Module, enter: Collection[str] = ()) -> tuple[fx.Graph, dict[str, Any]]:
    """Return the calls of a model in order, and what their names stand for.

    Args:
        model: the whole model; its `forward` takes the inputs as the first argument, others have defaults.
        enter: full names of the modules to look into, beside the model itself.

    Raises:
        ConfigError: the flow depends on values, or on train and eval mode; the text says what to do.
    """
    if is_plain_sequential(model):
        return _sequential_graph(model)
    modes = {module: module.training for module in model.modules()}
    try:
        model.train()
        graph, objects = _trace(model, enter)
        model.eval()
        other, _ = _trace(model, enter)
    finally:
        for module, training in modes.items():
            module.training = training
    if str(graph) != str(other):
        raise ConfigError(
            f"{type(model).__name__}.forward does other things in train than in eval mode (self.training, "
            "functional dropout); put that into a submodule of its own, such as nn.Dropout, to cut the model into stages"
        )
    return graph, objects


def _sequential_graph(model: nn.Module) -> tuple[fx.Graph, dict[str, Any]]:
    graph = fx.Graph()
    value = graph.placeholder("inputs")
    objects: dict[str, Any] = {}
    for name, unit in units_of(model):
        value = graph.call_module(name, (value,))
        objects[name] = unit
    graph.output(value)
    return graph, objects


def _trace(model: nn.Module, enter: Collection[str]) -> tuple[fx.Graph, dict[str, Any]]:
    single, tracer = _Single(model), _OuterTracer(enter)
    try:
        with _factories_followed(), _refusing_changes(model, enter), _refusing_what_happens_once(model):
            graph = tracer.trace(single)
    except ConfigError:
        raise
    except Exception as error:
        where = type(tracer.inside[-1] if tracer.inside else model).__name__
        name = type(model).__name__
        raise ConfigError(
            f"{name} cannot be cut into stages: in the forward of {where}, {_first_line(error)}. What holds a cut is "
            "followed without values, so it must not branch on tensors or their sizes. Move that into a submodule, write "
            f"the model as an nn.Sequential of its blocks{'' if where == name else f', or call what {where} holds yourself'}"
        ) from error
    _refuse_in(graph, model)
    return graph, _named_objects(graph, single)


def _refuse_in(graph: fx.Graph, model: nn.Module) -> None:
    """Refuse calls that no stage can do.

    Raises:
        ConfigError: the forward takes gradients itself, or a module has a name that no program text can have.
    """
    for node in graph.nodes:
        if node.target in _OWN_GRADIENTS:
            called = node.target if isinstance(node.target, str) else f"torch.autograd.{node.target.__name__}"
            raise ConfigError(
                f"the forward of {type(model).__name__} takes gradients itself ({called}), and a stage sees a part of the graph "
                "only. Put all that this needs into one submodule with a forward of its own, or take a mode without stages"
            )
        is_named = node.op in ("call_module", "get_attr")
        if is_named and (word := next(filter(keyword.iskeyword, str(node.target).split(".")), "")):
            raise ConfigError(
                f"a module of {type(model).__name__} is called {word!r} ({str(node.target).partition('.')[2]}), which is a word "
                "of Python's own, so the code of a stage cannot name it: give it another name, or take a mode without stages"
            )


@contextmanager
def _factories_followed() -> Iterator[None]:
    """Let torch.zeros(length, 1) be followed: torch's own tracer sees functions that are given a tensor only.

    And of an autograd function it would see the forward, and lose the backward.
    """
    originals = {name: getattr(torch, name) for name in _FACTORIES}
    apply = torch.autograd.Function.__dict__["apply"]
    for name, function in originals.items():
        setattr(torch, name, _followed(function))
    torch.autograd.Function.apply = classmethod(lambda cls, *given: _applying(cls, apply)(*given))  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        for name, function in originals.items():
            setattr(torch, name, function)


@functools.cache
def _applying(cls: type[torch.autograd.Function], apply: Any) -> Callable[..., Any]:
    def function(*given: Any) -> Any:
        return apply.__get__(None, cls)(*given)

    function.__name__ = function.__qualname__ = f"{cls.__qualname__}.apply"
    return _followed(function)


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


@contextmanager
def _refusing_changes(model: nn.Module, enter: Collection[str]) -> Iterator[None]:
    """Undo and refuse what a followed forward changes of the model in Python: stages run the calls in it, and not the rest.

    Raises:
        ConfigError: it set an attribute, or requires_grad of a parameter.
    """
    modules = [model, *(model.get_submodule(name) for name in enter)]
    before = [dict(vars(module)) for module in modules]
    took = {name: (parameter, parameter.requires_grad) for name, parameter in model.named_parameters()}
    try:
        yield
        for module, attributes in zip(modules, before, strict=True):
            changed = [name for name, value in vars(module).items() if attributes.get(name, _NOTHING) is not value]
            if changed:
                raise _changes(module, f"self.{changed[0]}")
        for name, (parameter, took_gradients) in took.items():
            if parameter.requires_grad != took_gradients:
                raise _changes(model, f"requires_grad of {name}")
    finally:
        for module, attributes in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
        for parameter, took_gradients in took.values():
            parameter.requires_grad_(took_gradients)


@contextmanager
def _refusing_what_happens_once(model: nn.Module) -> Iterator[None]:
    """Refuse what a followed forward does with values: it happened here, once, and happens in no step.

    Raises:
        ConfigError: it drew random numbers, or wrote into a parameter or a buffer.
    """
    random_before, versions = _random_states(), _versions(model)
    yield
    if _random_states() != random_before:
        raise ConfigError(
            f"the forward of {type(model).__name__} draws random numbers where it is cut into stages (noise, layer drop), and "
            "they would be the same in every step. Draw them in the forward of a submodule, or take a mode without stages"
        )
    for name, version in _versions(model).items():
        if versions.get(name, version) != version:
            raise _changes(model, f"the values of {name}")


def _versions(model: nn.Module) -> dict[str, int]:
    """How often each parameter and buffer was written to."""
    return {
        name: tensor._version
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if not tensor.is_inference()
    }


def _random_states() -> tuple[Any, ...]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += torch.cuda.get_rng_state_all()
    return (
        tuple(bytes(state.numpy()) for state in states),
        random.getstate(),
        repr(np.random.get_state(legacy=False)["state"]),
    )


def _changes(module: nn.Module, what: str) -> ConfigError:
    return ConfigError(
        f"the forward of {type(module).__name__} changes {what}, and stages run only the calls that they find in it: the "
        "change would not happen in any step. Put what changes it into a submodule of its own, or take a mode without stages"
    )


def _followed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is one call of the graph where it is given something that flows there."""

    @functools.wraps(function)
    def follow(*args: Any, **kwargs: Any) -> Any:
        found: list[fx.Proxy] = []
        fx.node.map_aggregate((args, kwargs), lambda a: found.append(a) if isinstance(a, fx.Proxy) else a)
        if not found:
            return function(*args, **kwargs)
        return found[0].tracer.create_proxy("call_function", function, args, kwargs)

    return follow


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _named_objects(graph: fx.Graph, single: nn.Module) -> dict[str, Any]:
    """Give every name in the graph its name in the model, and look it up."""
    objects: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            value: Any = single
            for part in str(node.target).split("."):
                value = getattr(value, part)
            node.target = str(node.target).removeprefix(f"{_ROOT}.")
            objects[node.target] = value
    return objects


def _in_assertion(frame: FrameType | None) -> bool:
    """Whether the first frame outside torch and this file is in the condition of an `assert`."""
    while frame is not None and (
        frame.f_globals.get("__name__", "").startswith("torch.") or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back
    if frame is None:
        return False
    after = [step for step in dis.get_instructions(frame.f_code) if step.offset >= frame.f_lasti]
    steps = [step for step in after if step.opname not in ("CACHE", "TO_BOOL", "NOT_TAKEN", "EXTENDED_ARG", "NOP")][:2]
    names = [step.opname for step in steps]
    return (
        len(steps) == 2
        and names[0].endswith("IF_TRUE")
        and ("ASSERTION" in names[1] or "Assertion" in str(steps[1].argrepr))
    )
