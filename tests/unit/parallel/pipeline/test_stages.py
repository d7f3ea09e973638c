"""Cutting models into stages: names, orphans, tied weights, refusals; run one after the other they are the model."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from guava_nb.errors import ConfigError
from guava_nb.parallel.pipeline.pipeline_setup import check_spec
from guava_nb.parallel.pipeline.stages import parameter_costs, split_model, time_costs, trace_model
from guava_nb.protocol.messages import ParallelSpec
from tests.support.pipeline_cases import Padded, build_model


def run_stages(modules: Any, inputs: Any) -> Any:
    values: Any = (inputs,)
    for module in modules:
        values = module(*values)
    return values


def parameter_names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(remove_duplicate=False)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_general_model_runs_the_same_in_stages(stages: int) -> None:
    model = build_model("writer").eval()
    for length in (3, 7):
        ids = torch.randint(0, 11, (2, length))
        wanted = model(ids)
        split = split_model(model, stages)
        assert torch.equal(run_stages(split.modules, ids), wanted)
    assert split.holders["words.weight"] == ((0, stages - 1) if stages > 1 else (0,))
    assert split.holders["unused.weight"] == (0,)
    assert split.buffers["steps"] == (0,)


def test_names_are_those_of_the_full_model() -> None:
    model = build_model("nested")
    split = split_model(model, 2, split=("2.0",))
    assert split.begins == ("0.0", "2.0")
    assert parameter_names(split.modules[0]) == ["0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias"]
    assert parameter_names(split.modules[1]) == ["2.0.weight", "2.0.bias", "2.2.weight", "2.2.bias"]
    assert split.modules[1].get_parameter("2.0.weight") is model.get_parameter("2.0.weight")


def test_a_container_may_be_named_and_a_module_inside_a_block() -> None:
    assert split_model(build_model("nested"), 2, split=("2",)).begins == ("0.0", "2.0")
    model = nn.Sequential(build_model("layers"), nn.Tanh())
    assert split_model(model, 2, split=("0.4",)).begins == ("0.0", "0.4")
    writer = build_model("writer").eval()
    ids = torch.randint(0, 11, (2, 4))
    wanted = writer(ids)
    assert torch.equal(run_stages(split_model(writer, 3, split=("blocks.1", "norm")).modules, ids), wanted)


def test_a_module_used_in_two_stages_is_held_by_both() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), nn.Linear(4, 4), shared)
    split = split_model(model, 2, split=("2",))
    assert split.canonical["3.weight"] == "0.weight"
    assert split.holders["0.weight"] == (0, 1)
    assert split.keys == ("0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias")


def test_a_shared_parameter_counts_in_each_stage_that_computes_with_it() -> None:
    tokens, head = nn.Embedding(60, 8), nn.Linear(8, 60, bias=False)
    head.weight = tokens.weight
    model = nn.Sequential(tokens, *(nn.Linear(8, 8, bias=False) for _ in range(4)), head)
    assert parameter_costs(trace_model(model, 2, ())) == [480.0, 64.0, 64.0, 64.0, 64.0, 480.0]
    assert split_model(model, 2).begins == ("0", "3")


def test_balance_by_parameters_and_by_time() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 400), nn.Linear(400, 4))
    assert split_model(model, 2).begins == ("0", "3")
    traced = trace_model(model, 2, ())
    assert parameter_costs(traced) == [20.0, 20.0, 2000.0, 1604.0]
    times = time_costs(traced, torch.zeros(2, 4))
    assert len(times) == 4
    assert all(seconds > 0 for seconds in times)
    assert all(module.training for module in model.modules())


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        for layer in self.layers:
            x = layer(x)
        return x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.dropout(self.first(x), training=self.training))


def test_a_branch_on_values_is_kept_whole_or_refused() -> None:
    model = Outer()
    x = torch.ones(2, 4)
    wanted = model(x)
    split = split_model(model, 2)
    assert split.begins == ("inner", "head")
    assert torch.equal(run_stages(split.modules, x), wanted)
    with pytest.raises(ConfigError, match="Outer cannot be cut into stages.*must not branch on tensors"):
        split_model(Outer(), 3)
    with pytest.raises(ConfigError, match="must not branch on tensors"):
        split_model(Outer(), 2, split=("inner.layers.1",))


class Hidden(Outer):
    """A teacher in a list, which keeps it out of the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [nn.Linear(4, 2)]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)) + self.teacher[0](x)


def test_a_module_that_is_no_submodule_is_refused_by_its_kind() -> None:
    with pytest.raises(ConfigError, match="calls a Linear that is no submodule.*nn.ModuleList"):
        split_model(Hidden(), 2)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


class Adversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Reversed.apply(self.first(x), 0.3))


class Stopped(Adversarial):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.first(x)
        return self.second(h)


def test_the_backward_of_an_autograd_function_is_kept() -> None:
    model, x = Adversarial(), torch.randn(3, 4)
    model(x).sum().backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    run_stages(split_model(model, 2).modules, x).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(wanted, model.parameters(), strict=True))
    assert Reversed.apply(x, 0.5) is not None and "apply" not in vars(Reversed)


def test_a_forward_that_switches_gradients_off_between_its_parts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"switches gradients or autocast on or off \(torch.no_grad"):
        split_model(Stopped(), 2)


class HappensOnce(nn.Module):
    """Blocks with something between them that stages would not do."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = self.what(self, x)
        return x


def clamped(model: nn.Module, x: Tensor) -> Tensor:
    for parameter in model.parameters():
        parameter.data.clamp_(-1, 1)
        with torch.no_grad():
            parameter.clamp_(-1, 1)
    return x


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (lambda model, x: x + torch.randn(4), "draws random numbers where it is cut into stages"),
        (lambda model, x: x + np.random.rand(), "draws random numbers"),
        (lambda model, x: x if random.random() < 0.5 else x, "draws random numbers"),
        (lambda model, x: x if torch.rand(()) < 0.5 else x, "draws random numbers"),
        (clamped, "no_grad|changes the values of"),
    ],
)
def test_what_a_forward_would_do_only_once_is_refused(what: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        trace_model(HappensOnce(what), 2, ("blocks.2",))


def test_a_forward_that_takes_gradients_itself_is_refused() -> None:
    def gradient(model: nn.Module, x: Tensor) -> Tensor:
        return torch.autograd.grad(x.sum(), x, create_graph=True)[0]

    with pytest.raises(ConfigError, match=r"takes gradients itself \(torch.autograd.grad\)"):
        trace_model(HappensOnce(gradient), 2, ("blocks.2",))


def test_a_module_whose_name_is_a_word_of_python_is_refused() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"in": nn.Linear(4, 4), "out": nn.Linear(4, 4)})

        def forward(self, x: Tensor) -> Any:
            return self.parts["out"](self.parts["in"](x))

    with pytest.raises(ConfigError, match=r"is called 'in' \(parts.in\), which is a word of Python's own"):
        trace_model(Named(), 2, ("parts.out",))


def test_modules_may_have_the_names_of_what_torch_fx_keeps() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code, self.meta, self.recompile = nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.graph = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.register_buffer("forward_code", torch.ones(4))

        def forward(self, x: Tensor) -> Any:
            for block in self.graph:
                x = block(self.meta(x)) * self.forward_code
            return self.recompile(x) @ self.code.weight + self.code(x.argmax(1))

    model, x = Named(), torch.randn(3, 4)
    split = split_model(model, 2, split=("graph.1",), costs=lambda traced: time_costs(traced, x, 1))
    assert torch.equal(run_stages(split.modules, x), model(x))
    assert {name for module in split.modules for name in parameter_names(module)} == set(dict(model.named_parameters()))


def test_a_draw_inside_a_block_is_no_concern_of_the_cut() -> None:
    whole = HappensOnce(lambda model, x: x)
    whole.blocks[1] = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    assert len(trace_model(whole, 2, ("blocks.2",)).units) == 5


def test_a_forward_that_asks_for_its_mode_is_refused() -> None:
    model = Drops()
    with pytest.raises(ConfigError, match="other things in train than in eval mode"):
        split_model(model, 2)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("stages", "split", "text"),
    [
        (9, (), "7 parts to cut between, 9 stages need at least 9"),
        (2, ("2", "4"), "2 modules, so 3 stages; the mesh has 2, name 1"),
        (2, ("12",), "'12', which is no module of the model; it has '0', '1'"),
        (2, ("0",), "leave a stage empty"),
        (3, ("2", "2"), "leave a stage empty"),
    ],
)
def test_cuts_that_cannot_be_are_refused_with_the_numbers(stages: int, split: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        split_model(build_model("layers"), stages, split)


def test_a_split_point_that_forward_never_calls() -> None:
    with pytest.raises(
        ConfigError, match="'unused', which the model's forward does not call; it calls 'words', 'blocks.0'"
    ):
        split_model(build_model("writer"), 3, split=("blocks.2", "unused"))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"schedule": "zigzag"}, "schedule 'zigzag' is unknown; there are gpipe, 1f1b, interleaved"),
        ({"stages_per_rank": 2}, r"stages_per_worker is 2 \(--stages-per-worker\) with schedule '1f1b'"),
        ({"balance": "luck"}, "balance 'luck' is unknown"),
        ({"micro_batches": 0}, "micro_batches is 0"),
    ],
)
def test_settings_are_checked(spec: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_spec(ParallelSpec(**spec), 2)


def test_an_encoder_that_packs_rows_in_evaluation_stays_whole_unless_a_cut_is_asked_for() -> None:
    whole = trace_model(Padded(), 2, ())
    assert whole.names == ["words", "encoder", "head"]
    with pytest.raises(ConfigError, match="enable_nested_tensor=False"):
        trace_model(Padded(), 2, ("encoder.layers.2",))


def test_the_module_is_named_whose_forward_cannot_be_followed() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x) if x.sum() > 0 else self.layers[1](x)

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    with pytest.raises(ConfigError, match="in the forward of Inner, .*or call what Inner holds yourself"):
        trace_model(Outside(), 2, ("inner.layers.1",))
