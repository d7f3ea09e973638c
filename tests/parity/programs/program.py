"""What a program of the table is: plain data, and what plain PyTorch makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = [
    "ACCUMULATED",
    "COUPLED",
    "NOISY",
    "POSITIONS",
    "READ",
    "STATISTICS",
    "Plain",
    "Program",
    "batches",
    "draw",
    "labels",
    "plain",
]

#: Where a sentence must stand for a kind of program that cannot equal plain PyTorch when its batch is cut.
COUPLED = "cut, the gradient differs by"  # a loss that looks at all samples of a batch
STATISTICS = "Batch norms see their own piece"  # layers that normalise over the batch
NOISY = "whose draws depend on the shares"  # dropout, noise drawn in forward
POSITIONS = "split_fn"  # parts that refer to positions in the batch
ACCUMULATED = "is as one batch of all of them"  # a mean of unlike batches in one step
#: Refusals of programs that take a layer's parameters from outside, where each worker holds a part of them.
READ = {"tensor": "is read outside its layer", "zero 3": "is read outside its layer"}


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training program as a user writes it.

    Attributes:
        name: of its row in the table.
        model: makes the model, without arguments; importable.
        data: makes the loader, the same batches each time.
        criterion, step: one of the two.
        optimizer, scheduler: names of torch, or functions as a user shares them.
        options: further ones of `start_training`.
        settings: of every mode, such as `sync_batchnorm`.
        instance: register what `model` returns, not `model` itself.
        epochs: passes over the data.
        refused: phrase of the refusal, by mode; "*" stands for all modes not named, "mode/workers" counts first. What every
            program may meet, such as a model too small for so many stages, stands in `table.MODE_REFUSALS`.
        told: phrase of the notice that tells of a difference, in the same way.
        modes: those in which it means anything.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    criterion: Any = None
    step: Callable[[nn.Module, Any], Any] | None = None
    criterion_args: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Any = "SGD"
    optimizer_args: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.1})
    scheduler: Any = None
    scheduler_args: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    instance: bool = False
    epochs: int = 2
    refused: Mapping[str, str] = field(default_factory=dict)
    told: Mapping[str, str] = field(default_factory=dict)
    modes: tuple[str, ...] = ()

    def expected(self, mode: str, workers: int) -> tuple[str, str]:
        """Return "refused" or "told" with its phrase, or "equal"."""
        for kind, table in (("refused", self.refused), ("told", self.told)):
            for key in (f"{mode}/{workers}", mode, "*"):
                if key in table:
                    return kind, table[key]
        return "equal", ""


# ------------------------------------------------------------------------------------------------------------- data


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(high: int, *shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def batches(*parts: Any, size: int = 8, **words: Any) -> DataLoader[Any]:
    """A shuffled loader over tensors, or over one data set."""
    data = TensorDataset(*parts) if isinstance(parts[0], torch.Tensor) else parts[0]
    return DataLoader(data, size, shuffle=True, generator=torch.Generator().manual_seed(9), **words)


# ---------------------------------------------------------------------------------------------------- plain PyTorch


@dataclass(frozen=True)
class Plain:
    """What one process came to: final state and losses of the steps."""

    state: dict[str, Any]
    losses: list[float]


def _double(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
        return value.double()
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_double(one) for one in value)
    if type(value) is dict:
        return {key: _double(one) for key, one in value.items()}
    return value


def plain(program: Program) -> Plain:
    """Train in one process with torch alone, on whole batches in float64."""
    torch.manual_seed(0)
    model = program.model()
    for tensor in (*model.parameters(), *model.buffers()):  # as double() does, and complex to complex128
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.data = tensor.data.to(torch.complex128 if tensor.is_complex() else torch.float64)
    options = dict(program.options)
    optimizer = _optimizer(program, model)
    scheduler = _scheduler(program, optimizer)
    loss_of = _loss_of(program)
    group, seen, losses = options.get("accumulation_steps", 1), 0, list[float]()
    model.train()
    data = program.data()
    for _ in range(program.epochs):
        loaded = list(data)
        for start in range(0, len(loaded), group):
            part = loaded[start : start + group]
            optimizer.zero_grad()
            parts = [loss_of(model, _double(batch)) for batch in part]
            count = sum(float(n) for _, n in parts)
            loss = sum(value for value, _ in parts) / count
            loss.backward()
            if options.get("max_grad_norm"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), options["max_grad_norm"])
            optimizer.step()
            if scheduler is not None and options.get("scheduler_interval", "step") == "step":
                scheduler.step()
            losses.append(float(loss.detach()))
            seen += 1
        if scheduler is not None and options.get("scheduler_interval") == "epoch":
            scheduler.step()
    assert all(map(math.isfinite, losses)), f"{program.name} is no good program: {losses}"
    kept = {
        key: one.detach().clone() if isinstance(one, torch.Tensor) else one for key, one in model.state_dict().items()
    }
    return Plain(kept, losses)


def _loss_of(program: Program) -> Callable[[nn.Module, Any], tuple[torch.Tensor, float]]:
    """The loss as sum and count: what a mean over several batches needs."""
    treat = program.options.get("preprocess") or (lambda batch: batch)
    augment = program.options.get("augment") or (lambda batch: batch)
    criterion = program.criterion
    if isinstance(criterion, str):
        module = getattr(nn, criterion)(**_tensors(program.criterion_args))
        criterion = module

    def measured(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        batch = treat(augment(batch))
        if program.step is not None:
            outcome = program.step(model, batch)
        else:
            inputs, targets = batch
            outputs = model(inputs)
            if isinstance(criterion, nn.CrossEntropyLoss) and outputs.ndim > 2 and targets.shape == outputs.shape[:-1]:
                outputs, targets = outputs.flatten(0, -2), targets.flatten()
            outcome = criterion(outputs, targets)
        if isinstance(outcome, tuple):
            return outcome[0], float(outcome[1])
        rows = _rows(batch) if program.options.get("accumulation_steps", 1) > 1 else 1  # several are as one batch
        return outcome * rows, float(rows)

    return measured


def _rows(batch: Any) -> int:
    return len(batch) if isinstance(batch, torch.Tensor) else _rows(batch[-1])


def _tensors(words: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
        for key, value in words.items()
    }


def _optimizer(program: Program, model: nn.Module) -> Any:
    if isinstance(program.optimizer, str):
        return getattr(torch.optim, program.optimizer)(model.parameters(), **program.optimizer_args)
    return program.optimizer(list(model.named_parameters()), **program.optimizer_args)


def _scheduler(program: Program, optimizer: Any) -> Any:
    if program.scheduler is None:
        return None
    if isinstance(program.scheduler, str):
        return getattr(torch.optim.lr_scheduler, program.scheduler)(optimizer, **program.scheduler_args)
    return program.scheduler(optimizer, **program.scheduler_args)
