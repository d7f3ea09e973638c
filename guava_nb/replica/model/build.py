"""From a run's record to a model in its place, with every setting that cannot work refused first.

Knows the record and devices; knows nothing of steps.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterable

import torch
from torch import nn

from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import RunSpec
from guava_nb.replica.model.pretrained import load_pretrained
from guava_nb.replica.model.wrappers import is_compiled, unwrapped
from guava_nb.replica.rng import seeded
from guava_nb.spec.factories import Resolve, build, find

__all__ = [
    "autocast_dtype",
    "begin_training",
    "build_model",
    "check_spec",
    "compile_modules",
    "copied_model",
    "place_model",
    "place_module",
]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PRECISIONS = ("fp32", "bf16", "fp16", "fp64")


def check_spec(spec: RunSpec) -> None:
    """Refuse settings that cannot work.

    Raises:
        ConfigError: which one, and what to choose instead.
    """
    if spec.sync_batchnorm and spec.parallel is None:
        raise ConfigError(
            "sync_batchnorm needs the workers to exchange statistics inside the forward, through a process group, and whole "
            "replicas that meet at the orchestrator have none"
        )
    if spec.precision not in _PRECISIONS:
        raise ConfigError(f"precision is {spec.precision!r}; choose one of {', '.join(_PRECISIONS)}")
    if spec.optimizer_site not in ("workers", "orchestrator"):
        raise ConfigError(f'optimizer_site is {spec.optimizer_site!r}; choose "workers" or "orchestrator"')
    if spec.max_grad_norm is not None and not spec.max_grad_norm > 0:
        raise ConfigError(f"max_grad_norm is {spec.max_grad_norm}; give a positive number, or None for no clipping")


def build_model(spec: RunSpec, resolve: Resolve) -> nn.Module:
    """Call the model factory on the CPU, its random numbers drawn as after `torch.manual_seed(spec.seed)`.

    Returns:
        The plain model, see `guava_nb.replica.model.wrappers`, with the run's frozen parameters and pretrained weights.

    Raises:
        ConfigError: there is none, its name or arguments are wrong, or it makes no module.
        PreparationError: it raised.
        CheckpointError: pretrained weights do not fit it.
    """
    if spec.model is None:
        raise ConfigError("no model: give a model factory, or bring a model object with the worker")
    factory = find("model", spec.model.name, {}, "", resolve)
    if isinstance(factory, nn.Module):
        raise ConfigError(f"model {spec.model.name!r} is a model already; name its class, or a function that makes it")
    with seeded(spec.seed, torch.device("cpu")):
        model = build("model", spec.model.name, factory, from_torch=False, args=spec.model.args)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model {spec.model.name!r} returned a {type(model).__name__}; it must return a torch.nn.Module"
        )
    model = unwrapped(model)
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise ConfigError(
                f"buffer {name!r} is sparse, and only dense tensors travel: keep its indices and values in two buffers, and make "
                "the sparse tensor of them in the forward (torch.sparse_coo_tensor)"
            )
    if spec.frozen is not None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in spec.frozen)
    if spec.pretrained:
        load_pretrained(spec.pretrained, model)
    return model


def place_model(model: nn.Module, spec: RunSpec, device: torch.device) -> nn.Module:
    """Move a model to its device, in the precision and memory format that the run asks for, keeping tied parameters tied."""
    module = place_module(model, device, spec.precision == "fp64")
    return module.to(memory_format=torch.channels_last) if spec.channels_last else module  # type: ignore[call-overload]


def place_module(module: nn.Module, device: torch.device, double: bool) -> nn.Module:
    """Move a module; `double` makes float64 of its floats and complex128 of its complex values, which `double()` leaves."""
    module.to(device)
    if not double:
        return module
    module.double()._apply(lambda value: value.to(torch.complex128) if value.is_complex() else value)  # type: ignore[no-untyped-call]
    return module


def compile_modules(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Compile modules in place with torch's default compiler, unless the user's factory compiled them; names stay.

    Raises:
        ConfigError: the compiler needs what is not on this machine.
    """
    lacks = _lacks_compiler(device)
    if lacks:
        raise ConfigError(
            f"compile=True (--compile) needs {lacks} on each worker, and there is none here: install it, or leave compile out"
        )
    for module in modules:
        if not is_compiled(module):
            module.compile()


def _lacks_compiler(device: torch.device) -> str:
    """Name what torch.compile needs and this machine lacks, else ""; torch's own checks, private so far."""
    with contextlib.suppress(ImportError):
        if device.type == "cuda":
            from torch.utils._triton import has_triton

            return "" if has_triton() else "Triton"
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except RuntimeError:
            return "a C++ compiler"
    return ""


def begin_training(model: nn.Module) -> nn.Module:
    """Call `train()` of a model as every plain loop does, where one of its modules has its own; layers frozen before stay so.

    Such a method keeps some layers in evaluation mode, mostly batch norms. Without one all flags are right already.
    """
    if model.training and any(type(module).train is not nn.Module.train for module in model.modules()):
        frozen = [module for module in model.modules() if not module.training]
        model.train()
        for module in frozen:
            module.training = False
    return model


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast, None when the precision needs none.

    Raises:
        ConfigError: this device or this torch cannot do it.
    """
    dtype = _AUTOCAST.get(precision)
    if dtype is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch only warns, and then computes in float32
            torch.autocast(device.type, dtype=dtype)
    except (RuntimeError, UserWarning) as error:
        raise ConfigError(
            f"precision {precision} does not work on {device} with torch {torch.__version__}: {error}"
        ) from error
    return dtype


def copied_model(model: nn.Module) -> nn.Module:
    """Return a copy of a model, what its last forward left in attributes (pruning, the older weight_norm) without its graph.

    Raises:
        Exception: it holds what cannot be copied.
    """
    attributes = (value for module in model.modules() for value in vars(module).values())
    computed = (value for value in attributes if isinstance(value, torch.Tensor) and not value.is_leaf)
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in computed})
