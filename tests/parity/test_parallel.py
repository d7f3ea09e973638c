"""Spread models against plain PyTorch loops over whole batches.

Where a test has a table of modes, models and backends, some of its cells cover them all; `--whole` runs the others too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from guava_nb.protocol.messages import ParallelSpec
from tests.support.parity_group import GroupPool, RankFailed, backends, group_pool
from tests.support.spread import (
    Scenario,
    buffers,
    error_before_a_forward,
    patience,
    plain,
    refusal,
    spread,
    whole_optimizer,
    whole_state,
)  # fmt: skip

SPECS = {
    "data": ParallelSpec(dp=2),
    "data of 3": ParallelSpec(dp=3),
    "zero 1": ParallelSpec(mode="zero", dp=2, zero_stage=1),
    "zero 2": ParallelSpec(mode="zero", dp=2, zero_stage=2),
    "zero 3": ParallelSpec(mode="zero", dp=2, zero_stage=3),
    "zero 3 of 3": ParallelSpec(mode="zero", dp=3, zero_stage=3),
    "tensor": ParallelSpec(mode="tensor", tp=2),
    "hybrid": ParallelSpec(mode="hybrid", dp=2, tp=2),
    "hybrid zero 1": ParallelSpec(mode="hybrid", dp=2, tp=2, zero_stage=1),
    "pipeline": ParallelSpec(mode="pipeline", pp=2, micro_batches=3),
    "pipeline of replicas": ParallelSpec(mode="hybrid", dp=2, pp=2, micro_batches=2, schedule="gpipe"),
    "pipeline of zero 1": ParallelSpec(mode="hybrid", dp=2, pp=2, micro_batches=2, zero_stage=1),
    "pipeline of tensors": ParallelSpec(mode="hybrid", tp=2, pp=2, micro_batches=2),
    "hybrid zero 3": ParallelSpec(mode="hybrid", dp=2, tp=2, zero_stage=3),
}

BACKENDS = backends()[::-1]  # ours first
LONG = ("data", "zero 1", "zero 2", "tensor", "pipeline")


def cells(names: Iterable[str], others: Iterable[str], always: Iterable[tuple[str, str]] = ()) -> list[Any]:
    """All pairs of them: of each name the first of the others always, and those that are named; the rest with --whole."""
    first, *rest = others
    chosen = {*((name, first) for name in names), *always}
    pairs = [(name, other) for name in names for other in (first, *rest)]
    return [pytest.param(*pair, marks=() if pair in chosen else pytest.mark.whole) for pair in pairs]


@pytest.fixture(scope="module")
def pool() -> Iterator[GroupPool]:
    with group_pool(4) as made:
        yield made


def run(pool: GroupPool, backend: str, case: Scenario) -> list[dict[str, Any]]:
    return pool.run(case.spec.dp * case.spec.pp * case.spec.tp, backend, spread, case)


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert list(a) == list(b)
    return max(float((a[k] - b[k]).abs().max()) for k in a if a[k].numel())


def compare(case: Scenario, ranks: list[dict[str, Any]], tolerance: float) -> None:
    model, optimizer, losses, norms = plain(case)
    for rank in ranks:
        assert max(abs(a - b) for a, b in zip(rank["losses"], losses, strict=True)) <= tolerance
        if case.double:
            assert max(abs(a - b) / b for a, b in zip(rank["norms"], norms, strict=True)) <= tolerance * 10
    if not case.double:
        return
    state = whole_state(case.spec, ranks)
    assert furthest(state, dict(model.state_dict())) <= tolerance
    mine, theirs = whole_optimizer(case.spec, ranks), optimizer.state_dict()
    assert sorted(mine["state"]) == sorted(theirs["state"])
    for number, values in theirs["state"].items():
        assert furthest(mine["state"][number], values) <= tolerance
    assert [g["params"] for g in mine["param_groups"]] == [g["params"] for g in theirs["param_groups"]]
    optimizer.load_state_dict(mine)


ROWS = {"data": 5, "data of 3": 2, "zero 1": 3, "zero 2": 3, "zero 3": 1, "zero 3 of 3": 2, "hybrid": 3}


@pytest.mark.parametrize(("name", "backend"), cells(ROWS, BACKENDS, [("data of 3", "gloo"), ("zero 3", "gloo")]))
def test_synced_batch_norms_see_the_whole_batch(pool: GroupPool, backend: str, name: str) -> None:
    """With replicas of unlike rows, and with one that has none."""
    case = Scenario(spec=SPECS[name], model="normed", steps=8, rows=ROWS[name], sync=True)
    ranks = run(pool, backend, case)
    plainly = replace(case, model="plainly normed")
    compare(plainly, ranks, 1e-9)


@pytest.mark.parametrize(("name", "backend"), cells(["data", "data of 3", "zero 1"], BACKENDS, [("data of 3", "gloo")]))
def test_what_the_forward_moves_is_that_of_one_process(pool: GroupPool, backend: str, name: str) -> None:
    """With replicas of unlike rows, and in every third step with one that has none."""
    case = Scenario(spec=SPECS[name], model="moving", steps=8, rows=5)
    compare(case, run(pool, backend, case), 1e-9)


@pytest.mark.parametrize("name", ["zero 2", "zero 3"])
def test_views_that_the_model_changes_in_place(pool: GroupPool, name: str) -> None:
    """torch's FSDP2 loses its hook on such an output, and warns of every view for that reason."""
    case = Scenario(spec=SPECS[name], model="viewing", steps=4)
    compare(case, run(pool, "gloo", case), 1e-9)


@pytest.mark.parametrize(
    ("name", "machines"),
    [("hybrid", (0, 0, 1, 1)), ("hybrid zero 3", (0, 0, 1, 1)), ("hybrid zero 1", (0, 1, 0, 1)),
     ("pipeline of tensors", (0, 0, 1, 1)), ("pipeline of replicas", (0, 0, 1, 1))],
)  # fmt: skip
def test_groups_inside_machines_under_the_relay(pool: GroupPool, name: str, machines: tuple[int, ...]) -> None:
    """As NCCL does inside a box of GPUs; gloo stands for it where there are none."""
    case = Scenario(spec=SPECS[name], steps=4, machines=machines)
    compare(case, run(pool, "guava", case), 1e-9)


@pytest.mark.parametrize(("name", "backend"), cells(SPECS, BACKENDS, [("zero 2", "gloo"), ("hybrid zero 1", "gloo")]))
def test_equal_to_plain_pytorch(pool: GroupPool, backend: str, name: str) -> None:
    # What is computed is the same over both; gloo shows that nothing of it depends on the backend, with these two and with
    # the other modes in the tests below. A long run of each family shows that differences do not grow; the batches of
    # Scenario repeat their forms every three steps, and four ranks of a hybrid take 1.5 s of processor time for each.
    steps = 20 if backend == "guava" and name in LONG else 4
    case = Scenario(spec=SPECS[name], accumulate=2, groups=True, steps=steps)
    limit = plain(replace(case, steps=1))[3][0] / 2
    case = replace(case, max_norm=limit)
    compare(case, run(pool, backend, case), 1e-9)


@pytest.mark.parametrize(
    ("name", "backend"),
    cells(["data", "zero 1", "zero 2", "zero 3", "tensor", "pipeline"], BACKENDS, [("zero 3", "gloo")]),
)
def test_complex_parameters_are_spread_with_both_parts(pool: GroupPool, backend: str, name: str) -> None:
    case = Scenario(spec=SPECS[name], model="spectral", steps=6)
    limit = plain(replace(case, steps=1))[3][0] / 2
    case = replace(case, max_norm=limit)
    compare(case, run(pool, backend, case), 1e-9)


FEW = ("data", "zero 1", "zero 2", "zero 3", "hybrid", "hybrid zero 3")
BLOCKS = ("*",)


@pytest.mark.parametrize("name", ["data", "zero 3", "hybrid", "pipeline"])
def test_losses_in_single_precision(pool: GroupPool, name: str) -> None:
    # Adam turns rounding of a gradient that is zero into steps of lr, and steps into losses.
    case = Scenario(spec=SPECS[name], double=False, lr=5e-5)
    compare(case, run(pool, "gloo", case), 1e-5)


@pytest.mark.parametrize("name", ["data", "zero 3", "hybrid", "pipeline of replicas", "pipeline of tensors"])
def test_computing_activations_again_changes_nothing(pool: GroupPool, name: str) -> None:
    case = Scenario(spec=recomputing(SPECS[name]), steps=4)
    ranks = run(pool, "gloo", case)
    compare(case, ranks, 1e-9)
    assert [len(rank["again"]) for rank in ranks] == [4 // case.spec.pp] * len(ranks)


def recomputing(spec: ParallelSpec) -> ParallelSpec:
    words = {field: getattr(spec, field) for field in spec.__struct_fields__}
    return ParallelSpec(**{**words, "checkpoint_activations": BLOCKS})


@pytest.mark.parametrize("name", ["data", "zero 3", "tensor", "hybrid zero 3"])
def test_dropout_repeats_from_its_seed(pool: GroupPool, name: str) -> None:
    """A second run, and one that computes activations again; the latter is a second run too, and enough for four ranks."""
    case = Scenario(spec=SPECS[name], steps=4, dropout=0.3)
    cases = [case, replace(case, spec=recomputing(case.spec)), *([case] if name != "hybrid zero 3" else [])]
    first, *others = [run(pool, "gloo", one) for one in cases]
    assert plain(case)[2] != first[0]["losses"]
    state = whole_state(case.spec, first)
    for ranks in others:
        assert ranks[0]["losses"] == first[0]["losses"]
        assert furthest(state, whole_state(case.spec, ranks)) == 0.0


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_torchs_own_encoder_layers(pool: GroupPool, dropout: float) -> None:
    case = Scenario(spec=SPECS["hybrid"], model="torch", steps=6, dropout=dropout)
    ranks = run(pool, "gloo", case)
    assert ranks[0]["local"]["encoder.layers.0.self_attn.in_proj_weight"] == (12, 8)
    assert {rank["local"]["encoder.layers.1.linear1.weight"] for rank in ranks} == {(10, 8), (9, 8)}
    if not dropout:
        compare(case, ranks, 1e-9)


@pytest.mark.parametrize("name", ["tensor of 3", "named layers", "one by one"])
def test_parts_that_do_not_divide_and_plans_by_the_user(pool: GroupPool, name: str) -> None:
    specs = {
        # 4 heads over 3 ranks, a vocabulary of 13, hidden layers of 19.
        "tensor of 3": (ParallelSpec(mode="tensor", tp=3), "torch"),
        "named layers": (
            ParallelSpec(
                mode="tensor",
                tp=2,
                tensor_plan={"*.q_proj": "colwise", "*.k_proj": "colwise", "*.v_proj": "colwise",
                             "*.o_proj": "rowwise", "embed": "vocab", "head": "vocab"},
            ),
            "language",
        ),
        "one by one": (
            ParallelSpec(mode="tensor", tp=2, tensor_plan={"*.gate": "colwise", "*.mlp.3": "rowwise"}),
            "language",
        ),
    }  # fmt: skip
    spec, model = specs[name]
    case = Scenario(spec=spec, model=model, steps=5)
    compare(case, run(pool, "gloo", case), 1e-9)


@pytest.mark.parametrize("name", ["tensor", "hybrid", "pipeline of tensors", "zero 3", "pipeline"])
def test_modules_under_several_names(pool: GroupPool, name: str) -> None:
    case = Scenario(spec=SPECS[name], model="reused", steps=6)
    compare(case, run(pool, "gloo", case), 1e-9)
    if name == "tensor":
        first, again = run(pool, "gloo", replace(case, dropout=0.3)), run(pool, "gloo", replace(case, dropout=0.3))
        assert first[0]["losses"] == first[1]["losses"] == again[0]["losses"]


@pytest.mark.parametrize(("name", "backend"), cells(["tensor", "hybrid zero 3"], BACKENDS, [("tensor", "gloo")]))
def test_a_forward_that_looks_at_whole_rows_is_found_on_the_first_batch(
    pool: GroupPool, backend: str, name: str
) -> None:
    case = Scenario(spec=SPECS[name], model="rare", steps=4)
    with pytest.raises(RankFailed, match=r"'mlp' \(Sequential\) computes something else on this batch when 2 workers"):
        run(pool, backend, case)
    words = {field: getattr(case.spec, field) for field in case.spec.__struct_fields__}
    spec = ParallelSpec(**{**words, "tensor_plan": {"mlp.*": "replicate"}})
    compare(replace(case, spec=spec), run(pool, backend, replace(case, spec=spec)), 1e-9)


@pytest.mark.parametrize("name", FEW[:4])
def test_layers_that_only_one_replica_uses(pool: GroupPool, name: str) -> None:
    case = Scenario(spec=SPECS[name], model="choosy", steps=10, rows=2)
    compare(case, run(pool, "gloo", case), 1e-9)


@pytest.mark.parametrize("name", ["zero 2", "zero 3", "zero 3 of 3"])
@pytest.mark.parametrize("model", ["scaled", "emptied"])
def test_scalars_and_empty_layers_that_not_every_replica_uses(pool: GroupPool, model: str, name: str) -> None:
    """They are summed whole, in a collective that must not fall among those of the blocks."""
    case = Scenario(spec=SPECS[name], model=model, steps=8, rows=SPECS[name].dp)
    compare(case, run(pool, "gloo", case), 1e-9)


UNLIKE = ("experts", "raw experts", "exiting", "turning", "frozen", "towers")
#: Beside each model with three replicas: each with two in one of the stages that gather parameters, which differ in when.
WITH_TWO = [
    *zip(UNLIKE, ("zero 2", "zero 3", "zero 3", "zero 2", "zero 2", "zero 3"), strict=True),
    ("experts", "zero 1"), ("frozen", "zero 1"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "name"), cells(UNLIKE, ["zero 3 of 3", "zero 1", "zero 2", "zero 3"], WITH_TWO))
def test_blocks_that_not_every_replica_uses(pool: GroupPool, name: str, model: str) -> None:
    """Mixture of experts, early exit, other orders: a row each, so that replicas use unlike blocks in unlike numbers."""
    case = Scenario(spec=SPECS[name], model=model, steps=8, rows=SPECS[name].dp, accumulate=2)
    # A tower holds a layer of single precision.
    compare(case, run(pool, "guava" if model == "experts" else "gloo", case), 1e-4 if model == "towers" else 1e-9)


@pytest.mark.parametrize("name", FEW[:4])
def test_batch_statistics_stay_equal(pool: GroupPool, name: str) -> None:
    case = Scenario(spec=SPECS[name], model="counting", steps=4, rows=3)
    first, second = pool.run(2, "gloo", buffers, case)
    assert furthest(first, second) == 0.0
    assert int(first["norm.num_batches_tracked"]) == 4


@pytest.mark.parametrize("name", FEW[:4])
def test_an_error_before_the_first_forward_comes_out(pool: GroupPool, name: str) -> None:
    case = Scenario(spec=SPECS[name], steps=1)
    for said, loss in pool.run(2, "gloo", error_before_a_forward, case):
        assert said == "ValueError: a strange batch"
        assert abs(loss - plain(case)[2][0]) <= 1e-9


@pytest.mark.parametrize("name", ["data", "zero 3"])
def test_a_norm_of_one_row_says_what_to_do(pool: GroupPool, name: str) -> None:
    case = Scenario(spec=SPECS[name], model="row normed", start=1, steps=1, rows=2)  # a row for each
    with pytest.raises(
        RankFailed, match=r"TrainingError: 'norm' \(BatchNorm1d\) got one value per channel.*sync_batch"
    ):
        run(pool, "gloo", case)


ROUTE = ["data", "zero 3", "tensor", "pipeline", "zero 1", "hybrid zero 3", "pipeline of zero 1", "data of 3"]


@pytest.mark.parametrize(("groups", "route"), [(True, ROUTE), (False, ROUTE[:4])], ids=["groups", "one group"])
def test_a_state_goes_on_in_any_other_mode(pool: GroupPool, groups: bool, route: list[str]) -> None:
    case = Scenario(spec=SPECS["data"], steps=2, groups=groups)
    model, optimizer, losses, _ = plain(replace(case, steps=2 * len(route)))
    seen: list[float] = []
    for number, name in enumerate(route):
        case = replace(case, spec=SPECS[name], start=2 * number)
        ranks = run(pool, "gloo", case)
        seen += ranks[0]["losses"]
        state, moments = whole_state(case.spec, ranks), whole_optimizer(case.spec, ranks)
        case = replace(case, model_state=state, optimizer_state=moments)
    assert max(abs(a - b) for a, b in zip(seen, losses, strict=True)) <= 1e-9
    assert furthest(state, dict(model.state_dict())) <= 1e-9
    optimizer.load_state_dict(moments)


def test_zero_holds_parts_only(pool: GroupPool) -> None:
    case = Scenario(spec=SPECS["zero 3"], steps=1)
    ranks = run(pool, "gloo", case)
    for name, shape in ranks[0]["local"].items():
        rows = sum(rank["local"][name][0] for rank in ranks) if shape else 0
        assert rows == (dict(case.build().named_parameters())[name].shape[0] if shape else 0)
    owned = [set(rank["optimizer"]["state"]) for rank in run(pool, "gloo", replace(case, spec=SPECS["zero 1"]))]
    assert owned[0] and owned[1] and not owned[0] & owned[1]


def test_what_cannot_be_spread_is_refused_with_its_sizes(pool: GroupPool) -> None:
    def said(spec: ParallelSpec, sizes: tuple[int, int, int], **words: Any) -> str:
        answers = pool.run(2, "gloo", refusal, Scenario(spec=spec, **words), sizes)
        assert len(set(answers)) == 1
        return str(answers[0])

    assert "dp 2 x pp 2 x tp 1 needs 4 workers, 2 are here" in said(ParallelSpec(mode="hybrid", dp=2, pp=2), (2, 2, 1))
    assert "no axis tp" in said(ParallelSpec(tp=2), (1, 1, 2))
    assert "zero_stage=1" in said(ParallelSpec(mode="hybrid", pp=2, zero_stage=3), (1, 2, 1))
    assert "micro-batches, whose statistics" in said(SPECS["pipeline"], (1, 2, 1), sync=True)
    assert "'second': OwnNorm has a forward of its own" in said(SPECS["data"], (2, 1, 1), sync=True, model="own norm")
    rprop = said(SPECS["zero 2"], (2, 1, 1), optimizer="Rprop")
    assert "Rprop cannot step on parameters of which each worker holds some rows, as zero_stage 2" in rprop
    assert said(SPECS["zero 3"], (2, 1, 1), optimizer="Adamax") == ""
    assert "needs a criterion" in said(ParallelSpec(mode="pipeline", pp=2), (1, 2, 1))
    assert "looks at whole parameters" in said(ParallelSpec(mode="tensor", tp=2), (1, 1, 2), optimizer="Adafactor")
    wrong = ParallelSpec(mode="tensor", tp=2, tensor_plan={"blocks.9.*": "colwise"})
    assert "matches no module" in said(wrong, (1, 1, 2))


def test_a_gloo_pipeline_waits_for_a_long_step(pool: GroupPool) -> None:
    """gloo's receives keep the timeout of their group's making, and the default group is made with a short one."""
    assert pool.run(2, "gloo", patience, Scenario(spec=SPECS["pipeline"])) == [1800.0, 1800.0]
