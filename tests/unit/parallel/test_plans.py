"""Finding and proving tensor plans, without any group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from guava_nb.errors import ConfigError
from guava_nb.parallel.blocks import matching, repeated_blocks
from guava_nb.parallel.checkpointing import checkpoint_activations
from guava_nb.parallel.plan_search import make_plan
from guava_nb.parallel.plans import prove_plan
from tests.support.spread import Attention, FusedAttention, Gated, Language


def kinds(model: nn.Module, patterns: dict[str, str] | None = None, ranks: int = 2) -> dict[str, tuple[str, bool]]:
    plan = make_plan(model, patterns or {}, ranks)
    return {name: (split.kind, split.joined) for name, split in plan.splits.items()}


def test_heads_keys_and_norms_inside_them_are_found() -> None:
    plan = make_plan(nn.ModuleDict({"a": Attention()}), {}, 2)
    assert {name: split.joined for name, split in plan.splits.items()} == dict.fromkeys(
        ["a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj"], False
    )
    assert plan.partial == ("a.norm.weight", "a.norm.bias")
    assert plan.attributes["a"] == {"n_heads": (2, 2), "n_kv_heads": (1, 1)}


def test_a_fused_weight_is_cut_by_heads() -> None:
    plan = make_plan(nn.ModuleDict({"a": FusedAttention()}), {}, 3)
    assert plan.splits["a.c_attn"].ranges[0] == [(0, 4), (8, 12), (16, 20)]
    assert plan.splits["a.c_attn"].ranges[2] == [(6, 8), (14, 16), (22, 24)]


def test_interleaved_heads_are_told_from_rows_of_heads() -> None:
    class Interleaved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 4
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            b, t, _ = x.shape
            q, k, v = self.qkv(x).view(b, t, self.num_heads, 3, 2).permute(3, 0, 2, 1, 4)
            return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))

    plan = make_plan(nn.ModuleDict({"a": Interleaved()}), {}, 2)
    assert plan.splits["a.qkv"].ranges == [[(0, 12)], [(12, 24)]]


def test_gated_and_plain_pairs_are_found() -> None:
    model = nn.ModuleDict({"a": Gated(), "b": nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))})
    assert kinds(model) == {
        "a.gate": ("column", False),
        "a.up": ("column", False),
        "a.down": ("row", False),
        "b.0": ("column", False),
        "b.2": ("row", False),
    }


class Normed(nn.Module):
    """Between its layers something looks at the whole width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(functional.softmax(self.one(x), dim=-1))


def test_a_split_that_changes_numbers_is_not_made() -> None:
    # Large layers are split with whole activations around each, small ones only where there is nothing else.
    assert kinds(nn.ModuleDict({"a": Normed(256)})) == {"a.one": ("column", True), "a.two": ("column", True)}
    assert kinds(nn.ModuleDict({"a": Normed(4)})) == {"a.one": ("column", True), "a.two": ("row", True)}
    assert kinds(nn.ModuleDict({"a": Normed(4), "b": Gated()}))["b.up"] == ("column", False)
    assert "a.one" not in kinds(nn.ModuleDict({"a": Normed(4), "b": Gated()}))


def test_a_users_pair_that_changes_numbers_is_split_apart() -> None:
    plan = {"*.one": "colwise", "*.two": "rowwise"}
    assert kinds(nn.ModuleDict({"a": Normed(4)}), plan) == {"a.one": ("column", True), "a.two": ("row", True)}


def test_proof_leaves_the_module_alone() -> None:
    module = Gated()
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    plan = make_plan(nn.ModuleDict({"a": module}), {}, 3)
    assert prove_plan(module, 8, 3, plan.under("x")).equal  # nothing of it is named so: nothing is split
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in module.named_parameters())


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        ({"blocks.*": "sideways"}, "'sideways' is unknown; choose one of colwise"),
        ({"layers.*": "colwise"}, "matches no module"),
        ({"*.n1": "colwise"}, "does not fit 'blocks.0.n1', which is a LayerNorm"),
        ({"embed": "vocab"}, "shares its weight with 'head'"),
        ({"head": "colwise"}, "only 'vocab' splits both"),
        ({"*.k_proj": "colwise"}, "'blocks.0.attention.k_proj' has 4 outputs, tp 5 needs 5 at least"),
        ({"blocks.0": "replicate"}, "nothing in this model can be shared by 5 workers"),
    ],
)
def test_plans_that_cannot_be_are_refused(patterns: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(Language(), patterns, 5)
    assert text in str(caught.value)


def test_blocks_are_what_repeats() -> None:
    assert list(repeated_blocks(Language())) == [f"blocks.{n}" for n in range(4)]
    assert list(repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))) == []
    assert list(matching(Language(), ["blocks.2.*.q_proj", "embed"], "x")) == ["embed", "blocks.2.attention.q_proj"]
    with pytest.raises(ConfigError, match="matches no module"):
        matching(Language(), ["nowhere"], "checkpoint_activations")


def test_checkpoints_keep_names_and_take_the_outer_module() -> None:
    model = Language()
    names = [name for name, _ in model.named_parameters()]
    assert checkpoint_activations(model, ["blocks.0", "blocks.0.*", "blocks.2.mlp"]) == ["blocks.0", "blocks.2.mlp"]
    assert [name for name, _ in model.named_parameters()] == names


def test_a_checkpoint_counts_a_batch_once() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh())
    again = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh())
    again.load_state_dict(plain.state_dict())
    outer = nn.ModuleDict({"a": again})
    checkpoint_activations(outer, ["a"])
    for model in (plain, again):
        model(torch.arange(12.0).view(4, 3)).square().sum().backward()
    for mine, theirs in zip(again.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(again[0].weight.grad, plain[0].weight.grad)
