"""What a program says of its data: where it comes from, in which order, and how a replica's rows are cut and moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import TensorDataset

from guava_nb.config.units import show_bytes
from guava_nb.errors import ConfigError
from guava_nb.export.facts import ExportFacts
from guava_nb.export.source_text import call, literal

__all__ = ["DataText", "data_text", "moved"]

#: More than this is no small data, and belongs into a file of the user's own.
MOST_SAVED_BYTES = 256 << 20


@dataclass
class DataText:
    """See `data_text`; fields as the template names them."""

    by_index: bool
    order: str
    call: str
    loader: str = ""
    drop_last: bool = False
    seeds: tuple[int, ...] = ()
    stream_seed: int | None = None
    is_other_order: bool = False
    fill: bool = False
    saved: str = ""
    returns: str = ""
    what: str = ""
    look: tuple[str, ...] = ()
    counted: str = ""
    cut: str = ""
    collates_parts: bool = False


def data_text(facts: ExportFacts, named: Callable[[str], str], place: str, data: Path | None) -> tuple[DataText, Any]:
    """Return what to say, and the tensors to save, None without.

    Args:
        facts: of the run.
        named: gives the name that the program has for something of the user's.
        place: expression of the data set factory at the workers; "" where the orchestrator has the data.
        data: file for the tensors; None saves none.

    Raises:
        ConfigError: tensors are to be saved, and there are none in memory, or too many.
    """
    loader, record = facts.loader, facts.loader.record
    made = DataText(loader.by_index, record.kind, place or "build_data()", drop_last=loader.drop_last)
    _order(made, facts)
    if loader.by_index:
        of_workers = facts.data.collate if facts.data is not None else None
        collate = loader.collate if facts.data is None else of_workers.name if of_workers else ""
        # A collate function of the user's may mix the samples of a batch (mixup), so it gets the whole one where rows can be cut.
        is_own = bool(collate) and facts.data is None and _has_replicas(facts)
        made.collates_parts = is_own and facts.loader.cuts_otherwise
        if is_own and not made.collates_parts:
            made.counted, made.cut = _cutting(record.look)
        arguments = ["dataset", f"batch_sampler={'mine' if _has_replicas(facts) and not made.cut else 'batches'}"]
        arguments += [f"num_workers={loader.num_workers}"] if loader.num_workers else []
        arguments += [f"collate_fn={named(collate)}"] if collate else []
        made.loader = call("DataLoader", arguments, 13, 4)
    else:
        made.counted, made.cut = _cutting(record.look)
    made.what, made.returns = loader.what, "the data set" if loader.by_index else _BATCHES
    made.look = _look_lines(facts)
    made.fill = not place and data is None
    tensors = None
    if data is not None and not place:
        tensors, made.saved = _in_memory(loader.data_set(), data)
    elif data is not None:
        raise ConfigError(
            "its data set is made by a shared function, so there are no tensors to save: leave --save-data out"
        )
    return made, tensors


_BATCHES = "the batches of all processes together, the same on each of them"


def _has_replicas(facts: ExportFacts) -> bool:
    parallel = facts.spec.parallel
    return parallel is None or parallel.dp > 1


def _order(made: DataText, facts: ExportFacts) -> None:
    record = facts.loader.record
    if not made.by_index or made.order == "in turn":
        return
    if made.order == "stream":
        made.stream_seed, made.is_other_order = record.stream_seed, record.stream_seed is None
        return
    known = [record.seeds[epoch] for epoch in range(facts.num_epochs) if epoch in record.seeds]
    made.is_other_order = 0 not in record.seeds
    made.seeds = () if made.is_other_order else tuple(known)


def _look_lines(facts: ExportFacts) -> tuple[str, ...]:
    loader = facts.loader
    rows = f"a batch of {loader.batch_size}" if loader.batch_size else "a batch"
    count = f"{loader.samples} samples; " if loader.samples else ""
    return (f"{count}{rows}, over all processes, is", *(f"    {line}" for line in _look(loader.record.look)))


def _look(look: Any, name: str = "") -> list[str]:
    lead = f"{name}: " if name else ""
    if isinstance(look, tuple):
        return [f"{lead}{look[0]} {list(look[1])}"]
    if isinstance(look, dict):
        return [line for key, part in look.items() for line in _look(part, f"{name}[{literal(key)}]")]
    if isinstance(look, list):
        names = ("inputs", "targets") if len(look) == 2 and not name else [f"{name}[{k}]" for k in range(len(look))]
        return [line for part, label in zip(look, names, strict=True) for line in _look(part, label)]
    return [f"{lead}{look}"]


# ------------------------------------------------------------------------------------------------- rows and devices


def _is_flat(parts: Sequence[Any]) -> bool:
    return bool(parts) and all(isinstance(part, tuple) for part in parts)


def _cutting(look: Any) -> tuple[str, str]:
    """Return what has a length of as many rows, and the expression of a replica's rows."""
    rows = "mine.start : mine.stop"
    if isinstance(look, tuple):
        return "batch", f"batch[{rows}]"
    if isinstance(look, list) and _is_flat(look):
        return "batch[0]", f"[part[{rows}] for part in batch]"
    if isinstance(look, dict) and _is_flat(list(look.values())):
        return f"batch[{literal(next(iter(look)))}]", f"{{name: part[{rows}] for name, part in batch.items()}}"
    return "tree_leaves(batch)[0]", f"tree_map(lambda part: part[{rows}], batch)"


def moved(look: Any, double: bool) -> str:
    """Return the expression of a whole batch on the device."""
    to = "part.to(device)"
    if double:
        to = "part.to(device, torch.float64) if part.is_floating_point() else part.to(device)"
    if isinstance(look, tuple):
        return to.replace("part", "batch")
    if isinstance(look, list) and _is_flat(look):
        return f"[{to} for part in batch]"
    if isinstance(look, dict) and _is_flat(list(look.values())):
        return f"{{name: {to} for name, part in batch.items()}}"
    return f"tree_map_only(torch.Tensor, lambda part: {to}, batch)"


# ---------------------------------------------------------------------------------------------------- saved tensors


def _in_memory(data_set: Any, path: Path) -> tuple[Any, str]:
    """Return tensors that lie in memory, and the lines that load them again."""
    load = f'torch.load(Path(__file__).with_name("{path.name}"), weights_only=True)'
    if type(data_set) is TensorDataset:
        _check_size(data_set.tensors)
        return [tensor.clone() for tensor in data_set.tensors], f"return TensorDataset(*{load})"
    if isinstance(data_set, list | tuple):
        batches = [list(batch) if isinstance(batch, list | tuple) else batch for batch in data_set]
        tensors = [part for batch in batches for part in (batch.values() if isinstance(batch, dict) else batch)]
        if all(isinstance(part, Tensor) for part in tensors):
            _check_size(tensors)
            return batches, f"return {load}"
    raise ConfigError(
        f"only a TensorDataset and a list of batches of tensors can be saved, and the data is a "
        f"{'thing that is gone' if data_set is None else type(data_set).__name__}: leave --save-data out, and fill in "
        "build_data()"
    )


def _check_size(tensors: Sequence[Tensor]) -> None:
    size = sum(tensor.nbytes for tensor in tensors)
    if size > MOST_SAVED_BYTES:
        raise ConfigError(
            f"its tensors are {show_bytes(size)}, and up to {show_bytes(MOST_SAVED_BYTES)} are saved beside a program: leave "
            "--save-data out, and fill in build_data()"
        )
