"""What is minimised: from a model and a batch to a loss whose parts add up to the mean over the whole global batch.

Knows torch's criteria and the user's loss or step function; knows nothing of gradients, steps or workers.

A mean of means is wrong as soon as the parts have unequal denominators (ignored labels, class weights, padding), and
nothing shows it. So every loss is a sum with its true denominator, `Loss.count`; the mean over a global batch is the
sum of sums over the sum of counts, however the batch was cut. Torch's criteria run with reduction="sum" and the
denominator that reduction="mean" would have used. A user's function that returns a mean counts the samples of its
batch.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from guava_nb.errors import ConfigError
from guava_nb.parallel.step_errors import explained
from guava_nb.parallel.unloaded import go_back
from guava_nb.protocol.messages import Factory, RunSpec
from guava_nb.replica.model.build import place_module
from guava_nb.replica.scores import Scoring, TokenScores
from guava_nb.replica.sum_and_count import refuse_no_sum
from guava_nb.spec.factories import Resolve, build, check_arguments, find

__all__ = [
    "Criterion",
    "Observer",
    "Loss",
    "Objective",
    "backward",
    "build_criterion",
    "build_objective",
    "find_criterion",
    "scoring",
    "user_function",
]


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss in parts.

    Attributes:
        value: scalar with the graph; the sum over the batch is `value * weight`.
        weight: 1 for a sum, the number of samples for a mean.
        count: denominator of this batch; None: the user wants the plain sum over the global batch (reduction="sum").
        scores: as `Scoring.scores` gives them, where asked for and where they have a meaning.
    """

    value: Tensor
    weight: float
    count: float | Tensor | None
    scores: Tensor | None = None


class Objective(Protocol):
    """Runs the model on a batch and measures it."""

    def __call__(
        self, model: nn.Module, batch: Any, rows: int, want_scores: bool = False, observer: Observer | None = None
    ) -> Loss:
        """Return the loss of a batch of `rows` samples.

        Args:
            model: to be called.
            batch: its samples.
            rows: how many.
            want_scores: also score outputs against targets.
            observer: called with outputs, targets and rows, to measure something else.
        """


#: Why no gradient can come of a loss.
NO_GRADIENT = (
    "the loss depends on no trainable parameter: check requires_grad, and that the loss is computed from the model's outputs "
    "without detach(), item() or no_grad()"
)


def counts_none(loss: Loss) -> bool:
    """Whether a batch has nothing that counts, as (0, 0) of a step says: it adds nothing to the mean."""
    return loss.count is not None and float(loss.count) == 0.0


def backward(value: Tensor, factor: Tensor | float, keep_graph: bool) -> None:
    """Run backward of `value * factor`, with an operation more than a plain loop has at most.

    Args:
        value: the loss, one element.
        factor: of it; a tensor of one element where only the device knows it.
        keep_graph: another backward through the same graph follows.

    Raises:
        TrainingError: another backward has used the graph up.
    """
    if value.dtype in (torch.float16, torch.bfloat16):
        value = value.float()  # the factor would be rounded
    seed = torch.full_like(value, factor) if isinstance(factor, float) else factor.to(value.dtype).reshape(value.shape)
    try:
        go_back(value, seed, keep_graph)
    except RuntimeError as error:
        if (told := explained(error)) is not None:
            raise told from error
        raise


Criterion = Callable[[Any, Any, int], Loss]
#: Sees outputs, targets and rows.
Observer = Callable[[Any, Any, int], None]


def build_objective(spec: RunSpec, resolve: Resolve, device: torch.device) -> Objective:
    """Return the objective that a run's record describes.

    Raises:
        ConfigError: not exactly one of criterion and step is given, a name is unknown, an argument does not fit, or a
            torch criterion needs more than outputs and targets.
    """
    if (spec.criterion is None) == (spec.step is None):
        raise ConfigError(
            "give exactly one of criterion= (a loss of outputs and targets) and step= (a function of model and batch)"
        )
    if spec.step is not None:
        return _StepObjective(user_function("step", spec.step, resolve))
    return _CriterionObjective(build_criterion(spec, resolve, device))


def build_criterion(spec: RunSpec, resolve: Resolve, device: torch.device) -> Criterion:
    """Return the criterion that a run's record describes, for a pipeline's last stage, which sees outputs only.

    Raises:
        ConfigError: a name is unknown, an argument does not fit, or a torch criterion needs more than outputs and targets.
    """
    assert spec.criterion is not None
    return _build_criterion(spec.criterion, resolve, device, spec.precision == "fp64")


def scoring(criterion: Criterion, *, in_training: bool = True) -> Criterion:
    """Return a criterion that also scores outputs against targets; without `in_training` only where no gradients are recorded."""
    own = getattr(criterion, "scoring", None)

    def measure(outputs: Any, targets: Any, rows: int) -> Loss:
        if not (in_training or not torch.is_grad_enabled()):
            return criterion(outputs, targets, rows)
        with contextlib.nullcontext() if own else TokenScores(rows) as tokens:
            loss = criterion(outputs, targets, rows)
        scores = tokens.of_outputs(outputs) if tokens else None
        return replace(loss, scores=(own or Scoring()).scores(outputs, targets) if scores is None else scores)

    return measure


class _StepObjective:
    """The user's `step(model, batch)`: batches of any form."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = self.user = step

    def __call__(
        self, model: nn.Module, batch: Any, rows: int, want_scores: bool = False, observer: Observer | None = None
    ) -> Loss:
        if observer is not None:
            raise ConfigError(
                "metrics need outputs and targets, and a step gives only a loss: train with a criterion (--loss, criterion=)"
            )
        if not want_scores:
            return _read_outcome("step", self._step(model, batch), rows)
        with TokenScores(rows) as tokens:
            loss = _read_outcome("step", self._step(model, batch), rows)
        return replace(loss, scores=tokens.of_model(model))


class _CriterionObjective:
    """A criterion over batches of the form (inputs, targets)."""

    def __init__(self, criterion: Criterion) -> None:
        self._criterion, self._scoring = criterion, scoring(criterion)
        self.user = getattr(criterion, "user", None)
        module = getattr(criterion, "module", None)
        self.torch_loss = None if module is None else type(module)

    def __call__(
        self, model: nn.Module, batch: Any, rows: int, want_scores: bool = False, observer: Observer | None = None
    ) -> Loss:
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            shape = (
                f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, list | tuple) else type(batch).__name__
            )
            raise ConfigError(
                f"a criterion needs batches of the form (inputs, targets), this one is a {shape}; "
                "give a step instead (--step, step=): a shared function of (model, batch) that returns the mean loss, or "
                "(loss_sum, count)"
            )
        inputs, targets = batch
        outputs = model(inputs)
        loss = (self._scoring if want_scores else self._criterion)(outputs, targets, rows)
        if observer is not None:  # last: a metric may write into outputs
            observer(outputs, targets, rows)
        return loss


# ------------------------------------------------------------------------------------------------------ user functions


def user_function(role: str, factory: Factory, resolve: Resolve) -> Callable[..., Any]:
    """Return a shared or importable function of model and batch, with its arguments put in.

    Args:
        role: what it is for, in the user's words.
        factory: its name and arguments.
        resolve: finds it.

    Raises:
        ConfigError: the name is not known, or it cannot be called so.
    """
    function = find(role, factory.name, {}, "", resolve)
    check_arguments(role, factory.name, function, 2, factory.args)
    return functools.partial(function, **factory.args) if factory.args else function


def _read_outcome(role: str, outcome: Any, rows: int) -> Loss:
    """Take a mean, (loss_sum, count), or (loss_sum, None) for the plain sum, as a user's function returned it."""
    loss = outcome[0] if isinstance(outcome, list | tuple) and outcome else outcome
    if isinstance(loss, Tensor) and loss.is_complex():
        raise ConfigError(
            f"the {role} function returned a complex loss, and only a real one can be minimised: take .abs()"
        )
    if isinstance(outcome, Tensor) and outcome.numel() == 1:
        return Loss(outcome.reshape(()), float(rows), float(rows))
    if isinstance(outcome, list | tuple) and len(outcome) == 2:
        loss_sum, count = outcome
        if isinstance(loss_sum, Tensor) and loss_sum.numel() == 1 and count is None:
            return Loss(loss_sum.reshape(()), 1.0, None)
        if isinstance(loss_sum, Tensor) and loss_sum.numel() == 1 and _is_count(count):
            refuse_no_sum(role, loss_sum, count, rows)
            return Loss(loss_sum.reshape(()), 1.0, count.detach() if isinstance(count, Tensor) else float(count))
    shape = f" of shape {tuple(outcome.shape)}" if isinstance(outcome, Tensor) else ""
    kind = "None" if outcome is None else f"a {type(outcome).__name__}"
    raise ConfigError(
        f"the {role} function returned {kind}{shape}; return a scalar tensor, the mean over the "
        "batch, or (loss_sum, count) with the sum as a scalar tensor and its denominator, None for the plain sum"
    )


def _is_count(count: Any) -> bool:
    if isinstance(count, Tensor):
        return count.numel() == 1
    return isinstance(count, int | float) and not isinstance(count, bool)


# ----------------------------------------------------------------------------------------------------- torch's criteria


_Denominator = Callable[[nn.Module, Tensor, Tensor], float | Tensor]


def _per_element(module: nn.Module, outputs: Tensor, targets: Tensor) -> float | Tensor:
    """Return what the mean of an element-wise loss divides by: the elements of the broadcast result."""
    shape: torch.Size = torch.broadcast_shapes(outputs.shape, targets.shape)  # type: ignore[no-untyped-call]
    return float(shape.numel())


def _per_row(module: nn.Module, outputs: Tensor, targets: Tensor) -> float | Tensor:
    """Return the rows of outputs `[N, C]`; 1 for `[C]`."""
    return float(outputs.shape[0]) if outputs.ndim > 1 else 1.0


def _per_position(module: nn.Module, outputs: Tensor, targets: Tensor) -> float | Tensor:
    """Return the positions of outputs `[..., C]`, whose last dim has the classes."""
    return float(outputs.numel() // max(1, outputs.shape[-1]))


def _per_entry(module: nn.Module, outputs: Tensor, targets: Tensor) -> float | Tensor:
    """Return what "batchmean" divides by: the rows of outputs `[N, ...]`, of one dim too; 1 for a scalar."""
    return float(outputs.shape[0]) if outputs.ndim else 1.0


def _per_class(module: nn.Module, outputs: Tensor, targets: Tensor) -> float | Tensor:
    """Return the sum of the class weights of the labels that are not ignored; for class probabilities, the positions.

    Args:
        module: with its `weight`, `[C]`, and `ignore_index`.
        outputs: `[N, C, ...]`, or `[C]`.
        targets: labels `[N, ...]`, or probabilities of the outputs' shape.
    """
    if targets.is_floating_point():
        return float(outputs.numel() // max(1, outputs.shape[1 if outputs.ndim > 1 else 0]))
    valid = targets != module.ignore_index
    weight = module.weight
    if weight is None:
        return valid.sum()
    assert isinstance(weight, Tensor)
    return weight[targets[valid]].sum()


#: torch's criteria of outputs and targets: class, the function of torch.nn.functional that does the same, denominator.
_CRITERIA: tuple[tuple[type[nn.Module], str, _Denominator], ...] = (
    (nn.CrossEntropyLoss, "cross_entropy", _per_class),
    (nn.NLLLoss, "nll_loss", _per_class),
    (nn.MSELoss, "mse_loss", _per_element),
    (nn.L1Loss, "l1_loss", _per_element),
    (nn.SmoothL1Loss, "smooth_l1_loss", _per_element),
    (nn.HuberLoss, "huber_loss", _per_element),
    (nn.BCELoss, "binary_cross_entropy", _per_element),
    (nn.BCEWithLogitsLoss, "binary_cross_entropy_with_logits", _per_element),
    (nn.SoftMarginLoss, "soft_margin_loss", _per_element),
    (nn.PoissonNLLLoss, "poisson_nll_loss", _per_element),
    (nn.KLDivLoss, "kl_div", _per_element),
    (nn.HingeEmbeddingLoss, "hinge_embedding_loss", _per_element),
    (nn.MultiMarginLoss, "multi_margin_loss", _per_row),
    (nn.MultiLabelMarginLoss, "multilabel_margin_loss", _per_row),
    (nn.MultiLabelSoftMarginLoss, "multilabel_soft_margin_loss", _per_position),
)
_DENOMINATORS = {cls: count for cls, _, count in _CRITERIA}
_FUNCTIONS = {name: cls for cls, name, _ in _CRITERIA}
_BY_FUNCTION = {getattr(functional, name): cls for name, cls in _FUNCTIONS.items()}
_NAMES: dict[str, type[nn.Module]] = {**{cls.__name__: cls for cls in _DENOMINATORS}, **_FUNCTIONS}
#: Criteria of torch that take more than outputs and targets.
_OTHERS = {n for n in dir(nn) if n.endswith("Loss") and n not in _NAMES} | {
    n for n in dir(functional) if n.endswith("_loss") and not n.startswith("_") and n not in _NAMES
}


def _build_criterion(factory: Factory, resolve: Resolve, device: torch.device, double: bool) -> Criterion:
    name = factory.name
    found: Any = find_criterion(name, resolve)
    if isinstance(found, nn.Module) and factory.args:
        raise ConfigError(f"criterion {name!r} is an object, made already; arguments go to a class or a function")
    found = _BY_FUNCTION.get(found, found)
    if isinstance(found, type) and issubclass(found, nn.Module):
        from_torch = found in _DENOMINATORS
        args = _criterion_args(name, factory.args, from_torch, double)
        found = build("criterion", name, found, from_torch=from_torch, args=args)
    if isinstance(found, nn.Module):
        return _adapt_module(name, place_module(found, device, double))
    check_arguments("criterion", name, found, 2, factory.args)
    return _UserCriterion(functools.partial(found, **factory.args) if factory.args else found)


def find_criterion(name: str, resolve: Resolve) -> Callable[..., Any]:
    """Return torch's criterion of this name, else what is shared or importable; errors as for `factories.find`."""
    try:
        return find("criterion", name, _NAMES, "torch.nn", resolve)
    except ConfigError as error:
        if name not in _OTHERS:
            raise
        raise ConfigError(
            f"criterion {name} of torch needs more than outputs and targets; share a function that returns "
            "(loss_sum, count), or give a step (--step, step=)"
        ) from error


def _criterion_args(name: str, args: dict[str, Any], from_torch: bool, double: bool) -> dict[str, Any]:
    """Class weights travel as plain lists; torch wants tensors."""
    if from_torch and (old := {"size_average", "reduce"} & set(args)):
        raise ConfigError(f"criterion {name}: {min(old)!r} is torch's old spelling; leave it out, or use reduction=")
    tensors = {"weight", "pos_weight"} if from_torch else set()
    dtype = torch.float64 if double else torch.get_default_dtype()
    return {
        key: torch.tensor(value, dtype=dtype) if key in tensors and isinstance(value, list | tuple) else value
        for key, value in args.items()
    }


def _adapt_module(name: str, module: nn.Module) -> Criterion:
    if any(p.requires_grad for p in module.parameters()):
        raise ConfigError(
            f"criterion {name!r} has parameters of its own, which no optimizer would train; make it a part of the "
            "model and use step="
        )
    count = _DENOMINATORS.get(type(module))
    if count is None:
        return _UserCriterion(module)
    return _adapt_torch_module(name, copy.copy(module), count)


def _adapt_torch_module(name: str, module: nn.Module, count: _Denominator) -> Criterion:
    reduction = module.reduction
    if reduction == "batchmean":
        count = _per_entry
    elif reduction not in ("mean", "sum"):
        raise ConfigError(f"criterion {name}: reduction={reduction!r} gives no scalar loss; use 'mean' or 'sum'")
    module.reduction = "sum"  # type: ignore[assignment]
    return _TorchCriterion(name, module, None if reduction == "sum" else count)


class _UserCriterion:
    """A function or module of the user's own."""

    def __init__(self, user: Callable[[Any, Any], Any]) -> None:
        self.user = user

    def __call__(self, outputs: Any, targets: Any, rows: int) -> Loss:
        return _read_outcome("criterion", self.user(outputs, targets), rows)


class _TorchCriterion:
    """One of torch's criteria, which adds up and knows its denominator; None: the plain sum is minimised."""

    def __init__(self, name: str, module: nn.Module, count: _Denominator | None) -> None:
        self._name, self.module, self._count = name, module, count
        self.scoring: Scoring | None = None
        if isinstance(module, nn.CrossEntropyLoss | nn.NLLLoss):
            self.scoring = Scoring(module.ignore_index, takes_logits=True)

    def __call__(self, outputs: Any, targets: Any, rows: int) -> Loss:
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            way = ""
            if isinstance(getattr(outputs, "logits", None), Tensor):  # as a model of transformers
                way = (
                    ": def loss(outputs, targets): return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, -2), "
                    "targets.flatten()), then --loss loss"
                )
            raise ConfigError(
                f"criterion {self._name} needs tensors, the model returned a {type(outputs).__name__} for targets of type "
                f"{type(targets).__name__}; share a loss function that takes them apart{way}"
            )
        if self.scoring is not None:
            outputs, targets = self.scoring.in_torchs_order(outputs, targets)
        value = self.module(outputs, targets)
        return Loss(value, 1.0, None if self._count is None else self._count(self.module, outputs, targets))
