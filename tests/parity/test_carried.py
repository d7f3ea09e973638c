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
from guava_nb.errors import CheckpointError, ConfigError, SourceError, TrainingError
from tests.support.session import direct_session, said
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


# ------------------------------------------------------------------------------------------------------------- buffers


class Moving(nn.Module):
    """A target network moved in the forward, counters, histograms and sums, each as users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.head = nn.Linear(10, 8), nn.Linear(8, 4)
        self.target = nn.Linear(10, 8).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rate", torch.ones(()))  # decays once a step, whatever the data is
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("hist", torch.zeros(4))
        self.register_buffer("classes", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("any", torch.zeros((), dtype=torch.bool))
        self.register_buffer("hidden", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(torch.tanh(self.online(x)))
        if self.training:
            with torch.no_grad():
                for online, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
                    target.data = 0.9 * target.data + 0.1 * online.data
                chosen = nn.functional.one_hot(out.argmax(1), 4).sum(0)
                self.steps += 1
                self.rate.mul_(0.9)
                self.seen += len(x)
                self.count += len(x)
                self.hist += chosen
                self.classes += chosen
                self.any |= True
                self.hidden += 1
        return out + self.head(torch.tanh(self.target(x))) * self.rate + self.hidden * 1e-3


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_what_the_forward_moves_is_that_of_one_process(workers: int, site: str) -> None:
    with direct_session(workers) as session:
        session.register_model(Moving)
        trained = train(session, optimizer_site=site, seed=3)
        assert "different amounts" not in said(session)
    oracle = plain(seeded(Moving))
    assert difference(trained, oracle) <= 1e-9
    assert int(trained.steps) == 8 and int(trained.seen) == 202 and trained.hist.sum() == 202
    assert float(trained.hidden) == 8.0


class Averaging(nn.Module):
    """An EMA of what the data is, as a vector-quantised codebook keeps it: no share of a batch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 8), nn.Linear(8, 4)
        self.register_buffer("sizes", torch.ones(8))
        self.register_buffer("right", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.training:
            with torch.no_grad():
                self.sizes.mul_(0.9).add_(nn.functional.one_hot(h.argmax(1), 8).sum(0), alpha=0.1)
                self.right += (h.sum(1) > 0).sum()
                self.total += h.sum(0)
        return self.last(h)


@pytest.mark.parametrize("site", SITES)
def test_a_buffer_that_no_rule_makes_right_is_told_and_can_be_chosen(site: str) -> None:
    oracle = plain(seeded(Averaging))
    with direct_session(2) as session:
        session.register_model(Averaging)
        trained = train(session, optimizer_site=site, seed=3)
        assert "the workers changed sizes by different amounts in step 1" in said(session)
        assert float((trained.sizes - oracle.sizes).abs().max()) > 0.1
        # The one-step check finds that these two are sums.
        assert "by right=sum, total=sum, so this run takes that" in said(session)
        assert int(trained.right) == int(oracle.right) and float((trained.total - oracle.total).abs().max()) <= 1e-9
        summed = train(session, optimizer_site=site, seed=3, fresh=True, check="off", buffers="total=sum,sizes=first")
        assert float((summed.total - oracle.total).abs().max()) <= 1e-9
        assert "the workers changed right by different amounts" in said(session)
        # The way out that the notice names.
        whole = train(session, optimizer_site=site, seed=3, fresh=True, shares=[1, 0])
    assert difference(whole, oracle) <= 1e-9


def hooked_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """As an EMA of the weights is often kept: moved by a hook of the optimizer, after each of its steps."""
    by_name = dict(named)
    optimizer = torch.optim.SGD([p for p in by_name.values() if p.requires_grad], lr=0.1, momentum=0.9)

    def follow(*_: Any) -> None:
        with torch.no_grad():
            for name, p in by_name.items():
                if name.startswith("online."):
                    by_name[name.replace("online", "target")].mul_(0.5).add_(p, alpha=0.5)

    optimizer.register_step_post_hook(follow)
    return optimizer


class Followed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(10, 4), nn.Linear(10, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.online(x) + self.target(x)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_hook_of_the_optimizer_moves_stays_moved(workers: int, site: str) -> None:
    oracle = seeded(Followed).double()
    optimizer = hooked_optimizer(list(oracle.named_parameters()))
    batches = loader()
    for _ in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(oracle(x), y).backward()
            optimizer.step()
    with direct_session(workers) as session:
        session.register_model(Followed)
        trained = train(session, optimizer=hooked_optimizer, optimizer_args=None, optimizer_site=site, seed=3)
    assert difference(trained, oracle) <= 1e-9


class Large(nn.Module):
    """A frozen part that is larger than what is trained, and that the forward moves."""

    def __init__(self, moves: bool = True) -> None:
        super().__init__()
        self.moves, self.body, self.head = (
            moves,
            nn.Linear(10, 1 << 20, bias=False).requires_grad_(False),
            nn.Linear(10, 4),
        )
        nn.init.zeros_(self.body.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.moves:
            with torch.no_grad():
                self.body.weight[0] += 1
        return self.head(x)


def test_a_large_part_without_gradient_that_moves_is_refused() -> None:
    with direct_session(2) as session:
        session.register_model(Large, {"moves": False})
        train(session, epochs=1)
        session.register_model(Large)
        with pytest.raises(
            TrainingError, match=r"parameter 'body\.weight' takes no gradient, and the forward changes it"
        ):
            train(session, epochs=1)


# ------------------------------------------------------------------------------------------- gradients that begin later


class Unfreezing(nn.Module):
    """Gradual unfreezing in the forward, after four steps; `freezes` goes the other way."""

    def __init__(self, freezes: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.freezes = nn.Linear(10, 8), nn.Linear(8, 4), freezes
        self.body.requires_grad_(freezes)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        if self.steps > 4:
            self.body.requires_grad_(not self.freezes)
        return self.head(torch.tanh(self.body(x)))


@pytest.mark.parametrize("site", SITES)
def test_a_late_gradient_is_refused_by_name_and_the_run_before_it_stays(site: str) -> None:
    with direct_session(2) as session:
        session.register_model(Unfreezing)
        with pytest.raises(TrainingError, match=r"parameter 'body\.weight' began to take a gradient during the run"):
            train(session, optimizer_site=site, seed=3)
        stopped = session.run.model()
    assert difference(stopped, plain(seeded(Unfreezing), epochs=1)) <= 1e-9


def test_a_lone_worker_obeys_as_a_plain_loop_does() -> None:
    with direct_session(1) as session:
        session.register_model(Unfreezing)
        assert difference(train(session, seed=3), plain(seeded(Unfreezing))) <= 1e-9


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_frozen_during_a_run_stays_where_it_is(workers: int) -> None:
    with direct_session(workers) as session:
        session.register_model(Unfreezing, {"freezes": True})
        trained = train(session, seed=3)
    assert difference(trained, plain(seeded(Unfreezing, freezes=True))) <= 1e-9


# ------------------------------------------------------------------------------------- nothing trained is thrown away

CELL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width={width}, p=0.0):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(10, width), nn.Dropout(p), nn.Linear(width, 4)

    def forward(self, x):
        return self.last(self.drop(torch.{act}(self.first(x))))
"""
LOSS = """
def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, label_smoothing={smoothing})
"""
METRIC = """
def right(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()
"""


def shared(session: Orchestrator, width: int = 8, act: str = "tanh") -> None:
    session.share(CELL.format(width=width, act=act), "net")


def steps_in(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(model: nn.Module, before: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def _metric(session: Orchestrator) -> None:
    session.share(METRIC, "metric")
    session.validate(loader(), metrics={"right": "right"}, progress=False)


def _loss(session: Orchestrator) -> None:
    session.share(LOSS.format(smoothing=0.1), "loss")


def _again(session: Orchestrator) -> None:
    shared(session)
    session.register_model("Net")


def _comment(session: Orchestrator) -> None:
    session.share("# better\n" + CELL.format(width=8, act="tanh"), "net")


def _activation(session: Orchestrator) -> None:
    shared(session, act="relu")


def _arguments(session: Orchestrator) -> None:
    session.register_model("Net", {"p": 0.0})


def _mode(session: Orchestrator) -> None:
    session.set_mode("data", path="relay")


@pytest.mark.parametrize("change", [_metric, _loss, _again, _comment, _activation, _arguments, _mode])
@pytest.mark.parametrize("workers", [1, 2])
def test_weights_stay_while_the_model_has_the_same_parameters(change: Any, workers: int) -> None:
    """A step with a learning rate of 0 shows from where a run goes on."""
    with direct_session(workers) as session:
        shared(session)
        session.register_model("Net")
        trained = steps_in(train(session))
        change(session)
        assert same(train(session, epochs=1, optimizer_args={"lr": 0.0}), trained)
        told = said(session)
        assert "goes on from the weights of the last run" in told
        named = {_comment: "net", _activation: "net"}.get(change)
        assert (f"shared cell {named} changed since" in told) == (named is not None)


def test_another_metric_leaves_the_optimizer_s_state_too() -> None:
    with direct_session(2) as session:
        shared(session)
        session.register_model("Net")
        train(session)
        _metric(session)
        trained = train(session)
        assert "with a new optimizer" not in said(session)
        assert difference(trained, plain_continued(session)) <= 1e-9


def plain_continued(session: Orchestrator) -> nn.Module:
    """Two runs of two epochs; the loader of each begins with the same order."""
    net = session._models.shared().Net  # type: ignore[union-attr]
    torch.manual_seed(session.config.seed)
    model = net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        batches = loader()
        for x, y in [*batches, *batches]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


def test_what_would_throw_training_away_asks_first() -> None:
    with direct_session(2) as session:
        shared(session)
        session.register_model("Net")
        trained = steps_in(train(session))
        shared(session, width=9)
        with pytest.raises(
            ConfigError, match=r"throw away what the last one trained in 8 steps: shared cell net changed.*--fresh"
        ):
            train(session)
        with pytest.raises(CheckpointError, match="belongs to another model"):
            session.validate(loader(), progress=False)
        shared(session)
        assert same(train(session, epochs=1, optimizer_args={"lr": 0.0}), trained)
        session.register_model("Net", {"width": 9})
        with pytest.raises(ConfigError, match="another model was chosen since"):
            train(session)
        assert train(session, fresh=True).first.weight.shape == (9, 10)


def test_a_registered_instance_does_not_throw_training_away_unasked(tmp_path: Path) -> None:
    net = seeded()
    with direct_session(2) as session:
        session.register_model(net)
        trained = steps_in(train(session))
        session.register_model(net)  # once more, as a notebook's cell does that is run again
        assert same(train(session, epochs=1, optimizer_args={"lr": 0.0}), trained)
        run = session.start_training(loader(), **TRAINING)
        assert session._replica_sets.trained is not None
        session._replica_sets.trained.master_step = -1  # as after a run whose state took too long to fetch
        session.register_model(seeded(seed=4))
        with pytest.raises(ConfigError, match=r"throw away what the last one trained.*save_checkpoint"):
            train(session)
        session.validate(
            loader(dtype=torch.float32), progress=False
        )  # of the instance; what only workers hold is fetched before
        kept = steps_in(run.model())
        with pytest.raises(ConfigError, match=r"throw away what the last one trained.*save_checkpoint"):
            train(session)  # that it is here by now changes nothing
        session.save_checkpoint(tmp_path / "kept.pt")
        other = train(session, epochs=1, optimizer_args={"lr": 0.0})
        assert torch.equal(other.head.weight, seeded(seed=4).double().head.weight)
        assert same(run.model(), kept) and not same(run.model(), trained)
