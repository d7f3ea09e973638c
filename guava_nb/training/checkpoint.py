"""Checkpoints: one file that plain PyTorch reads with `torch.load(path, weights_only=True)`.

Keys: format, model, optimizer, scheduler, scaler (state dicts of the full model in every mode and with any number of
workers), step, position (epoch, batches, samples, feed), spec (what was trained, as plain data); where it was asked for log
(the name of the run's log), and base (digests of frozen parameters, which are then left out of model); own (number and count of
what workers keep on their disks, see `OwnParts`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from guava_nb.data.sizes import size_of
from guava_nb.errors import CheckpointError
from guava_nb.protocol.messages import Factory, RunSpec
from guava_nb.replica.model.fitting import differences
from guava_nb.replica.model.wrappers import plain_names
from guava_nb.sync.own_state import MOST_WORKERS, OwnParts
from guava_nb.training.plan import Position
from guava_nb.training.saving import archive
from guava_nb.training.saving.durable_file import NotWritten, write_durably
from guava_nb.training.saving.frozen_base import complete, without_base

__all__ = [
    "ANOTHER", "Extras", "Loaded", "check_model", "differences", "made_with", "model_text", "read", "write",
]  # fmt: skip

FORMAT = "guava_nb checkpoint 1"
#: What can be done where a checkpoint is of no use.
ANOTHER = "Give another one (resume=PATH, --resume PATH), or train anew (fresh=True, --fresh)"
#: More steps, batches or samples than this no run has.
_MOST_COUNTED = 1 << 48


class Loaded(NamedTuple):
    """A checkpoint that was read, and where it lies."""

    path: Path
    content: dict[str, Any]


class Extras(NamedTuple):
    """What a checkpoint has beside state and place: what the plan of its run adds.

    Attributes:
        base: digests of the frozen parameters that it leaves out.
        log: name of the run's log, with the steps and epochs that this counts and the run does not.
        kept: places in Python that the run changed, which no checkpoint has.
        own: what workers keep beside it, of rounds of local steps.
    """

    base: Mapping[str, str] | None = None
    log: tuple[str, int, int] | None = None
    kept: Sequence[str] = ()
    own: OwnParts | None = None


def write(
    path: Path, state: Mapping[str, Any], step: int, position: Position, spec: RunSpec, extras: Extras | None = None
) -> None:
    """Write a checkpoint; a crash while writing, or a loss of power, leaves the old file as it was.

    Args:
        extras: what the run's plan adds.

    Raises:
        CheckpointError: the file cannot be written.
    """
    base, log, kept, own = extras or Extras()
    content = {
        "format": FORMAT,
        **(state if base is None else without_base(state, base)),
        **({"log": list(log)} if log else {}),
        **({"kept": list(kept)} if kept else {}),
        **({} if own is None else {"own": own.record}),
        "step": step,
        "position": {name: getattr(position, name) for name in Position.__slots__},
        "spec": {f: msgspec.to_builtins(getattr(spec, f)) for f in spec.__struct_fields__},
    }
    try:
        with _checksums():
            write_durably(path, lambda sink: torch.save(content, sink), size_of(content))  # type: ignore[arg-type]
    except (NotWritten, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"cannot write {path}: {error}. Choose another place with save_checkpoint(path) (%guava_save PATH), and for what a "
            "run saves by itself with checkpoint_dir (--checkpoint-dir)"
        ) from error


@contextlib.contextmanager
def _checksums() -> Iterator[None]:
    """Have torch write checksums, also where the user switched them off: `read` looks at them."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint, never running code from it, in memory that the file's size bounds.

    Raises:
        CheckpointError: no such file, not a checkpoint of guava_nb, or damaged.
    """
    if not path.is_file():
        what = f"{path} is no file" if path.exists() else f"there is no checkpoint {path}"
        raise CheckpointError(f"{what}; {_nearby(path)}")
    try:
        content = archive.load(path)
    except (archive.ArchiveError, OSError) as error:
        if getattr(error, "is_foreign", False):
            raise CheckpointError(f"{path} is not a checkpoint of guava_nb: {error}. {ANOTHER}") from error
        raise CheckpointError(f"{path} cannot be read as a checkpoint ({error}). {ANOTHER}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a checkpoint of guava_nb. To start from plain weights: weights=PATH (--weights PATH)"
        )
    if damaged := _damaged(content):
        raise CheckpointError(
            f"{path} is a damaged checkpoint: {damaged} is missing or is not what was written there. {ANOTHER}"
        )
    return content


def _damaged(content: Mapping[str, Any]) -> str:
    """Return the first part that cannot be gone on from, "" when all is there."""
    model, place, spec, step = (content.get(key) for key in ("model", "position", "spec", "step"))
    if not isinstance(model, dict) or not all(isinstance(k, str) for k in model):
        return "model"
    if not isinstance(content.get("optimizer"), dict | None):
        return "optimizer"
    if not isinstance(spec, dict):
        return "spec"
    base, log, kept = content.get("base", {}), content.get("log", ["", 0, 0]), content.get("kept", [])
    own = content.get("own")
    if not isinstance(base, dict) or not all(isinstance(name, str) for name in base):
        return "base"
    if not isinstance(log, list | tuple) or [type(one) for one in log] != [str, int, int]:
        return "log"
    if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
        return "kept"
    if own is not None and not _is_own(own):
        return "own"
    if type(step) is not int or not -1 <= step < _MOST_COUNTED:
        return "step"
    if not isinstance(place, dict) or place.keys() != set(Position.__slots__):
        return "position"
    counts = [place[key] for key in ("epoch", "batches", "samples")]
    fine = all(type(count) is int and 0 <= count < _MOST_COUNTED for count in counts) and (
        place["feed"] is None or isinstance(place["feed"], dict)
    )
    return "" if fine else "position"


def _is_own(own: Any) -> bool:
    if not isinstance(own, dict) or own.keys() != {"number", "count", "sums"} or not isinstance(own["sums"], dict):
        return False
    are_rests = all(isinstance(key, str) and isinstance(rest, torch.Tensor) for key, rest in own["sums"].items())
    number, count = own["number"], own["count"]
    return are_rests and type(number) is type(count) is int and 0 < number < 1 << 62 and 0 < count <= MOST_WORKERS


def _nearby(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path()
    made = (folder / "checkpoints", Path("checkpoints"))  # where checkpoints without a given name go
    found = [(place, _held(place)) for place in dict.fromkeys((folder, *made)) if place.is_dir()]
    told = [f"in {place} there are: {', '.join(names[:8])}" for place, names in found if names]
    return "; ".join(told) or f"{folder.absolute()} holds no checkpoint"


def _held(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.suffix in (".pt", ".pth", ".ckpt"))


def check_model(path: Path, content: dict[str, Any], current: Mapping[str, Any], model: Factory | None) -> None:
    """Compare a checkpoint's model with the one that a call names.

    Args:
        path: where the checkpoint lies.
        content: what `read` returned. Its tensors get the model's names where a wrapper's stood in them.
        current: the model's own state dict.
        model: which model that is; None where it was given as an object.

    Raises:
        CheckpointError: names or shapes differ, or frozen parameters that the file left out; the message lists the first few,
            and names both models.
    """
    content["model"] = plain_names(content["model"], current)
    complete(path, content, current)
    if problems := differences(content["model"], current):
        made = model_text(content)
        raise CheckpointError(
            f"{path} belongs to another model than {_said(model)}, the one asked for now ({problems}). To go on from it, ask "
            f"for the model it was made with{f', {made}' if made else ''} (--model, --model-args, and its shared cell as it "
            "was); to leave it aside, train with fresh=True (--fresh)"
        )


def made_with(content: Mapping[str, Any]) -> Factory | None:
    """Return the model's name and arguments as far as the file tells, else None."""
    try:
        return msgspec.convert(content["spec"].get("model"), Factory)
    except msgspec.ValidationError:
        return None


def model_text(content: Mapping[str, Any]) -> str:
    """Return the model in words, "" where the file does not tell it."""
    return "" if (made := made_with(content)) is None else _said(made)


def _said(model: Factory | None) -> str:
    if model is None:
        return "that of the calling process"
    name = model.name.rpartition(":")[2]
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in model.args.items())})"
