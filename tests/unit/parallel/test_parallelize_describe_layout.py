"""The sentence that says how a model is spread."""

from __future__ import annotations

from guava_nb.parallel.parallelize import describe
from guava_nb.parallel.tensor.tensor_plan import Plan, Split


def test_whole_replicas_have_nothing_to_tell() -> None:
    assert describe((), (), Plan({})) == ""


def test_stages_are_named_by_the_module_they_begin_with() -> None:
    text = describe(("embed", "blocks.3"), (5000, 4000), Plan({}))
    assert text == "stages begin: 1 with embed (5,000 parameters), 2 with blocks.3 (4,000 parameters)"


def test_a_stage_far_above_its_share_is_pointed_out() -> None:
    text = describe(("embed", "encoder"), (4608, 52992), Plan({}))
    assert "stage 2 has 1.8 times its fair share" in text and "nn.Sequential" in text


def test_repeated_blocks_are_named_once_and_counted() -> None:
    splits = {f"blocks.{k}.{kind}": Split(kind) for k in range(3) for kind in ("column", "row")} | {"0": Split("vocab")}
    text = describe((), (), Plan(splits))
    assert text == (
        "shared out: columns of blocks.*.column (x3); rows of blocks.*.row (x3); words of 0; "
        "all else is whole on every worker"
    )
