"""Weights from a file that another program wrote: a state dict of torch, or safetensors; never running code from it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from guava_nb.errors import CheckpointError, ConfigError
from guava_nb.replica.model.wrappers import plain_names
from guava_nb.training import checkpoint
from guava_nb.training.saving.frozen_base import complete

__all__ = ["fitting_weights"]

#: Under which names programs keep a state dict beside other things.
_PLACES = ("model", "state_dict", "model_state_dict")


def fitting_weights(path: Path, model: torch.nn.Module) -> tuple[dict[str, Any], list[str]]:
    """Return a model's state dict with the weights that a file holds.

    Entries that are tied in the model may stand once. Where a part of the model is frozen, the file may hold that part alone: a
    base, to which adapters or a new last layer were added that learn.

    Args:
        path: a file of torch.save, a .safetensors file, or a folder of such (as save_pretrained writes it).

    Returns:
        The state dict, and names of what learns and was not in the file, which is as the model has it.

    Raises:
        CheckpointError: it cannot be read, or does not fit the model in names, shapes and kinds of numbers.
        ConfigError: it needs a package that is not installed.
    """
    current = model.state_dict()
    read = plain_names(_read(path, current), current)
    weights = _with_tied(_with_adapted(read, current), current)
    added = _added(weights, model)
    weights |= {name: current[name] for name in added}
    if problems := checkpoint.differences(weights, current, f"in {path.name}"):
        raise CheckpointError(
            f"the weights in {path} do not fit the model ({problems}). For a model with other parts, such as a new last layer, "
            "load what fits yourself (model.load_state_dict(weights, strict=False)) and register_model(model)"
        )
    return weights, added


def _with_adapted(weights: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Rename what peft renames when it adds adapters to a model: `base_model.model.` before, `.base_layer` within."""
    names = {name.removeprefix("base_model.model.").replace(".base_layer.", "."): name for name in current}
    return {name if name in current else names.get(name, name): value for name, value in weights.items()}


def _added(weights: Mapping[str, Any], model: torch.nn.Module) -> list[str]:
    """What learns and is not in the file, where all that is frozen is in it."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen = [name for name, one in parameters.items() if not one.requires_grad]
    if not frozen or any(name not in weights for name in frozen):
        return []
    return [name for name, one in parameters.items() if one.requires_grad and name not in weights]


def _with_tied(weights: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in entries that the model keeps in the same memory as others: safetensors writes them once."""
    places = {_place(current[name]): value for name, value in weights.items() if name in current}
    tied = {name: places[_place(one)] for name, one in current.items() if name not in weights and _place(one) in places}
    return {**weights, **tied}


def _place(value: Any) -> object:
    is_empty = not isinstance(value, torch.Tensor) or value.numel() == 0
    return object() if is_empty else (value.data_ptr(), value.shape, value.stride())


def _read(path: Path, current: Mapping[str, Any]) -> dict[str, Any]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not path.exists():
        raise CheckpointError(f"there are no weights in {path}: give a .safetensors file, or one of torch.save")
    try:
        if files[0].suffix == ".safetensors":
            return {name: value for file in files for name, value in _safetensors().load_file(file).items()}
        content = torch.load(path, map_location="cpu", weights_only=True)
    except ConfigError:
        raise
    except Exception as error:  # of a damaged file any
        raise CheckpointError(
            f"the weights in {path} cannot be read ({(str(error) or repr(error)).splitlines()[0]}). A file of "
            " torch.save may hold nothing but a state dict: torch.save(model.state_dict(), path)"
        ) from error
    if isinstance(content, dict) and content.get("format") == checkpoint.FORMAT:
        complete(path, content, current)
    return _state_dict(path, content)


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ConfigError("weights from a .safetensors file need a package: pip install safetensors") from error


def _state_dict(path: Path, content: Any) -> dict[str, Any]:
    inner = [content] + [content[place] for place in _PLACES if isinstance(content, Mapping) and place in content]
    for one in inner:
        if isinstance(one, Mapping) and one and all(isinstance(value, torch.Tensor) for value in one.values()):
            return {str(name): value for name, value in one.items()}
    raise CheckpointError(
        f"{path} holds no state dict (names with tensors; looked at it as a whole, and under {', '.join(_PLACES)}): save one "
        "with torch.save(model.state_dict(), path)"
    )
