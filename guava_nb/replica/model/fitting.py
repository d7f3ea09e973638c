"""Weights of another program in the place of a model's own: names of wrappers, ties and adapters, and what does not fit.

Knows state dicts; knows no files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch

from guava_nb.errors import CheckpointError
from guava_nb.replica.model.wrappers import plain_names

__all__ = ["differences", "fitted"]

#: Where peft keeps a layer as it was before a copy of it learns: it computes nothing, so a file need not have it.
_KEPT_ASIDE = ".original_module."


def fitted(read: Mapping[str, Any], model: torch.nn.Module, source: str) -> tuple[dict[str, Any], list[str]]:
    """Return a model's state dict with weights that were read.

    Entries that are tied in the model may stand once. Where a part of the model is frozen, that part alone may have been read: a
    base, to which adapters or a new last layer were added that learn, also in place of one of another shape.

    Args:
        source: where they were read from, for sentences.

    Returns:
        The state dict, and names of what learns and was not read, or in another shape, which is as the model has it.

    Raises:
        CheckpointError: they do not fit the model in names, shapes and kinds of numbers.
    """
    current = model.state_dict()
    adapted = _before_adapters(current)
    read = _with_base(plain_names(dict(read), current), model, {*current, *adapted})
    weights = _with_tied({name: value for n, value in read.items() for name in adapted.get(n, [n])}, current)
    weights |= {name: current[name] for name in current if _KEPT_ASIDE in name and name not in weights}
    added = _added(weights, model)
    weights |= {name: current[name] for name in added}
    if problems := differences(weights, current, f"in {source.replace(chr(92), '/').rpartition('/')[2]}"):
        raise CheckpointError(
            f"the weights in {source} do not fit the model ({problems}). For a model with other parts, such as a new last layer, "
            "freeze all that is read (requires_grad_(False)): then what learns and has no weights of its shape begins as it is "
            "built; or load what fits yourself (take what does not out of the weights, then "
            "model.load_state_dict(weights, strict=False)) and register_model(model)"
        )
    return weights, added


def _with_base(read: Mapping[str, Any], model: torch.nn.Module, known: Collection[str]) -> Mapping[str, Any]:
    """What transformers does with files of a model without its head: its names are below `base_model_prefix`.

    Args:
        known: names of the model, and those that it had before adapters were added.
    """
    ignored = [re.compile(one) for one in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    prefix = getattr(model, "base_model_prefix", "")
    if isinstance(prefix, str) and prefix and not any(name in known for name in read):
        read = {f"{prefix}.{name}": value for name, value in read.items()}
    return {n: v for n, v in read.items() if n in known or not any(one.search(n) for one in ignored)}


def _before_adapters(current: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names of a model by those that they had before peft added adapters, where these are others.

    It puts `base_model.model.` before them and `.base_layer` into layers with an adapter. Of a layer that learns as a whole
    (`modules_to_save`) it keeps the first one aside, and trains a copy.
    """
    names: dict[str, list[str]] = {}
    for name in current:
        before = re.sub(
            r"\.(base_layer|original_module|modules_to_save\.\w+)\.", ".", name.removeprefix("base_model.model.")
        )
        if before not in current:
            names.setdefault(before, []).append(name)
    return names


def _added(weights: Mapping[str, Any], model: torch.nn.Module) -> list[str]:
    """What learns and is not in the file, or in another shape, where all that is frozen is in it."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen = [name for name, one in parameters.items() if not one.requires_grad and _KEPT_ASIDE not in name]
    if not frozen or any(name not in weights for name in frozen):
        return []
    shapes = {name: tuple(value.shape) for name, value in weights.items() if isinstance(value, torch.Tensor)}
    return [name for name, one in parameters.items() if one.requires_grad and shapes.get(name) != tuple(one.shape)]


def _with_tied(weights: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in entries that the model keeps in the same memory as others: safetensors writes them once."""
    places = {_place(current[name]): value for name, value in weights.items() if name in current}
    tied = {name: places[_place(one)] for name, one in current.items() if name not in weights and _place(one) in places}
    return {**weights, **tied}


def _place(value: Any) -> object:
    is_empty = not isinstance(value, torch.Tensor) or value.numel() == 0
    return object() if is_empty else (value.data_ptr(), value.shape, value.stride())


def differences(saved: Mapping[str, Any], current: Mapping[str, Any], where: str = "in the file") -> str:
    """Return what two state dicts have not in common, the first few of each kind; "" when they fit.

    Args:
        where: in what `saved` lies.
    """
    missing = [name for name in current if name not in saved]
    extra = [name for name in saved if name not in current]
    shapes = [
        f"{name}: {_shape(saved[name])} {where}, {_shape(current[name])} in the model"
        for name in current
        if name in saved and _shape(saved[name]) != _shape(current[name])
    ]
    kinds = [
        f"{name}: {_kind(saved[name])} {where}, {_kind(current[name])} in the model"
        for name in current
        if name in saved and _kind(saved[name]) != _kind(current[name])
    ]
    problems = [
        *([f"not {where}: {', '.join(missing[:3])}{_more(missing)}"] if missing else []),
        *([f"not in the model: {', '.join(extra[:3])}{_more(extra)}"] if extra else []),
        *([f"other shapes: {'; '.join(shapes[:3])}{_more(shapes)}"] if shapes else []),
        *([f"other kinds of numbers: {'; '.join(kinds[:3])}{_more(kinds)}"] if kinds else []),
    ]
    return ". ".join(problems)


def _kind(value: Any) -> str:
    """What kind of numbers a tensor has: of floats, and of whole numbers, each width can be made of each."""
    if not isinstance(value, torch.Tensor):
        return "no tensor"
    if value.is_complex() or value.is_floating_point() or value.dtype == torch.bool:
        return "complex" if value.is_complex() else ("float" if value.is_floating_point() else "bool")
    return "whole numbers"


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))  # what get_extra_state() returned has none


def _more(items: list[str]) -> str:
    return f" and {len(items) - 3} more" if len(items) > 3 else ""
