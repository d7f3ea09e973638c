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


class Tokens(nn.Module):
    """Eleven tokens in, eleven out; its loss is its own, of what comes next."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.table, self.twice = nn.Embedding(11, 11), twice

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.table(tokens)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=3)
        if self.twice:
            loss = loss + functional.cross_entropy(logits.mT, tokens)
        return {"loss": loss, "logits": logits}


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch)["loss"]


def weighted_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    log_likely = model.table(batch).log_softmax(-1)[:, :-1].mT
    return functional.nll_loss(log_likely, batch[:, 1:], weight=torch.arange(11.0), ignore_index=3)


def of_last_token(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model.table(batch)[:, -1], batch[:, 0])


def of_five_tags(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model.table(batch)[..., :5].flatten(0, 1), (batch % 5).flatten())


def shifted(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=3)


def in_torchs_order(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs["logits"], targets[:, :11])


_SHARED = {
    one.__name__: one for one in (own_loss, weighted_loss, of_last_token, of_five_tags, shifted, in_torchs_order)
}


@pytest.mark.parametrize(
    ("given", "name", "twice", "is_language"),
    [
        ("step", "own_loss", False, True),
        ("step", "weighted_loss", False, True),
        ("criterion", "shifted", False, True),
        ("step", "own_loss", True, False),  # which of the two is the likelihood?
        ("step", "of_last_token", False, False),
        ("step", "of_five_tags", False, False),
        ("criterion", "in_torchs_order", False, False),
    ],
)
def test_a_loss_of_the_users_own_is_read_by_the_cross_entropy_of_tokens_in_it(
    given: str, name: str, twice: bool, is_language: bool
) -> None:
    model, tokens = Tokens(twice), torch.randint(0, 11, (4, 11), generator=torch.Generator().manual_seed(2))
    run_spec = spec(**{"criterion": None, given: Factory(name)}, precision="fp32")
    objective = build_objective(run_spec, _SHARED.__getitem__, CPU)
    batch = tokens if given == "step" else (tokens, tokens)
    loss = objective(model, batch, 4, want_scores=True)
    assert objective(model, batch, 4).scores is None and float(loss.value.detach()) > 0
    if not is_language:
        assert loss.scores is None or math.isnan(loss.scores[2])
        return
    logits, targets = model.table(tokens)[:, :-1].detach(), tokens[:, 1:]
    counts = targets != 3
    nll = functional.cross_entropy(logits[counts], targets[counts], reduction="sum")
    right = int((logits.argmax(-1) == targets)[counts].sum())
    assert loss.scores.tolist() == [right, int(counts.sum()), pytest.approx(float(nll), rel=1e-6)]


def test_a_compiled_model_is_read_likewise() -> None:
    model, tokens = Tokens(), torch.arange(22).view(2, 11) % 11
    objective = build_objective(spec(criterion=None, step=Factory("own_loss")), _SHARED.__getitem__, CPU)
    plain = objective(model, tokens, 2, want_scores=True)
    compiled = objective(torch.compile(model, backend="eager"), tokens, 2, want_scores=True)
    assert compiled.scores is None or torch.allclose(compiled.scores, plain.scores)
    assert torch.allclose(compiled.value, plain.value)
