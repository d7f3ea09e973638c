"""A replica's state as plain data: CPU tensors, numbers, strings, lists, tuples and dicts, and nothing else.

So it travels as a typed record, and `torch.load(weights_only=True)` reads it. Knows state dicts; knows nothing of
files.
"""

from __future__ import annotations

import collections
import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from guava_nb.errors import CheckpointError, ConfigError
from guava_nb.protocol.messages import RunSpec

__all__ = [
    "copied",
    "extra_states",
    "give_extra_states",
    "like",
    "load_model",
    "parameter_hash",
    "plain",
    "refuse_extra_state",
    "weights_digest",
]

_HASH_COLUMNS = 4096
_Memo = dict[tuple[Any, ...], Tensor]


def plain(value: Any, path: str = "state", memo: _Memo | None = None) -> Any:
    """Return a copy made of plain values and contiguous CPU tensors; tensors that were one (tied weights) stay one.

    Functions inside dicts are left out: the object that loads the state has its own.

    Raises:
        CheckpointError: something else is inside; the message says where.
    """
    memo = {} if memo is None else memo
    if isinstance(value, Tensor):
        return _plain_tensor(value, memo)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: plain(item, f"{path}[{key!r}]", memo) for key, item in value.items() if not _is_function(item)}
    if isinstance(value, list | tuple):
        parts = [plain(item, f"{path}[{i}]", memo) for i, item in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    raise CheckpointError(
        f"{path} is a {type(value).__name__}, which cannot be saved as plain data; keep numbers or tensors there"
    )


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, Tensor | nn.Module)


def _plain_tensor(tensor: Tensor, memo: _Memo) -> Tensor:
    """Return a copy on the CPU, of the same shape; views of the same elements share one."""
    tensor = tensor.detach()
    key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    if tensor.numel() == 0 or key not in memo:
        clone = torch.empty(tensor.shape, dtype=tensor.dtype)
        clone.copy_(tensor)
        memo[key] = clone
    return memo[key]


def copied(value: Any) -> Any:
    """Return a state whose tensors are not shared with the given one: torch's optimizers keep what they load."""
    return plain(value)


def like(template: Any, value: Any) -> Any:
    """Give plain dicts back the class that the template has at the same place (a Counter, say)."""
    if isinstance(template, Mapping) and isinstance(value, Mapping):
        items = {key: like(template[key], item) if key in template else item for key, item in value.items()}
        return collections.Counter(items) if isinstance(template, collections.Counter) else items
    if isinstance(template, list | tuple) and isinstance(value, list | tuple) and len(template) == len(value):
        return type(template)(like(t, v) for t, v in zip(template, value, strict=True))
    return value


def load_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Copy a model state into a model.

    Raises:
        CheckpointError: it belongs to another model; the message names what differs.
    """
    own = model.state_dict()
    problems = [f"{name} is missing" for name in own if name not in state]
    problems += [f"{name} is unknown" for name in state if name not in own]
    for name, tensor in own.items():
        other = state.get(name)
        if isinstance(tensor, Tensor) and isinstance(other, Tensor) and tensor.shape != other.shape:
            problems.append(f"{name} has shape {tuple(other.shape)}, the model has {tuple(tensor.shape)}")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(f"this state belongs to another model: {'; '.join(problems[:3])}{more}")
    given = collections.OrderedDict(state)
    if not hasattr(own, "_metadata"):  # a state_dict of the user's own, which may leave frozen layers out
        model.load_state_dict(given, strict=False)
        return
    # Versions of the layers' formats: both sides run the same code, and plain data does not carry them.
    given._metadata = own._metadata  # type: ignore[attr-defined]
    model.load_state_dict(given)


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Return what modules keep beside tensors (`get_extra_state`), as plain data under its keys in the state dict.

    Raises:
        CheckpointError: some of it is no plain data.
    """
    return {key: plain(module.get_extra_state(), key) for key, module in _with_extra_state(model)}


def give_extra_states(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give modules what `extra_states` found in another model, as far as the state has it."""
    for key, module in _with_extra_state(model):
        if key in state:
            module.set_extra_state(copied(state[key]))


def refuse_extra_state(model: nn.Module, spec: RunSpec) -> None:
    """Check that a run keeps what modules have beside tensors.

    Raises:
        ConfigError: it does not.
    """
    shape, found = spec.parallel, _with_extra_state(model)
    if not found:
        return
    kept = f"{type(found[0][1]).__name__} keeps more than tensors (get_extra_state)"
    if spec.optimizer_site == "orchestrator":
        raise ConfigError(
            f"{kept}, and with optimizer_site='orchestrator' no forward runs where the state is, so what forwards change of it "
            "would be lost: use optimizer_site='workers' (--optimizer-site workers)"
        )
    if shape is not None and (shape.pp > 1 or shape.mode == "pipeline"):
        raise ConfigError(
            f"{kept}, and the stages of a pipeline have tensors only: use data, tensor or ZeRO mode, or keep it in buffers "
            "(register_buffer)"
        )


def _with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    named = model.named_modules(remove_duplicate=False)
    return [
        (f"{name}._extra_state".lstrip("."), module)
        for name, module in named
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]


def parameter_hash(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return SHA-256 over names, dtypes, shapes, and sums of all bits, in order; alike on every kind of device.

    Each tensor is summed by rows and by columns of a table where it lies, as whole numbers, so that some kilobytes come to
    the host instead of the model, and no value changes without changing a row and a column.
    """
    hasher, sums = hashlib.sha256(), list[Tensor]()
    for name, tensor in named:
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sums += _bit_sums(tensor.detach())
    for device in dict.fromkeys(one.device for one in sums):
        hasher.update(torch.cat([one for one in sums if one.device == device]).cpu().numpy().data)
    return hasher.hexdigest()


def _bit_sums(tensor: Tensor) -> list[Tensor]:
    """Return int64 sums over the rows and columns of a tensor's bits as a table, and what does not fill its last row.

    Returns:
        `[columns]`, `[rows]` and `[fewer than columns]`; the last alone where there is no whole row.
    """
    whole = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).contiguous().reshape(-1)
    bits = whole.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.element_size()])
    rows = bits.numel() // _HASH_COLUMNS
    table, rest = bits[: rows * _HASH_COLUMNS].view(rows, _HASH_COLUMNS), bits[rows * _HASH_COLUMNS :].long()
    return [table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64), rest] if rows else [rest]


def weights_digest(model: nn.Module) -> str:
    """Return SHA-256 over names, dtypes, shapes and the SHA-256 of the content of all parameters and buffers.

    The tensors are hashed side by side, since hashing leaves Python's lock.

    Returns:
        "" for a model whose weights say not all of its state, or cannot be hashed.
    """
    tensors = {
        **dict(model.named_buffers(remove_duplicate=False)),
        **dict(model.named_parameters(remove_duplicate=False)),
    }
    state = model.state_dict()
    if not hasattr(state, "_metadata") or not state.keys() <= tensors.keys():
        return ""
    hasher = hashlib.sha256()
    try:
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            contents = list(pool.map(lambda tensor: hashlib.sha256(_raw(tensor)).digest(), tensors.values()))
    except (RuntimeError, TypeError):  # a sparse tensor, one without data
        return ""
    for (name, tensor), content in sorted(zip(tensors.items(), contents, strict=True), key=lambda item: item[0][0]):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + content)
    return hasher.hexdigest()


def _raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor of any shape, in C order; they share its memory where that is on the CPU and contiguous."""
    value = tensor.detach().cpu().contiguous().reshape(-1)
    raw: memoryview = value.view(torch.uint8).numpy().data
    return raw
