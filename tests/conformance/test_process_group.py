"""One suite over the groups guava and gloo: the same program must not see a difference, except in words."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from tests.support.hub_ranks import Ranks

BOTH = [
    "all_reduce_ops",
    "half_types",
    "large_and_odd",
    "shapes",
    "reduce_to_root",
    "reduce_scatters",
    "broadcasts",
    "gathers",
    "all_to_alls",
    "objects",
    "sends",
    "tags_and_order",
    "from_anyone",
    "subgroups",
    "meshes",
    "futures",
    "futures_that_call",
    "group_s_backend",
    "profiled",
    "resized",
    "power_sgd",
    "uneven_inputs",
    "fully_sharded_flat",
    "data_parallel",
    "fully_sharded",
    "tensor_parallel",
    "pipelined",
]
OURS = [
    "types_of_ours",
    "half_sums_are_rounded_once",
    "split",
    "left_member",
    "store_operations",
    "different_sizes",
    "no_such_root",
    "named_backends",
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as pool:
        yield pool


@pytest.mark.parametrize("case", BOTH)
@pytest.mark.parametrize("backend", ["guava", "gloo"])
def test_both(ranks: Ranks, backend: str, case: str) -> None:
    ranks.run(case, backend)


@pytest.mark.parametrize("case", OURS)
def test_ours(ranks: Ranks, case: str) -> None:
    ranks.run(case, "guava")


def test_ranks_that_go_different_ways_are_told(ranks: Ranks) -> None:
    ranks.run("different_calls", "guava")
    ranks.forget()


@pytest.mark.parametrize("case", ["missing_rank", "missing_sender"])
def test_time_outs_name_who_is_missing(ranks: Ranks, case: str) -> None:
    ranks.run(case, "guava", timeout_s=0.5)
    ranks.forget()


def test_monitored_barrier_names_who_is_missing(ranks: Ranks) -> None:
    ranks.run("monitored", "guava")
    ranks.forget()


@pytest.mark.parametrize("case", ["die_in_a_collective", "die_under_ddp"])
def test_a_lost_rank_breaks_the_group_on_all_others_with_its_name(ranks: Ranks, case: str) -> None:
    ranks.start(case, "guava")
    waited = ranks.results([0, 2])
    ranks.kill(1)
    assert all(seconds is None or seconds < 5 for seconds in waited)


def test_the_hub_can_break_a_group_and_the_same_processes_form_the_next(ranks: Ranks) -> None:
    ranks.run("data_parallel", "guava")  # a group stands
    ranks.start("wait_for_the_break", "guava")
    started = time.monotonic()
    while len(list(ranks.folder.glob("waiting-*"))) < ranks.size:
        assert time.monotonic() - started < 30
        time.sleep(0.005)
    name = ranks.group
    ranks.hub.relay.break_group(f"{name}/", "the step was given up: w1 ran out of memory")
    assert all("w1 ran out of memory" in text for text in ranks.results())
    ranks.run("reform", "guava", name=f"{name}-next")
    ranks.hub.relay.forget(f"{name}/")
    assert not ranks.hub.relay.figures(f"{name}/")
    assert ranks.hub.relay.figures(f"{name}-next/")
    ranks.forget()


def test_a_group_can_be_broken_from_this_side(ranks: Ranks) -> None:
    ranks.run("local_break", "guava")
    ranks.forget()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("case", ["cuda_moves", "cuda_streams", "cuda_data_parallel"])
def test_cuda_tensors(ranks: Ranks, case: str) -> None:
    ranks.run(case, "guava")
