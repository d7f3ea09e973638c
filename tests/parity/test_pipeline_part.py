"""Pipelines against plain PyTorch, in real processes over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from guava_nb.parallel.state.full_state import StatePiece, assemble, assemble_optimizer
from tests.support import pipeline_cases
from tests.support.pipeline_cases import Case, batches_of, build_model, train_plain, train_rounded
from tests.support.ranks import Ranks

HERE = "tests.support.pipeline_cases"
TRAIN = f"{HERE}:train_pipeline"
SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "gpipe", "micro_batches": 4},
    {"schedule": "1f1b", "micro_batches": 4},
    {"schedule": "interleaved", "micro_batches": 4, "stages_per_rank": 2},
]
BOTH = (0, 1)
ALL = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(4, tmp_path_factory.mktemp("store"))
    yield ranks
    ranks.close()


def tensors(value: Any) -> Any:
    if isinstance(value, StatePiece):
        return replace(value, tensor=torch.from_numpy(value.tensor))
    if isinstance(value, dict):
        return {key: tensors(child) for key, child in value.items()}
    if isinstance(value, list):
        return [tensors(child) for child in value]
    return torch.from_numpy(value) if hasattr(value, "dtype") else value


def check(pool: Ranks, ranks: tuple[int, ...], case: Case, tolerance: float = 1e-9) -> list[dict[str, Any]]:
    plain = train_plain(case)
    found = pool.run(ranks, TRAIN, case)
    (losses,) = [rank["losses"] for rank in found if rank["losses"] is not None]
    for (loss, count), (wanted, wanted_count) in zip(losses, plain["losses"], strict=True):
        assert abs(loss - wanted) <= tolerance * max(1.0, abs(wanted))
        assert count == wanted_count
    assert found[0]["norms"] == pytest.approx(plain["norms"], rel=1e-9, abs=1e-12)
    for rank in found:
        for without, wanted in zip(rank["none"], plain["none"], strict=True):
            assert without == [name for name in rank["named"] if name in wanted]
    state = assemble([tensors(rank["pieces"]) for rank in found])
    assert list(state) == list(plain["state"])
    for name, value in plain["state"].items():
        assert torch.allclose(state[name], value, rtol=0, atol=tolerance), name
    check_optimizer(assemble_optimizer([tensors(rank["optimizer"]) for rank in found]), plain["optimizer"], tolerance)
    return found


def check_optimizer(found: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    assert found["param_groups"] == wanted["param_groups"]
    assert set(found["state"]) == set(wanted["state"])
    for number, values in wanted["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                assert torch.allclose(found["state"][number][key], value, rtol=0, atol=tolerance), (number, key)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s["schedule"])
@pytest.mark.parametrize("model", ["layers", "nested", "inplace"])
def test_odd_batches_with_ignored_labels(pool: Ranks, model: str, schedule: dict[str, Any]) -> None:
    check(pool, BOTH, Case(model, "ignoring", spec=schedule))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s["schedule"])
def test_four_ranks_a_traced_transformer_with_a_tied_weight(pool: Ranks, schedule: dict[str, Any]) -> None:
    blocks = ("blocks.1", "blocks.2", "blocks.3") if schedule["schedule"] != "interleaved" else ()
    ranks = ALL if blocks else BOTH
    found = check(pool, ranks, Case("writer", "words", spec={**schedule, "split": blocks}, clip=0.5))
    assert "unused.weight" in found[0]["named"]
    assert "words.weight" in found[0]["named"] and "words.weight" in found[-1]["named"]


@pytest.mark.parametrize("model", ["torch encoder", "torch decoder", "padded"])
def test_torchs_own_transformers_are_cut_between_their_layers(pool: Ranks, model: str) -> None:
    found = check(pool, BOTH, Case(model, "words", spec=SCHEDULES[1]))
    layers = [{name.split(".")[2] for name in rank["named"] if ".layers." in name} for rank in found]
    assert all(layers) and not layers[0] & layers[1]


@pytest.mark.parametrize("schedule", SCHEDULES[:2], ids=lambda s: s["schedule"])
def test_tied_embedding_and_head(pool: Ranks, schedule: dict[str, Any]) -> None:
    found = check(pool, BOTH, Case("tied", "words", spec=schedule, clip=0.3, optimizer="groups"))
    assert [piece.name for rank in found for piece in rank["pieces"] if piece.name == "4.1.weight"] == ["4.1.weight"]


def test_tied_weight_within_a_rank_and_on_another(pool: Ranks) -> None:
    check(pool, BOTH, Case("tied", "words", spec={**SCHEDULES[2]}))
    check(pool, ALL, Case("tied", "words", spec={**SCHEDULES[0]}))


@pytest.mark.parametrize("schedule", SCHEDULES[:2], ids=lambda s: s["schedule"])
def test_several_tensors_between_stages_and_nested_inputs(pool: Ranks, schedule: dict[str, Any]) -> None:
    check(pool, BOTH, Case("tuples", "nested", spec={**schedule, "split": ("1",)}))
    check(pool, BOTH, Case("tuples", "nested", spec={**schedule, "split": ("2",)}))
    check(pool, BOTH, Case("tuples", "unusual", spec={**schedule, "split": ("2",)}))


@pytest.mark.parametrize(
    ("model", "batches", "wire", "spec"),
    [
        ("layers", "ignoring", "int8", {**SCHEDULES[1], "split": ("2",)}),
        ("inplace", "numbers", "int4", {**SCHEDULES[0], "split": ("1",)}),  # a stage begins with an in-place operation
        ("frozen", "ignoring", "int8", {**SCHEDULES[0], "split": ("4",)}),
        ("tuples", "nested", "bf16", {**SCHEDULES[1], "split": ("1",)}),  # with a mask and whole numbers
        ("writer", "words", "int8", {**SCHEDULES[0], "split": ("blocks.2",)}),  # a skip past the cut
    ],
)
def test_a_rounded_boundary_is_that_of_a_loop_that_rounds_there(
    pool: Ranks, model: str, batches: str, wire: str, spec: dict[str, Any]
) -> None:
    case = Case(model, batches, rows=(16, 7, 9, 1, 16, 5), spec=spec, wire=wire)
    plain, exact, found = train_rounded(case, 2), train_plain(case), pool.run(BOTH, TRAIN, case)
    (losses,) = [rank["losses"] for rank in found if rank["losses"] is not None]
    assert losses == [pytest.approx(one, rel=1e-12) for one in plain["losses"]]
    state = assemble([tensors(rank["pieces"]) for rank in found])
    for name, value in plain["state"].items():
        assert torch.allclose(state[name], value, rtol=0, atol=1e-10), name
    assert any(not torch.equal(state[name], value) for name, value in exact["state"].items()), "nothing was rounded"


@pytest.mark.parametrize("criterion", ["mean", "sum"])
def test_means_and_plain_sums(pool: Ranks, criterion: str) -> None:
    check(pool, BOTH, Case("layers", "numbers", criterion, spec=SCHEDULES[1], optimizer="sgd", clip=0.1))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s["schedule"])
def test_frozen_layers(pool: Ranks, schedule: dict[str, Any]) -> None:
    check(pool, BOTH, Case("frozen", "ignoring", spec=schedule))
    if schedule["schedule"] != "interleaved":
        check(pool, ALL, Case("frozen", "ignoring", spec=schedule))  # the first stage trains nothing


@pytest.mark.parametrize("schedule", SCHEDULES[:2], ids=lambda s: s["schedule"])
def test_an_optimizer_of_one_stages_parameters(pool: Ranks, schedule: dict[str, Any]) -> None:
    check(pool, BOTH, Case("layers", "ignoring", spec=schedule, optimizer="last"))


def test_stages_without_parameters(pool: Ranks) -> None:
    check(pool, ALL, Case("bare", "numbers", spec=SCHEDULES[0]))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_one_micro_batch_is_layer_wise(pool: Ranks, schedule: str) -> None:
    spec = {"schedule": schedule, "micro_batches": 1, "stages_per_rank": 2 if schedule == "interleaved" else 1}
    rows = tuple(rows for rows in pipeline_cases.ODD_ROWS if rows > 1)
    check(pool, BOTH, Case("batchnorm", "numbers", rows=rows, spec=spec))


def test_more_micro_batches_than_rows_and_many_shapes(pool: Ranks) -> None:
    check(
        pool,
        BOTH,
        Case("layers", "numbers", rows=tuple(range(1, 15)) * 2, spec={"schedule": "1f1b", "micro_batches": 16}),
    )
    spec = {"schedule": "interleaved", "micro_batches": 8, "stages_per_rank": 2}
    check(pool, BOTH, Case("layers", "numbers", rows=tuple(range(1, 15)), spec=spec))


def test_dropout_repeats_itself(pool: Ranks) -> None:
    case = Case("dropout", "numbers", spec=SCHEDULES[1])
    first, second = (pool.run(BOTH, f"{HERE}:train_seeded", case) for _ in range(2))
    assert first == second


def test_evaluation_prediction_and_state(pool: Ranks) -> None:
    for model, batches in (("batchnorm", "ignoring"), ("tuples", "nested"), ("writer", "words")):
        case = Case(model, batches, spec={"micro_batches": 3, "schedule": "1f1b"})
        found = pool.run(BOTH, f"{HERE}:evaluate", case)
        plain = build_model(model).eval().requires_grad_(False)
        for (loss, count, correct, outputs), (inputs, targets, rows) in zip(found[1], batches_of(case), strict=True):
            wanted = pipeline_cases.CRITERIA["classes"](plain(inputs), targets, rows)
            assert loss == pytest.approx(float(wanted.value), rel=1e-12, abs=1e-12)
            assert (count, correct) == (float(wanted.count), int(wanted.scores[0]))
            assert torch.allclose(torch.from_numpy(outputs), plain(inputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "case",
    [
        Case("tied", "words", rows=(8, 9, 10), spec=SCHEDULES[1], optimizer="groups"),
        Case("layers", "ignoring", rows=(8, 9, 10), spec=SCHEDULES[1], optimizer="last"),
    ],
    ids=["tied", "one stage's"],
)
def test_going_on_from_a_plain_checkpoint(pool: Ranks, case: Case) -> None:
    plain = train_plain(case)
    found = pool.run(BOTH, f"{HERE}:load_and_return", case, plain["state"], plain["optimizer"])
    state = assemble([tensors(rank["pieces"]) for rank in found])
    assert all(torch.equal(state[name], value) for name, value in plain["state"].items())
    check_optimizer(assemble_optimizer([tensors(rank["optimizer"]) for rank in found]), plain["optimizer"], 0.0)


def test_a_stand_in_runs_nothing(pool: Ranks) -> None:
    found = pool.run(BOTH, f"{HERE}:stand_in", Case("layers", "numbers", spec=SCHEDULES[1]))
    assert found == [(0.0, 0, 0.0), (0.0, 0, 0.0)]


def test_activations_computed_again_change_nothing(pool: Ranks) -> None:
    check(pool, BOTH, Case("writer", "words", spec={**SCHEDULES[1], "split": ("blocks.2",)}, recompute=("blocks.*",)))


def test_balance_by_time_is_agreed_on(pool: Ranks) -> None:
    case = Case("writer", "words", spec={"micro_batches": 4, "balance": "time"})
    found = pool.run(ALL, f"{HERE}:begins_by_time", case)
    assert len({tuple(begins) for begins in found}) == 1
    assert len(found[0]) == 4


def test_autocast_reaches_the_stages(pool: Ranks) -> None:
    found = pool.run(BOTH, f"{HERE}:dtypes_under_autocast", Case("layers", "numbers", spec=SCHEDULES[1]))
    assert found == [{"torch.bfloat16"}, {"torch.bfloat16"}]


def test_after_a_failure_the_next_batch_works(pool: Ranks) -> None:
    spec = {"schedule": "interleaved", "micro_batches": 4, "stages_per_rank": 2}
    (found,) = pool.run((0,), f"{HERE}:fail_then_train", Case("layers", "numbers", rows=(8,), spec=spec))
    assert found["errors"] == ["ZeroDivisionError"] * 4
    (wanted, _) = train_plain(Case("layers", "numbers", rows=(8,)))["losses"][0]
    assert found["loss"] == pytest.approx(wanted, rel=1e-12)
