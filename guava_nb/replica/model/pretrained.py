"""Pretrained weights that a machine fetches itself from the Hugging Face hub, "hf:NAME[@REVISION]": safetensors only.

Knows huggingface_hub, whose cache, token and HF_ENDPOINT count; runs no code of a repository. Every machine of a run loads the
same commit, and proves it by the digest of what it built, so that nothing of it passes the orchestrator's line.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from pathlib import Path
from typing import Any

import torch

from guava_nb.errors import CheckpointError, ConfigError
from guava_nb.replica.model.fitting import fitted
from guava_nb.spec.hub_name import ON_HUB, split_name

__all__ = ["load_pretrained", "pinned"]

#: The weights of a model by their usual names; a repository may hold the same in other forms, too.
_USUAL = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")


def pinned(weights: str) -> str:
    """Return the name with the commit that it means now, so that all machines load the same.

    Raises:
        ConfigError: there is none of this name, it cannot be reached, or it has no safetensors.
    """
    name, _ = split_name(weights)
    return f"{ON_HUB}{name}@{_folder(weights).name}"


def load_pretrained(weights: str, model: torch.nn.Module) -> list[str]:
    """Load weights of the hub into a model.

    Args:
        weights: with a revision, as `pinned` gives it.

    Returns:
        Names of what learns and is not there: it stays as it was built.

    Raises:
        ConfigError: they cannot be had here.
        CheckpointError: they do not fit the model.
    """
    tensors = _package("safetensors.torch")
    read: dict[str, Any] = {}
    for file in _files(_folder(weights)):
        try:
            read |= tensors.load_file(file)
        except Exception as error:  # of a damaged file any
            raise CheckpointError(f"{weights}: {file.name} cannot be read ({error}); fetch it again") from error
    state, added = fitted(read, model, weights)
    model.load_state_dict(state)
    return added


def _folder(weights: str) -> Path:
    """Where the files lie on this machine, fetched unless they are there; a branch may move, a commit does not."""
    is_commit = re.fullmatch("[0-9a-f]{40}", split_name(weights)[1] or "")
    return _commit(weights) if is_commit else _fetched(weights)


def _fetched(weights: str) -> Path:
    name, revision = split_name(weights)
    hub = _package("huggingface_hub")
    try:
        folder = Path(hub.snapshot_download(name, revision=revision, allow_patterns=list(_USUAL)))
        if not _files(folder):
            folder = Path(hub.snapshot_download(name, revision=revision, allow_patterns=["*.safetensors"]))
    except Exception as error:  # of the library, of requests and of the disk: what matters is its first line
        raise ConfigError(_refusal(weights, name, error)) from error
    if not _files(folder):
        raise ConfigError(
            f"{weights} has no .safetensors file, and other kinds may run code: load it where you trust it, save it with "
            "model.save_pretrained(FOLDER), and give --weights FOLDER (weights=FOLDER)"
        )
    return folder


_commit = functools.lru_cache(maxsize=8)(_fetched)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / file for file in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    usual = folder / "model.safetensors"
    return [usual] if usual.exists() else sorted(folder.glob("*.safetensors"))


def _refusal(weights: str, name: str, error: Exception) -> str:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    first = (str(error).strip() or repr(error)).splitlines()[0][:300]
    if "GatedRepoError" in kinds:
        advice = "accept its terms on its page, and set HF_TOKEN on each machine of the run, before the worker is started there"
    elif kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        advice = "look at the name, OWNER/NAME; a private one needs HF_TOKEN on each machine of the run"
    elif "RevisionNotFoundError" in kinds:
        advice = "look at the revision behind the @: a branch, a tag or a commit"
    else:
        advice = (
            f"this machine does not reach the hub and does not have it in its cache: fetch it once with `hf download {name}`, or "
            "copy the cache (HF_HOME) from a machine that has it; or give a file, which the orchestrator sends: --weights PATH"
        )
    return f"{weights} cannot be loaded ({type(error).__name__}: {first}): {advice}"


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"weights of the hub need a package that is missing here: {name.partition('.')[0]} (%guava_pip huggingface_hub "
            "safetensors installs it at the workers, %pip install huggingface_hub safetensors in a notebook)"
        ) from error
