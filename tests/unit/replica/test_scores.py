"""On which axis of outputs the classes are, and what outputs are worth against integer targets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import Factory
from guava_nb.replica.objective import Loss, build_objective
from guava_nb.replica.scores import Scoring
from tests.support.star import CPU, resolver, spec


def drawn(*shape: int, classes: int, ignored: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of this shape with the classes last, and targets of which some are ignored."""
    g = torch.Generator().manual_seed(len(shape) + classes)
    targets = torch.randint(0, classes, shape, generator=g)
    if ignored is not None:
        targets.view(-1)[::3] = ignored
    return torch.randn(*shape, classes, generator=g, dtype=torch.float64), targets


def measured(name: str, outputs: Any, targets: Any, want_scores: bool = True, **args: Any) -> Loss:
    objective = build_objective(spec(criterion=Factory(name, args), precision="fp64"), resolver(), CPU)
    return objective(nn.Identity(), (outputs, targets), len(outputs), want_scores)


@pytest.mark.parametrize("ignored", [-100, 0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_a_language_model_is_torchs_on_flat_tokens(ignored: int, smoothing: float) -> None:
    outputs, targets = drawn(4, 6, classes=11, ignored=ignored)
    settings: dict[str, Any] = {"ignore_index": ignored, "label_smoothing": smoothing}
    loss = measured("CrossEntropyLoss", outputs, targets, **settings)
    plain = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), **settings)
    assert float(loss.value) / float(loss.count) == pytest.approx(float(plain), rel=1e-14)
    counts = targets != ignored
    right = ((outputs.argmax(-1) == targets) & counts).sum()
    nll = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=ignored, reduction="sum")
    assert loss.scores.tolist() == [int(right), int(counts.sum()), pytest.approx(float(nll), rel=1e-14)]


def test_torchs_own_order_is_kept_and_has_no_perplexity() -> None:
    outputs, targets = drawn(2, 5, 4, classes=3, ignored=-100)
    loss = measured("CrossEntropyLoss", outputs.movedim(-1, 1), targets)
    plain = functional.cross_entropy(outputs.movedim(-1, 1), targets)
    assert float(loss.value) / float(loss.count) == pytest.approx(float(plain), rel=1e-14)
    right, scored, nll = loss.scores.tolist()
    assert right == int((outputs.argmax(-1) == targets).sum()) and scored == int((targets != -100).sum())
    assert math.isnan(nll)


@pytest.mark.parametrize("name", ["CrossEntropyLoss", "NLLLoss"])
def test_shapes_that_fit_both_orders_are_refused_unless_an_earlier_batch_told(name: str) -> None:
    square, targets = drawn(3, 5, classes=5)
    with pytest.raises(
        ConfigError, match=r"outputs \[3, 5, 5\] for targets \[3, 5\] can be read .*share a loss function"
    ):
        measured(name, square, targets)
    scoring = Scoring()
    scoring.in_torchs_order(*drawn(3, 4, classes=5))
    flat, labels = scoring.in_torchs_order(square, targets)
    assert torch.equal(flat, square.reshape(15, 5)) and torch.equal(labels, targets.reshape(15))
    scoring = Scoring()
    scoring.in_torchs_order(torch.zeros(3, 5, 4), targets[:, :4])
    assert scoring.in_torchs_order(square, targets)[0] is square


@pytest.mark.parametrize(
    ("outputs", "targets", "words"),
    [((24, 11), (4, 6), "one of them is flattened"), ((4, 6, 11), (24,), "one of them is flattened"),
     ((4, 6, 11), (4, 7), r"needs outputs \[N, C, ...\] or \[N, ..., C\]"), ((4, 11), (5,), "do not fit")],
)  # fmt: skip
def test_shapes_that_fit_in_no_way_are_told(outputs: tuple[int, ...], targets: tuple[int, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        measured("CrossEntropyLoss", torch.zeros(outputs), torch.zeros(targets, dtype=torch.int64))


def test_what_is_no_classification_has_no_scores() -> None:
    outputs, targets = drawn(4, classes=3)
    scoring = Scoring()
    assert scoring.scores(outputs, targets.double()) is None
    assert scoring.scores(outputs, targets > 0) is None
    assert scoring.scores((outputs,), targets) is None
    assert scoring.scores(outputs[:, :1], targets) is None  # one class: a regression on whole numbers
    assert scoring.scores(*drawn(3, 5, classes=5)) is None  # either order
    right, scored, nll = scoring.scores(*drawn(3, 4, classes=5)).tolist()  # a user's loss: outputs may be no logits
    assert scored == 12 and right <= 12 and math.isnan(nll)


def test_probabilities_as_targets_stay_in_torchs_order() -> None:
    outputs, _ = drawn(4, 3, classes=5)
    soft = torch.softmax(outputs.flip(0), 1)
    loss = measured("CrossEntropyLoss", outputs, soft)
    assert float(loss.value) / float(loss.count) == pytest.approx(float(functional.cross_entropy(outputs, soft)))
    assert loss.scores is None
