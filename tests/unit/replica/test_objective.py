from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from guava_nb.errors import ConfigError, PreparationError
from guava_nb.protocol.messages import Factory
from guava_nb.replica.objective import _NAMES, Loss, build_objective
from tests.support.star import CPU, resolver, spec


def objective(name: str, args: dict | None = None, **names: object):
    return build_objective(spec(criterion=Factory(name, args or {}), precision="fp64"), resolver(**names), CPU)


def mean(loss: Loss) -> float:
    return float(loss.value) * loss.weight / float(loss.count)


def identity() -> nn.Module:
    return nn.Identity()


def data(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    outputs = torch.randn(6, 5, generator=g, dtype=torch.float64)
    if name in ("BCELoss", "binary_cross_entropy"):
        return outputs.sigmoid(), torch.rand(6, 5, generator=g, dtype=torch.float64)
    if name in ("NLLLoss", "nll_loss", "CrossEntropyLoss", "cross_entropy", "MultiMarginLoss", "multi_margin_loss"):
        labels = torch.randint(0, 5, (6,), generator=g)
        return (outputs.log_softmax(1) if "ll" in name.lower() else outputs), labels
    if name in ("MultiLabelMarginLoss", "multilabel_margin_loss"):
        return outputs, torch.tensor([[1, 3, -1, 0, 0]] * 6)
    if "Hinge" in name or "hinge" in name or "oft" in name and "argin" in name and "ulti" not in name:
        return outputs, torch.randint(0, 2, (6, 5), generator=g).double() * 2 - 1
    if "KLDiv" in name or "kl_div" in name:
        return outputs.log_softmax(1), torch.rand(6, 5, generator=g, dtype=torch.float64)
    return outputs, torch.rand(6, 5, generator=g, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:reduction:UserWarning")
@pytest.mark.parametrize("name", sorted(_NAMES))
def test_a_torch_criterion_has_the_denominator_of_its_mean(name: str) -> None:
    outputs, targets = data(name)
    plain = getattr(nn, name)() if hasattr(nn, name) else getattr(functional, name)
    loss = objective(name)(identity(), (outputs, targets), 6)
    assert mean(loss) == pytest.approx(float(plain(outputs, targets)), rel=1e-14)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weight", [None, [1.0, 2.0, 0.5, 3.0, 1.0]])
@pytest.mark.parametrize("ignore", [-100, 2])
@pytest.mark.parametrize("shape", [(6,), (6, 3)])
def test_cross_entropy_options(smoothing: float, weight: list | None, ignore: int, shape: tuple) -> None:
    g = torch.Generator().manual_seed(4)
    outputs = torch.randn(6, 5, *shape[1:], generator=g, dtype=torch.float64)
    targets = torch.randint(0, 5, shape, generator=g)
    targets.view(-1)[0] = ignore
    args = {"label_smoothing": smoothing, "ignore_index": ignore}
    if weight is not None:
        args["weight"] = weight
    tensor = None if weight is None else torch.tensor(weight, dtype=torch.float64)
    expected = functional.cross_entropy(outputs, targets, tensor, ignore_index=ignore, label_smoothing=smoothing)
    loss = objective("CrossEntropyLoss", args)(identity(), (outputs, targets), 6)
    assert mean(loss) == pytest.approx(float(expected), rel=1e-14)


def test_class_probabilities_and_broadcast_and_batchmean() -> None:
    outputs, probabilities = torch.randn(6, 5, 2, dtype=torch.float64), torch.rand(6, 5, 2, dtype=torch.float64)
    loss = objective("CrossEntropyLoss")(identity(), (outputs, probabilities), 6)
    assert mean(loss) == pytest.approx(float(functional.cross_entropy(outputs, probabilities)), rel=1e-14)

    column = torch.rand(6, 1, 1, dtype=torch.float64)
    with pytest.warns(UserWarning, match="target size"):
        loss = objective("MSELoss")(identity(), (outputs, column), 6)
        assert mean(loss) == pytest.approx(float(functional.mse_loss(outputs, column)), rel=1e-14)

    loss = objective("KLDivLoss", {"reduction": "batchmean"})(identity(), (outputs, probabilities), 6)
    expected = functional.kl_div(outputs, probabilities, reduction="batchmean")
    assert mean(loss) == pytest.approx(float(expected), rel=1e-14)


@pytest.mark.parametrize("shape", [(4,), (6, 4), (6, 3, 4)])
def test_the_denominator_is_torchs_whatever_the_number_of_axes(shape: tuple) -> None:
    outputs, targets = torch.randn(shape, dtype=torch.float64), torch.rand(shape, dtype=torch.float64).round()
    for name, args in (("MultiLabelSoftMarginLoss", {}), ("KLDivLoss", {"reduction": "batchmean"})):
        loss = objective(name, args)(identity(), (outputs, targets), shape[0])
        expected = getattr(nn, name)(**args)(outputs, targets)
        torch.testing.assert_close(loss.value / loss.count, expected, rtol=1e-12, atol=0)


def test_a_sum_is_the_sum_over_the_global_batch() -> None:
    loss = objective("MSELoss", {"reduction": "sum"})(identity(), (torch.ones(4, 2), torch.zeros(4, 2)), 4)
    assert float(loss.value) == 8.0 and loss.count is None


def test_user_functions_return_a_mean_or_a_sum_with_its_count() -> None:
    batch = (torch.full((4, 2), 3.0), torch.zeros(4, 2))
    loss = objective("f", f=lambda o, t: (o - t).mean())(identity(), batch, 4)
    assert (loss.weight, loss.count, float(loss.value)) == (4.0, 4.0, 3.0)
    loss = objective("f", {"k": 2}, f=lambda o, t, k: (k * (o - t).sum(), torch.tensor(8)))(identity(), batch, 4)
    assert (loss.weight, float(loss.count), float(loss.value)) == (1.0, 8.0, 48.0)
    run = spec(criterion=None, step=Factory("s", {"n": 2.0}))
    step = build_objective(run, resolver(s=lambda model, batch, n: (model(batch["x"]).sum() * n, 5)), CPU)
    loss = step(identity(), {"x": torch.ones(3)}, 3)
    assert (float(loss.value), loss.count) == (6.0, 5.0)


def test_a_mean_with_a_count_is_refused() -> None:
    outputs, targets = torch.randn(6, 5, requires_grad=True), torch.tensor([0, 1, 2, 3, 4, 0])
    with pytest.raises(ConfigError, match="mean already"):
        objective("f", f=lambda o, y: (functional.cross_entropy(o, y), len(y)))(identity(), (outputs, targets), 6)


def test_shared_modules_and_aliases_of_torch_criteria_keep_their_true_denominator() -> None:
    outputs, targets = torch.randn(4, 3), torch.tensor([0, 7, 2, 7])
    expected = float(functional.cross_entropy(outputs, targets, ignore_index=7))
    instance = nn.CrossEntropyLoss(ignore_index=7)
    loss = objective("loss", loss=instance)(identity(), (outputs, targets), 4)
    assert mean(loss) == pytest.approx(expected) and instance.reduction == "mean"
    loss = objective("loss", {"ignore_index": 7}, loss=functional.cross_entropy)(identity(), (outputs, targets), 4)
    assert mean(loss) == pytest.approx(expected) and float(loss.count) == 2


def test_right_predictions_are_counted_where_they_have_a_meaning() -> None:
    outputs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]])
    run = objective("CrossEntropyLoss")
    assert int(run(identity(), (outputs, torch.tensor([0, 1, 1])), 3, want_scores=True).scores[0]) == 2
    assert run(identity(), (outputs, torch.tensor([0, 1, 1])), 3).scores is None
    assert objective("MSELoss")(identity(), (outputs, torch.zeros(3, 2)), 3, want_scores=True).scores is None


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("CrossEntropyLos", {}, "did you mean 'CrossEntropyLoss'"),
        ("crossentropyloss", {}, "did you mean 'CrossEntropyLoss'"),
        ("CrossEntropyLoss", {"ignore_idx": 3}, "did you mean 'ignore_index'"),
        ("CrossEntropyLoss", {"reduction": "none"}, "use 'mean' or 'sum'"),
        ("MSELoss", {"size_average": True}, "old spelling"),
        ("CTCLoss", {}, "more than outputs and targets"),
        ("triplet_margin_loss", {}, "more than outputs and targets"),
        ("f", {"z": 1}, "does not take 'z'"),
        ("number", {}, "cannot be called"),
        ("Learned", {}, "no optimizer would train"),
    ],
)
def test_mistakes_are_named(name: str, args: dict, says: str) -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(()))

    names = {"f": lambda o, t: o, "number": 3, "Learned": Learned}
    with pytest.raises(ConfigError, match=says):
        objective(name, args, **names)


def test_wrong_batches_and_results_are_named() -> None:
    with pytest.raises(ConfigError, match="tuple of 3"):
        objective("MSELoss")(identity(), (1, 2, 3), 1)
    with pytest.raises(ConfigError, match="needs tensors, the model returned a dict"):
        objective("MSELoss")(identity(), ({}, torch.zeros(1)), 1)
    of_transformers = type("Output", (), {"logits": torch.zeros(2, 3, 5)})()
    with pytest.raises(
        ConfigError, match=r"needs tensors.*takes them apart: def loss.*outputs\.logits.*then --loss loss"
    ):
        objective("CrossEntropyLoss")(identity(), (of_transformers, torch.zeros(2, 3, dtype=torch.long)), 2)
    with pytest.raises(ConfigError, match=r"Tensor of shape \(2,\); return a scalar"):
        objective("f", f=lambda o, t: o)(identity(), (torch.zeros(2), torch.zeros(2)), 2)
    with pytest.raises(ConfigError, match="exactly one"):
        build_objective(spec(step=Factory("s")), resolver(s=print), CPU)


def test_a_missing_module_passes_as_it_is_and_a_raising_factory_is_a_preparation_error() -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError("No module named 'einops'", name="einops")

    with pytest.raises(ModuleNotFoundError):
        build_objective(spec(criterion=Factory("x.y:loss")), missing, CPU)

    class Broken(nn.Module):
        def __init__(self) -> None:
            raise ValueError("no")

    with pytest.raises(PreparationError, match="'Broken' raised ValueError: no"):
        objective("Broken", Broken=Broken)


def test_all_labels_ignored_counts_nothing() -> None:
    outputs = torch.randn(3, 2, requires_grad=True)
    loss = objective("CrossEntropyLoss")(identity(), (outputs, torch.full((3,), -100)), 3)
    assert float(loss.value.detach()) == 0.0 and float(loss.count) == 0.0


def test_a_metric_that_writes_into_outputs_changes_no_loss() -> None:
    outputs, labels = data("CrossEntropyLoss")
    measure, plain = objective("CrossEntropyLoss"), functional.cross_entropy(outputs, labels)
    right = int((outputs.argmax(1) == labels).sum())
    loss = measure(
        identity(),
        (outputs.clone(), labels),
        6,
        want_scores=True,
        observer=lambda outputs, targets, rows: outputs.zero_(),
    )
    assert mean(loss) == pytest.approx(float(plain)) and loss.scores is not None and int(loss.scores[0]) == right


@pytest.mark.parametrize(
    ("name", "wanted"), [("BCELoss", nn.BCELoss), ("binary_cross_entropy", nn.BCELoss), ("own", None)]
)
def test_a_prediction_can_ask_which_of_torchs_losses_it_is(name: str, wanted: type | None) -> None:
    assert objective(name, own=lambda outputs, targets: outputs.mean()).torch_loss is wanted
