"""What a model carries beside its state dict, against plain PyTorch: registered instances, wrappers, buffers, gradients.

Through `Orchestrator`, as a user calls it, with workers that are threads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from guava_nb import Orchestrator
from guava_nb.errors import CheckpointError, ConfigError, SourceError
from tests.support.session import direct_session
from tests.support.training import difference, loader

SITES = ("workers", "orchestrator")
TRAINING: dict[str, Any] = {
    "optimizer": "SGD",
    "optimizer_args": {"lr": 0.1, "momentum": 0.9},
    "precision": "fp64",
    "progress": False,
}


class Net(nn.Module):
    """Two parts, dropout that is off, and an attribute that the forward reads."""

    def __init__(self, p: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16))
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(16, 4)
        self.scale = scale
        self.register_buffer("offset", torch.zeros(16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.body(x) + self.offset))) * self.scale


def plain(model: nn.Module, epochs: int = 2, filtered: bool = False) -> nn.Module:
    """Train in one process, in training mode, whole batches."""
    model = model.double()
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad or not filtered], lr=0.1, momentum=0.9
    )
    batches = loader()
    model.train()
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


def seeded(made: type[nn.Module] = Net, seed: int = 3, **args: Any) -> Any:
    torch.manual_seed(seed)
    return made(**args)


def train(orchestrator: Orchestrator, epochs: int = 2, **options: Any) -> nn.Module:
    run = orchestrator.start_training(loader(), num_epochs=epochs, **{**TRAINING, **options})
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)
    return run.model()


# ------------------------------------------------------------------------------------------------ registered instances


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_frozen_body_of_an_instance_stays_where_it_is(workers: int, site: str) -> None:
    net, oracle = seeded(), seeded()
    for one in (net, oracle):
        one.body.requires_grad_(False)
    with direct_session(workers) as session:
        session.register_model(net)
        trained = train(session, optimizer_site=site)
    assert torch.equal(trained.body[0].weight, net.body[0].weight.double())
    assert not trained.body[0].weight.requires_grad and trained.head.weight.requires_grad
    assert difference(trained, plain(oracle)) <= 1e-9


def test_an_instance_may_be_unfrozen_between_two_runs() -> None:
    net, oracle = seeded(), seeded()
    with direct_session(2) as session:
        session.register_model(net)
        net.body.requires_grad_(False)  # what counts is how it stands when a run begins
        train(session)
        net.body.requires_grad_(True)
        trained = train(session, optimizer_args={"lr": 0.05})
    oracle.body.requires_grad_(False)
    plain(oracle)
    oracle.body.requires_grad_(True)
    assert difference(trained, _plain_sgd(oracle, 0.05)) <= 1e-9


def _plain_sgd(model: nn.Module, lr: float) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    batches = loader()
    for _ in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize("workers", [1, 2])
def test_hidden_buffers_of_an_instance_travel(workers: int) -> None:
    net, oracle = seeded(), seeded()
    for one in (net, oracle):
        one.offset.fill_(0.5)
    with direct_session(workers) as session:
        session.register_model(net)
        trained = train(session)
    assert difference(trained, plain(oracle)) <= 1e-9
    assert float(trained.offset[0]) == 0.5


def test_an_instance_in_evaluation_mode_is_trained_in_training_mode() -> None:
    with direct_session(2) as session:
        session.register_model(seeded().eval())
        assert difference(train(session), plain(seeded())) <= 1e-9


def _hooked(net: Net) -> None:
    net.head.register_forward_hook(lambda module, args, out: out * 2)


def _gradient_hooked(net: Net) -> None:
    net.head.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))


def _replaced_forward(net: Net) -> None:
    net.forward = lambda x: net.head(net.body(x))  # type: ignore[method-assign]


def _swapped(net: Net) -> None:
    net.body[1] = nn.ReLU()


def _probability(net: Net) -> None:
    net.drop.p = 0.25


def _attribute(net: Net) -> None:
    net.scale = 2.0


def _added(net: Net) -> None:
    net.drop.extra = nn.Identity()


def _frozen_norm(net: Net) -> None:
    net.drop.eval()


def _tied(net: Net) -> None:
    net.body[2].bias = net.body[0].bias


def _half(net: Net) -> None:
    net.head.half()


def _weight_norm(net: Net) -> None:
    nn.utils.parametrizations.weight_norm(net.head)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_probability, r"module 'drop', attribute 'p' is 0\.25 in the registered model and 0\.0 in the one"),
        (_attribute, r"the model itself, attribute 'scale' is 2\.0 in the registered model and 1\.0"),
        (_swapped, r"module 'body\.1' is ReLU in the registered model and Tanh in the one that is built"),
        (_added, r"module 'drop\.extra' is there only in the registered model"),
        (_hooked, r"module 'head', forward hooks is _hooked"),
        (_gradient_hooked, r"gradient hooks of head\.weight is _gradient_hooked"),
        (_replaced_forward, r"the model itself, attribute 'forward' is _replaced_forward"),
        (_frozen_norm, r"module 'drop', attribute 'training' is False in the registered model and True"),
        (_tied, r"body\.2\.bias is the same tensor as body\.0\.bias in the registered model"),
        (_half, r"the dtype of head\.weight is float16 in the registered model and float32"),
        (_weight_norm, r"not in the registered one: head\.weight"),
    ],
)
def test_what_was_changed_after_the_instance_was_built_is_refused_by_name(change: Any, says: str) -> None:
    net = Net()
    change(net)
    with direct_session(1) as session:
        session.register_model(net)
        with pytest.raises(CheckpointError, match=says) as raised:
            train(session, precision="fp32")
        assert "Only its weights and requires_grad travel" in str(raised.value)
        assert session.run is None  # no worker was asked


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda net: torch.compile(net, backend="eager")])
def test_a_wrapped_instance_is_trained_as_what_it_wraps(wrap: Any) -> None:
    with direct_session(2) as session:
        session.register_model(wrap(seeded()))
        trained = train(session)
    assert type(trained).__name__ == "Net"
    assert difference(trained, plain(seeded())) <= 1e-9


def test_a_container_or_scripted_instance_is_refused_with_the_way_out() -> None:
    with direct_session(1) as session:
        with pytest.raises(SourceError, match=r"which layers this instance has.*class Net\(nn\.Sequential\)"):
            session.register_model(nn.Sequential(nn.Linear(10, 4)))
        with pytest.raises(SourceError, match="scripted"):
            session.register_model(torch.jit.script(nn.Linear(10, 4)))


def test_an_instance_that_needs_arguments_says_so() -> None:
    class_ = nn.Linear(10, 4)
    with direct_session(1) as session:
        session.register_model(class_)
        with pytest.raises(ConfigError, match="missing a required argument: 'in_features'"):
            train(session)
        session.register_model(class_, {"in_features": 10, "out_features": 4})
        assert train(session).weight.shape == (4, 10)


# ------------------------------------------------------------------------------------------------------------ wrappers


def compiled() -> nn.Module:
    return torch.compile(Net(), backend="eager")  # type: ignore[return-value]


def compiled_inside() -> nn.Module:
    net = Net()
    net.body = torch.compile(net.body, backend="eager")  # type: ignore[assignment]
    return net


def parallel_inside() -> nn.Module:
    net = Net()
    net.body = nn.DataParallel(net.body)  # type: ignore[assignment]
    return net


def old_style(model: nn.Module, content: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint as it was written before wrappers were taken off."""
    return {**content, "model": {f"_orig_mod.{name}": value for name, value in content["model"].items()}}


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("factory", [compiled, compiled_inside, parallel_inside])
def test_wrapped_models_are_saved_under_the_plain_model_s_names(tmp_path: Path, factory: Any, site: str) -> None:
    path = tmp_path / "one.pt"
    with direct_session(2) as session:
        session.register_model(factory)
        torch.manual_seed(0)
        trained = train(session, optimizer_site=site, seed=3)
        session.save_checkpoint(path)
        assert trained.state_dict().keys() == Net().state_dict().keys()
        saved = torch.load(path, weights_only=True)
        Net().load_state_dict(saved["model"])
        assert difference(trained, plain(seeded())) <= 1e-9
        torch.save(old_style(trained, saved), path)
        session.load_checkpoint(path)
        further = train(session, epochs=4, optimizer_site=site, seed=3)
    assert further.state_dict().keys() == Net().state_dict().keys()
