"""Parameters of a run that do not learn: their digests, and checkpoints that leave them out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from guava_nb.errors import CheckpointError, ConfigError

__all__ = ["complete", "digests_of", "without_base"]


def digests_of(model: torch.nn.Module) -> dict[str, str]:
    """Return SHA-256 of dtype, shape and bytes of each frozen parameter, by name.

    Raises:
        ConfigError: no parameter is frozen.
    """
    parameters = model.named_parameters(remove_duplicate=False)
    digests = {name: _digest(one) for name, one in parameters if not one.requires_grad}
    if not digests:
        raise ConfigError(
            "save_only='trainable' (--save-only) leaves frozen parameters out of checkpoints, and this model has none: freeze "
            "them (parameter.requires_grad_(False), in the model's __init__ or in the registered instance), or leave save_only "
            "out"
        )
    return digests


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous()
    found = hashlib.sha256(f"{values.dtype} {tuple(values.shape)}".encode())
    found.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def without_base(state: Mapping[str, Any], base: Mapping[str, str]) -> dict[str, Any]:
    """Return a state without the frozen parameters, and with their digests; one that changed all the same stays in it."""
    model = state["model"]
    left_out = {name: digest for name, digest in base.items() if name in model and _digest(model[name]) == digest}
    return {
        **state,
        "model": {name: value for name, value in model.items() if name not in left_out},
        "base": left_out,
    }


def complete(path: Path, content: dict[str, Any], current: Mapping[str, Any]) -> None:
    """Fill in what a checkpoint left out, from the model that the run was built with.

    Raises:
        CheckpointError: that model has other values there.
    """
    base: Mapping[str, str] = content.get("base", {})
    missing = [name for name in base if name not in content["model"]]
    wrong = [name for name in missing if name not in current or _digest(current[name]) != base[name]]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{path} holds only the trainable part of a model, and the frozen part that it was trained with is another one than "
            f"that of the model here: {', '.join(wrong[:3])}{more} ({len(wrong)} of {len(missing)} differ by SHA-256). Give the "
            "model the same pretrained weights as then: weights=PATH (--weights) beside resume, or load them into the model and "
            "register_model(model)"
        )
    content["model"] = {**content["model"], **{name: current[name] for name in missing}}
