"""Finding and proving tensor plans, without any group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from guava_nb.errors import ConfigError
from guava_nb.parallel.blocks import matching, repeated_blocks
from guava_nb.parallel.checkpointing import checkpoint_activations
from guava_nb.parallel.tensor.plan_search import make_plan, module_fingerprint
from guava_nb.parallel.tensor.tensor_plan import split_modules, try_plan
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


class OverFeatures(torch.autograd.Function):
    """A backward that looks at dim 1: the features of rows, the steps of sequences."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / (gradient.norm(dim=1, keepdim=True) + 1e-3)


def test_a_backward_that_looks_at_whole_rows_is_found() -> None:
    found = kinds(nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 8), Does(OverFeatures.apply), nn.Linear(8, 4))}))
    assert found == {"a.0": ("column", True), "a.2": ("row", True)}


def test_layers_with_hooks_stay_whole() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    plain, hooked = model(), model()
    hooked[2].register_full_backward_hook(lambda module, given, taken: None)
    embedding = nn.Embedding(50, 4)
    embedding.register_forward_hook(lambda module, args, output: output * 2)
    assert set(kinds(nn.ModuleDict({"a": plain, "b": hooked, "c": embedding}))) == {"a.0", "a.2"}
    with pytest.raises(ConfigError, match="'colwise' does not fit '2', which is a Linear with hooks"):
        make_plan(hooked, {"2": "colwise"}, 2)


WHOLE = {"a.0": ("column", True), "a.2": ("row", True)}
SPLIT = {"a.0": ("column", False), "a.2": ("row", False)}


class Keeps(nn.Module):
    """What its forward leaves in attributes for a loss that reads it there: in its own, or in those of a module inside."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.one, self.inner, self.two = nn.Linear(4, 8), Inner(what), nn.Linear(8, 4)
        self.what, self.seen = what, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(self.one(x))
        if self.what == "list":
            self.seen = [h.detach()]
        if self.what == "number":
            self.size = h.pow(2).mean().item()
        if self.what == "output":
            self.last = self.two(h)
        return self.two(h)


class Inner(nn.Tanh):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "inner":
            self.aux = x.pow(2).mean()
        return super().forward(x)


@pytest.mark.parametrize(
    ("what", "is_split"), [("", True), ("output", True), ("inner", False), ("list", False), ("number", False)]
)
def test_split_activations_that_a_forward_leaves_in_attributes_are_whole_there(what: str, is_split: bool) -> None:
    assert set(kinds(Keeps(what)).values()) == {("column", not is_split), ("row", not is_split)}


def test_hooks_between_layers_see_whole_activations() -> None:
    model = Keeps("")
    model.inner.register_forward_hook(lambda module, args, output: None)
    assert set(kinds(model).values()) == {("column", True), ("row", True)}


def test_widths_of_split_layers_are_those_of_what_goes_in_and_comes_out() -> None:
    def widths(model: nn.Module) -> list[tuple[int, int]]:
        return [(model.one.in_features, model.one.out_features), (model.two.in_features, model.two.out_features)]  # type: ignore[union-attr,return-value]

    for what, width in (("", 4), ("inner", 7)):
        model = Keeps(what)
        model.one, model.two = nn.Linear(4, 7), nn.Linear(7, 4)
        assert widths(model) == [(4, 7), (7, 4)]
        regions = split_modules(model, make_plan(model, {}, 2), Alone())
        assert widths(model) == [(4, width), (width, 4)]
        for region in regions:
            region.join()
        assert widths(model) == [(4, 7), (7, 4)]


def between(inner: nn.Module, width: int = 8) -> nn.ModuleDict:
    return nn.ModuleDict({"a": nn.Sequential(nn.Linear(width, 2 * width), inner, nn.Linear(2 * width, width))})


class Does(nn.Module):
    """What its function does in training; nothing in evaluation."""

    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.does = does

    def forward(self, h: Tensor) -> Tensor:
        return self.does(h) if self.training else h


class Follows(nn.Module):
    """A mean that moves in training: of each unit, or of whole rows."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units
        self.register_buffer("mean", torch.zeros(units))

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            seen = h.detach().flatten(0, -2).mean(0)
            self.mean.lerp_(seen if self.units > 1 else seen.mean(), 0.1)
        return h


class Clips(nn.Module):
    """Shortens long rows."""

    def forward(self, h: Tensor) -> Tensor:
        return h * torch.clamp(20 / h.norm(dim=-1, keepdim=True), max=1.0)


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (Does(lambda h: h / (1 + h.norm(dim=-1, keepdim=True))), WHOLE),
        (Does(lambda h: functional.dropout(h * torch.rand_like(h), 0.5)), SPLIT),
        (Does(lambda h: h.relu()), SPLIT),
        (nn.Dropout(0.5), SPLIT),
        (Follows(16), WHOLE),
        (Follows(1), WHOLE),
        (nn.BatchNorm1d(16), WHOLE),
        (Clips(), WHOLE),
    ],
)
def test_what_a_forward_does_in_training_and_with_large_numbers(
    inner: nn.Module, expected: dict[str, tuple[str, bool]]
) -> None:
    model, state = between(inner), torch.get_rng_state()
    assert kinds(model) == expected
    assert torch.equal(torch.get_rng_state(), state)


class Act(nn.Module):
    def __init__(self, kind: object) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, h: Tensor) -> Tensor:
        if callable(self.kind):
            return self.kind(h)
        text = self.kind[0] if isinstance(self.kind, list) else self.kind
        plain = float(text) > 0 if isinstance(text, Tensor) else text == "relu"
        return torch.relu(h) if plain else functional.softmax(h, dim=-1)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (torch.relu, lambda h: functional.softmax(h, dim=-1)),
        ("relu", "softmax"),
        (["relu"], ["softmax"]),
        (torch.tensor(1.0), torch.tensor(-1.0)),
    ],
)
def test_a_proof_counts_for_modules_that_do_the_same_only(good: object, bad: object) -> None:
    first, second = between(Act(good))["a"], between(Act(bad))["a"]
    assert module_fingerprint(first) != module_fingerprint(second)
    assert module_fingerprint(first) == module_fingerprint(between(Act(good))["a"])
    assert kinds(nn.ModuleDict({"a": first, "b": second})) == SPLIT
    # Also where the difference lies deeper than the module that holds the layers.
    assert kinds(nn.ModuleDict({"b": nn.Sequential(second), "a": first})) == SPLIT


def test_a_module_under_several_names_is_one() -> None:
    model = between(nn.ReLU())
    model["again"] = model["a"]
    assert kinds(model) == {**SPLIT, "again.0": ("column", False), "again.2": ("row", False)}
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))})
    model["elsewhere"] = nn.Sequential(model["a"][0], nn.Softmax(dim=-1))  # where its output must be whole
    assert kinds(model) == {**WHOLE, "elsewhere.0": ("column", True)}
    split_modules(model, make_plan(model, {}, 2), Alone())
    assert model["elsewhere"][0] is model["a"][0]


class Alone:
    """One of two ranks, which never sends."""

    rank, size = 0, 2


def test_modules_can_be_left_out_of_a_plan_that_is_found() -> None:
    model = nn.ModuleDict({"a": Gated(), "b": Gated(), "e": nn.Embedding(6, 8)})
    assert set(kinds(model, {"a": "replicate"})) == {"b.gate", "b.up", "b.down", "e"}
    assert set(kinds(model, {"a.*": "replicate", "e": "replicate"})) == {"b.gate", "b.up", "b.down"}


def test_a_users_pair_that_changes_numbers_is_split_apart() -> None:
    plan = {"*.one": "colwise", "*.two": "rowwise"}
    assert kinds(nn.ModuleDict({"a": Normed(4)}), plan) == {"a.one": ("column", True), "a.two": ("row", True)}


def test_proof_leaves_the_module_alone() -> None:
    module = Gated()
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    plan = make_plan(nn.ModuleDict({"a": module}), {}, 3)
    assert try_plan(module, 8, 3, plan.under("x")).equal  # nothing of it is named so: nothing is split
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
        ({"*": "replicate"}, "nothing in this model can be shared by 5 workers"),
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
