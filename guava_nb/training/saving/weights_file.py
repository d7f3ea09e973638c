"""Weights from a file that another program wrote: a state dict of torch, or safetensors; never running code from it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from guava_nb.errors import CheckpointError, ConfigError
from guava_nb.replica.model.fitting import fitted
from guava_nb.training import checkpoint
from guava_nb.training.saving.frozen_base import complete

__all__ = ["fitting_weights"]

#: Under which names programs keep a state dict beside other things.
_PLACES = ("model", "state_dict", "model_state_dict")


def fitting_weights(path: Path, model: torch.nn.Module) -> tuple[dict[str, Any], list[str]]:
    """Return a model's state dict with the weights that a file holds.

    Args:
        path: a file of torch.save, a .safetensors file, or a folder of such (as save_pretrained writes it).

    Returns:
        As `fitted` does.

    Raises:
        CheckpointError: it cannot be read, or does not fit the model.
        ConfigError: it needs a package that is not installed.
    """
    return fitted(_read(path, model.state_dict()), model, str(path))


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
            f"the weights in {path} cannot be read ({_why(error)}). A file of "
            "torch.save may hold nothing but a state dict: torch.save(model.state_dict(), path)"
        ) from error
    if isinstance(content, dict) and content.get("format") == checkpoint.FORMAT:
        complete(path, content, current)
    return _state_dict(path, content)


def _why(error: Exception) -> str:
    if type(error).__name__ == "UnpicklingError":  # torch's text for it advises to switch the protection off
        return "it holds more than tensors and plain data, such as a whole model"
    return (str(error) or repr(error)).splitlines()[0]


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
