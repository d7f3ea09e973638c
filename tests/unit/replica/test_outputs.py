"""What of a model's outputs comes back: packed on the worker, whole again at the hub, equal to plain PyTorch."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from guava_nb.errors import ConfigError, TrainingError
from guava_nb.protocol.messages import Wanted
from guava_nb.replica.outputs import columns_of, inputs_of, joined, unpacked, without_targets

SIZES = st.tuples(st.integers(1, 9), st.integers(2, 12))


def outputs_of(rows: int, classes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return 3 * torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def travelled(outputs: Any, rows: int, wanted: Wanted) -> dict[str, np.ndarray]:
    return unpacked(columns_of(outputs, rows, wanted), rows, wanted)


@given(SIZES, st.data(), st.integers(0, 99), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_classes_and_probabilities_equal_plain_pytorch(
    size: tuple[int, int], data: st.DataObject, seed: int, dtype: torch.dtype
) -> None:
    rows, classes = size
    k = data.draw(st.integers(1, classes))
    outputs = outputs_of(rows, classes, seed, dtype)
    found = travelled(outputs, rows, Wanted(k, full=True))
    scores = outputs if dtype == torch.float64 else outputs.float()
    probabilities = torch.softmax(scores, dim=1).float()
    best = scores.topk(k, dim=1).indices if k > 1 else scores.argmax(dim=1, keepdim=True)
    shape = (rows,) if k == 1 else (rows, k)
    assert found["predictions"].dtype == np.int64 and found["predictions"].shape == shape
    assert found["confidences"].dtype == np.float32
    assert np.array_equal(found["predictions"], best.numpy().reshape(shape))
    assert np.array_equal(found["confidences"], probabilities.gather(1, best).numpy().reshape(shape))
    assert np.array_equal(found["probabilities"], probabilities.numpy())
    assert (found["confidences"].reshape(rows, k)[:, :-1] >= found["confidences"].reshape(rows, k)[:, 1:]).all()


@given(SIZES, st.floats(0, 1), st.integers(0, 99), st.data())
def test_a_threshold_leaves_out_rows_and_nothing_else(
    size: tuple[int, int], threshold: float, seed: int, data: st.DataObject
) -> None:
    rows, classes = size
    k = data.draw(st.integers(1, classes))
    outputs = outputs_of(rows, classes, seed)
    every = travelled(outputs, rows, Wanted(k))
    wanted = Wanted(k, threshold)
    columns = columns_of(outputs, rows, wanted)
    some = unpacked(columns, rows, wanted)
    top = every["confidences"].reshape(rows, k)[:, 0]
    kept = some["kept"]
    assert np.array_equal(kept, top >= np.float32(threshold)) and kept.shape == (rows,)
    assert len(columns["predictions"]) == len(columns["confidences"]) == kept.sum()  # the others stayed there
    for name in ("predictions", "confidences"):
        assert some[name].shape == every[name].shape and some[name].dtype == every[name].dtype
        assert np.array_equal(some[name][kept], every[name][kept])
    assert (some["predictions"][~kept] == -1).all() and np.isnan(some["confidences"][~kept]).all()


@pytest.mark.parametrize(("classes", "kind"), [(256, "uint8"), (257, "int16"), (32768, "int16"), (32769, "int32")])
def test_classes_travel_in_the_smallest_type_that_holds_them(classes: int, kind: str) -> None:
    outputs = torch.zeros(2, classes)
    outputs[:, -1] = 1
    columns = columns_of(outputs, 2, Wanted())
    assert str(columns["predictions"].dtype) == f"torch.{kind}"
    assert unpacked(columns, 2, Wanted())["predictions"].tolist() == [classes - 1] * 2


def test_of_equal_scores_the_first_class_is_the_best() -> None:
    assert travelled(torch.zeros(3, 5), 3, Wanted())["predictions"].tolist() == [0, 0, 0]
    sure = torch.tensor([[0.0, 300.0, 200.0, 100.0]])  # probabilities 0, 1, 0, 0: only the scores tell the order
    assert travelled(sure, 1, Wanted(3))["predictions"].tolist() == [[1, 2, 3]]


Pair = namedtuple("Pair", "scores hidden")


@dataclass
class Both:
    scores: torch.Tensor
    extra: torch.Tensor | None = None


def test_raw_outputs_keep_their_names_types_and_shapes() -> None:
    scores, hidden = outputs_of(4, 3), torch.arange(24).reshape(4, 2, 3)
    assert list(travelled(scores, 4, Wanted(raw=True))) == ["outputs"]
    for value in (
        {"scores": scores, "hidden": hidden},
        Pair(scores, hidden),
        OrderedDict(scores=scores, hidden=hidden),
    ):
        found = travelled(value, 4, Wanted(raw=True))
        assert list(found) == ["outputs.scores", "outputs.hidden"]
        assert np.array_equal(found["outputs.hidden"], hidden.numpy()) and found["outputs.hidden"].dtype == np.int64
    assert list(travelled((scores, [hidden]), 4, Wanted(raw=True))) == ["outputs.0", "outputs.1.0"]
    assert list(travelled(Both(scores), 4, Wanted(raw=True))) == ["outputs.scores"]
    half = scores.bfloat16()
    assert np.array_equal(travelled(half, 4, Wanted(raw=True))["outputs"], half.float().numpy())


@pytest.mark.parametrize(
    ("outputs", "wanted", "sentence"),
    [
        (torch.zeros(4), Wanted(), r"classes need outputs of \[4, classes\].*returned \(4,\) of float32.*raw=True"),
        (torch.zeros(4, 1), Wanted(), r"one column: with one class all probabilities would be 1.*raw=True"),
        (torch.zeros(4, 3, 8, 8), Wanted(), r"returned \(4, 3, 8, 8\) of float32.*raw=True"),
        (torch.zeros(3, 5), Wanted(), r"\[4, classes\].*returned \(3, 5\)"),
        (torch.zeros(4, 5, dtype=torch.int64), Wanted(), r"floating point.*int64"),
        ({"logits": torch.zeros(4, 5)}, Wanted(), r"returned a dict with logits.*raw=True"),
        ((torch.zeros(4, 5), torch.zeros(4)), Wanted(), r"returned a tuple of 2.*raw=True"),
        (torch.zeros(4, 5), Wanted(6), r"top_k is 6 and the model has 5 classes; give 1 to 5"),
        (torch.zeros(()), Wanted(raw=True), r"outputs of the model has shape \(\).*4 samples"),
        ({"a": torch.zeros(4), "loss": torch.zeros(())}, Wanted(raw=True), r"outputs.loss of the model has shape \(\)"),
        ({"a": "text"}, Wanted(raw=True), r"outputs.a of the model is a str"),
        ([], Wanted(raw=True), r"returned a list of 0, in which there is no tensor"),
    ],
)
def test_outputs_of_another_form_are_refused_with_a_way_on(outputs: Any, wanted: Wanted, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        columns_of(outputs, 4, wanted)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.booleans())
def test_micro_batches_put_together_are_the_whole(sizes: list[int], threshold: bool) -> None:
    outputs, wanted = outputs_of(sum(sizes), 4), Wanted(2, 0.5 if threshold else None, full=True)
    parts = [columns_of(part, len(part), wanted) for part in outputs.split(sizes)]
    found, whole = unpacked(joined(parts), sum(sizes), wanted), travelled(outputs, sum(sizes), wanted)
    assert found.keys() == whole.keys()
    assert all(np.array_equal(found[name], whole[name], equal_nan=name == "confidences") for name in whole)


def test_a_column_that_is_too_short_is_not_believed() -> None:
    with pytest.raises(TrainingError, match="4 rows"):
        unpacked({"predictions": torch.zeros(3, 1), "confidences": torch.zeros(4, 1)}, 4, Wanted())


def test_targets_stay_at_home_and_only_forms_that_tell_are_taken() -> None:
    x, y = torch.zeros(2, 3), torch.zeros(2)
    assert inputs_of(x) is x and inputs_of([x]) is x and inputs_of((x, y)) is x
    assert without_targets([x, y]) == (x, None) and without_targets(x) is x
    assert inputs_of(without_targets((x, y))) is x
    for batch, form in (({"x": x}, "dict"), ((x, y, y), "tuple of 3"), (Both(x), "Both")):
        assert without_targets(batch) is batch
        with pytest.raises(ConfigError, match=f"a batch is a {form}.*predict_step"):
            inputs_of(batch)


@pytest.mark.parametrize("outputs", [{"x": {"y": 0}, "x.y": 1}, {1: 0, "1": 1}])
def test_two_outputs_of_one_name_are_refused(outputs: dict[Any, Any]) -> None:
    def tensors(value: Any) -> Any:
        return {k: tensors(v) for k, v in value.items()} if isinstance(value, dict) else torch.full((2, 1), value)

    with pytest.raises(ConfigError, match=r"2 outputs of the model would both be named 'outputs\.[x1].*predict_step"):
        columns_of(tensors(outputs), 2, Wanted(raw=True))


@pytest.mark.parametrize("row", [[1.0, 1.0 + 1e-10, 0.0], [1e300, 2e300, 0.0]])
def test_classes_of_double_outputs_are_ranked_in_double(row: list[float]) -> None:
    outputs = torch.tensor([row], dtype=torch.float64)
    found = travelled(outputs, 1, Wanted(full=True))
    expected = torch.softmax(outputs, dim=1).float().numpy()
    assert found["predictions"].tolist() == [1] and np.array_equal(found["probabilities"], expected)
    assert found["confidences"].dtype == np.float32 and found["confidences"][0] == expected[0, 1]


@given(SIZES, st.integers(0, 99), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
def test_probabilities_of_a_model_that_ends_in_a_softmax_are_shown_as_they_are(
    size: tuple[int, int], seed: int, dtype: torch.dtype
) -> None:
    rows, classes = size
    probabilities = torch.softmax(outputs_of(rows, classes, seed, torch.float64), dim=1)
    found = travelled(probabilities.to(dtype), rows, Wanted(full=True))
    assert np.array_equal(found["probabilities"], probabilities.to(dtype).float().numpy())
    of_logs = travelled(probabilities.log().to(dtype), rows, Wanted(full=True))
    assert np.allclose(of_logs["probabilities"], probabilities, atol=8 * torch.finfo(dtype).eps + 1e-7)


@given(SIZES, st.integers(0, 99))
def test_classes_that_do_not_exclude_each_other_have_each_their_own_probability(
    size: tuple[int, int], seed: int
) -> None:
    rows, classes = size
    logits = outputs_of(rows, classes, seed)
    each = torch.sigmoid(logits).numpy()
    for loss, outputs in (
        (nn.BCELoss, torch.sigmoid(logits)),
        (nn.BCEWithLogitsLoss, logits),
        (nn.MultiLabelSoftMarginLoss, logits),
    ):
        wanted = Wanted(full=True)
        found = unpacked(columns_of(outputs, rows, wanted, loss), rows, wanted)
        assert np.array_equal(found["probabilities"], each) and np.array_equal(found["confidences"], each.max(axis=1))
        assert np.array_equal(found["predictions"], outputs.argmax(dim=1).numpy())
    certain = torch.tensor([[0.25, 0.75]])  # they sum to 1, and are logits all the same
    found = unpacked(columns_of(certain, 1, wanted, nn.BCEWithLogitsLoss), 1, wanted)
    assert np.array_equal(found["probabilities"], torch.sigmoid(certain).numpy())
