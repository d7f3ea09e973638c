"""Replicas plus summation in one process against plain PyTorch loops over whole batches."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from guava_nb.protocol.messages import Commit, Factory, RunSpec
from guava_nb.replica.replica import Replica
from guava_nb.replica.shard import ShardWork
from tests.support.star import (
    BUFFERS,
    Contribution,
    all_finite,
    cloned,
    commit_of,
    replica,
    solo_step,
    spec,
    star_step,
    sum_shards,
)

STEPS = 50


class Net(nn.Module):
    """Tied weights, an unused layer, a frozen one, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.block = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 2)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).mean(1)
        for _ in range(2):
            h = torch.tanh(self.block(h))
        return self.head(self.frozen(h))


def batches(steps: int, rows: int = 13, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(steps):
        x, y = torch.randint(0, 11, (rows, 4), generator=g), torch.randint(0, 11, (rows,), generator=g)
        y[: rows // 3] = -100  # so that shards have unequal denominators
        out.append((x, y))
    return out


def plain_loop(
    run: RunSpec,
    data: Sequence[Sequence[tuple[Tensor, Tensor]]],
    net: Callable[[], nn.Module] = Net,
    loss: Callable[[Tensor, Tensor], tuple[Tensor, float]] | None = None,
) -> tuple[nn.Module, list[float]]:
    """One entry of `data` is one step; it may have several batches, whose samples count as one global batch."""

    def cross_entropy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        return functional.cross_entropy(outputs, targets, reduction="sum"), float((targets != -100).sum())

    torch.manual_seed(run.seed)
    model = net()
    if run.precision == "fp64":
        model.double()
    optimizer = getattr(torch.optim, run.optimizer.name)(model.parameters(), **run.optimizer.args)
    schedule = None
    if run.scheduler is not None:
        schedule = getattr(torch.optim.lr_scheduler, run.scheduler.name)(optimizer, **run.scheduler.args)
    losses = []
    for group in data:
        optimizer.zero_grad()
        pairs = [(loss or cross_entropy)(model(x), y) for x, y in group]
        mean = sum(value for value, _ in pairs) / sum(count for _, count in pairs)
        mean.backward()
        if run.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.max_grad_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(float(mean.detach()))
    return model, losses


def difference(a: nn.Module, b: nn.Module) -> float:
    return max(
        float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True) if p.numel()
    )


def check(run: RunSpec, replicas: Sequence[Replica], model: nn.Module, mine: list[float], losses: list[float]) -> None:
    assert len({r.parameter_hash() for r in replicas}) == 1
    if run.precision == "fp64":
        assert difference(replicas[0].model, model) <= 1e-9
        assert max(abs(a - b) for a, b in zip(mine, losses, strict=True)) <= 1e-9
    else:
        assert max(abs(a - b) for a, b in zip(mine, losses, strict=True)) <= 1e-5


SHARES = {
    "alone": lambda rows: [rows],
    "even": lambda rows: [rows // 2, rows - rows // 2],
    "unequal": lambda rows: [1, rows - 3, 2],
    "one empty": lambda rows: [rows - 4, 0, 4],
    "all but one empty": lambda rows: [0, rows, 0],
}


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize(
    "optimizer", [Factory("SGD", {"lr": 0.3, "momentum": 0.9}), Factory("AdamW", {"lr": 0.01, "weight_decay": 0.1})]
)
def test_any_shares_equal_the_whole_batch(precision: str, shares: str, optimizer: Factory) -> None:
    run = spec(precision=precision, optimizer=optimizer, bucket_bytes=300, seed=4)
    data = [[b] for b in batches(STEPS)]
    model, losses = plain_loop(run, data)
    replicas = [replica(Net, run) for _ in SHARES[shares](13)]
    mine = [star_step(replicas, i, group, SHARES[shares]) for i, group in enumerate(data)]
    check(run, replicas, model, mine, losses)
    unused = replicas[0].model.unused.weight
    assert unused not in replicas[0].optimizer.state and unused.grad is None


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("workers", [1, 3])
def test_clipping_at_half_the_norm_with_a_schedule_and_accumulation_with_a_tail(precision: str, workers: int) -> None:
    probe = replica(Net, spec(precision="fp64", seed=4))
    probe.run_shard(ShardWork(0, 0, [batches(1)[0]], 13, 13, [13]))
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in probe.model.parameters() if p.grad is not None]))
    run = spec(
        precision=precision,
        optimizer=Factory("AdamW", {"lr": 0.02}),
        scheduler=Factory("OneCycleLR", {"max_lr": 0.05, "total_steps": STEPS + 1}),
        max_grad_norm=norm / 2,
        bucket_bytes=200,
        seed=4,
    )
    flat = batches(STEPS * 3 - 2)
    flat[-1] = (flat[-1][0][:5], flat[-1][1][:5])
    data = [flat[i : i + 3] for i in range(0, len(flat), 3)]
    assert len(data) == STEPS and len(data[-1]) == 1
    model, losses = plain_loop(run, data)
    if workers == 1:
        replicas = [replica(Net, run)]
        mine = [solo_step(replicas[0], i, group) for i, group in enumerate(data)]
    else:
        replicas = [replica(Net, run) for _ in range(3)]
        mine = [star_step(replicas, i, group, lambda rows: [rows - 3, 1, 2]) for i, group in enumerate(data)]
    check(run, replicas, model, mine, losses)


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="mean")


def weighted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    weight = 1.0 + targets
    return (functional.cross_entropy(outputs, targets, reduction="none") * weight).sum(), weight.sum()


@pytest.mark.parametrize("kind", ["mean", "sum and count", "elementwise", "sum"])
def test_other_losses(kind: str) -> None:
    criterion, oracle = {
        "mean": (
            Factory("mean_loss"),
            lambda o, t: (functional.cross_entropy(o, t, reduction="sum"), float(len(t))),
        ),
        "sum and count": (Factory("weighted"), weighted),
        "elementwise": (
            Factory("MSELoss"),
            lambda o, t: (functional.mse_loss(o, t, reduction="sum"), float(t.numel())),
        ),
        "sum": (
            Factory("MSELoss", {"reduction": "sum"}),
            lambda o, t: (functional.mse_loss(o, t, reduction="sum"), 1.0),
        ),
    }[kind]
    run = spec(precision="fp64", criterion=criterion, optimizer=Factory("SGD", {"lr": 0.01}), seed=4)
    data = [[(x, y.clamp(min=0))] for x, y in batches(STEPS)]
    if "MSE" in criterion.name:
        data = [[(x, torch.randn(len(y), 11, dtype=torch.float64))] for ((x, y),) in data]
    model, losses = plain_loop(run, data, loss=oracle)
    replicas = [replica(Net, run, mean_loss=mean_loss, weighted=weighted) for _ in range(3)]
    mine = [star_step(replicas, i, group, lambda rows: [2, rows - 6, 4]) for i, group in enumerate(data)]
    check(run, replicas, model, mine, losses)


class Double(nn.Module):
    """Two forwards through batch statistics before one backward, in evaluation mode statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 5), nn.GroupNorm(1, 5), nn.Tanh())


def adversarial(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, noise = batch
    real, fake = model.body(x), model.body(noise)
    return (real - fake.detach()).pow(2).mean() + (fake - 1).pow(2).mean()


def test_a_step_with_two_forwards() -> None:
    g = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(9, 5, generator=g, dtype=torch.float64), torch.randn(9, 5, generator=g, dtype=torch.float64))
        for _ in range(STEPS)
    ]
    run = spec(criterion=None, step=Factory("adversarial"), precision="fp64", optimizer=Factory("Adam"), bucket_bytes=1)
    torch.manual_seed(0)
    model = Double().double()
    optimizer = torch.optim.Adam(model.parameters())
    for batch in data:
        optimizer.zero_grad()
        adversarial(model, batch).backward()
        optimizer.step()
    replicas = [replica(Double, run, adversarial=adversarial) for _ in range(2)]
    for i, batch in enumerate(data):
        star_step(replicas, i, [batch], lambda rows: [rows - 2, 2])
    assert difference(replicas[0].model, model) <= 1e-9


def test_more_shards_than_workers_and_a_shard_done_again_elsewhere_change_nothing() -> None:
    """Three shards, three workers; then the same with worker 2 lost: its shard goes to worker 0."""
    run = spec(optimizer=Factory("Adam"), bucket_bytes=64)

    def train(owners: Sequence[int]) -> str:
        replicas = [replica(Net, run) for _ in range(3)]
        for i, (x, y) in enumerate(batches(10)):
            contributions, results = [], []
            for shard, (a, b) in enumerate([(0, 5), (5, 9), (9, 13)]):
                contributions.append(Contribution(b - a))
                owner = replicas[owners[shard]]
                results.append(owner.run_shard(ShardWork(i, shard, [(x[a:b], y[a:b])], b - a, 13), contributions[-1]))
            means = sum_shards(contributions)
            for target in replicas:
                target.apply(cloned(means), commit_of(results))
        assert len({r.parameter_hash() for r in replicas}) == 1
        return replicas[0].parameter_hash()

    assert train([0, 1, 2]) == train([0, 1, 0]) == train([1, 1, 1])


def test_the_orchestrator_may_hold_the_optimizer() -> None:
    run = spec(
        optimizer=Factory("Adam", {"lr": 0.02}), optimizer_site="orchestrator", precision="fp64", bucket_bytes=300
    )
    data = batches(STEPS)
    model, _ = plain_loop(run, [[b] for b in data])
    hub, workers = replica(Net, run), [replica(Net, run) for _ in range(2)]
    for i, (x, y) in enumerate(data):
        contributions, results = [], []
        for shard, (worker, (a, b)) in enumerate(zip(workers, [(0, 5), (5, 13)], strict=True)):
            contributions.append(Contribution(b - a))
            results.append(worker.run_shard(ShardWork(i, shard, [(x[a:b], y[a:b])], b - a, 13), contributions[-1]))
        means = sum_shards(contributions)
        buffers = cloned({BUFFERS: means[BUFFERS]})  # of the parameter without gradient
        hub.apply(means, commit_of(results))
        for worker in workers:
            values = {number: (present, flat) for number, present, flat in hub.parameter_buckets()}
            worker.take_parameters({**values, **cloned(buffers)})
    assert {hub.parameter_hash()} == {w.parameter_hash() for w in workers}
    assert difference(hub.model, model) <= 1e-9 and not workers[0].optimizer.state


class Everything(nn.Module):
    """Batch statistics and dropout: all that has hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.ReLU(), nn.Linear(8, 11))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.float())


@pytest.mark.parametrize("solo", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad", "RMSprop"])
def test_twenty_steps_are_ten_and_ten_more_after_a_resume(solo: bool, precision: str, optimizer: str) -> None:
    args = {"lr": 0.01, "momentum": 0.9} if optimizer in ("SGD", "RMSprop") else {"lr": 0.01}
    run = spec(
        precision=precision,
        optimizer=Factory(optimizer, args),
        scheduler=Factory("MultiStepLR", {"milestones": [4, 12, 15], "gamma": 0.5}),
        max_grad_norm=1.0,
        seed=8,
    )
    data = batches(20)

    def train(replicas: Sequence[Replica], steps: range) -> list[float]:
        if solo:
            return [solo_step(replicas[0], i, [data[i]]) for i in steps]
        return [star_step(replicas, i, [data[i]], lambda rows: [rows - 5, 5], precision == "fp16") for i in steps]

    def fresh() -> list[Replica]:
        return [replica(Everything, run) for _ in range(1 if solo else 2)]

    whole = fresh()
    losses = train(whole, range(20))
    first = fresh()
    half = train(first, range(10))
    file = io.BytesIO()
    torch.save(first[0].state(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    second = fresh()
    for target in second:
        target.load_state(state)
    half += train(second, range(10, 20))
    assert half == losses
    assert second[0].parameter_hash() == whole[0].parameter_hash()
    mine, theirs = second[0].state(), whole[0].state()
    assert all(torch.equal(mine["model"][name], value) for name, value in theirs["model"].items())
    assert mine["scheduler"] == theirs["scheduler"] and mine["scaler"] == theirs["scaler"]


def test_dropout_repeats_from_the_seed_for_the_same_shares() -> None:
    def train(seed: int) -> str:
        replicas = [replica(Everything, spec(seed=seed)) for _ in range(2)]
        for i, batch in enumerate(batches(10)):
            star_step(replicas, i, [batch], lambda rows: [7, rows - 7])
        return replicas[0].parameter_hash()

    assert train(1) == train(1) != train(2)


def test_one_worker_with_batch_statistics_equals_the_plain_loop() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 11))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x.double())

    run = spec(precision="fp64", seed=2)
    data = [[b] for b in batches(STEPS)]
    model, losses = plain_loop(run, data, net=Norm)
    for exchange in (False, True):
        mine = replica(Norm, run)
        for i, group in enumerate(data):
            star_step([mine], i, group, lambda rows: [rows]) if exchange else solo_step(mine, i, group)
        assert difference(mine.model, model) <= 1e-9
        for name, buffer in model.named_buffers():
            assert torch.allclose(dict(mine.model.named_buffers())[name], buffer, rtol=0, atol=1e-9)


def test_bf16_follows_autocast() -> None:
    run = spec(precision="bf16", seed=3)
    data = batches(20)
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    alone, pair = replica(Net, run), [replica(Net, run) for _ in range(2)]
    mine = [solo_step(alone, i, [b]) for i, b in enumerate(data)]
    theirs = [star_step(pair, i, [b], lambda rows: [6, rows - 6]) for i, b in enumerate(data)]
    assert max(abs(a - b) for a, b in zip(mine, losses, strict=True)) < 2e-2
    assert max(abs(a - b) for a, b in zip(theirs, losses, strict=True)) < 2e-2
    assert all(p.dtype == torch.float32 for p in alone.model.parameters())


class Spiky(Net):
    """Makes an Inf in the gradients of one worker in step 3."""

    spike = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.spike:
            y.register_hook(lambda grad: grad * float("inf"))
        return y


def test_an_overflow_on_one_worker_skips_the_step_everywhere_and_halves_the_scale() -> None:
    run = spec(precision="fp16", seed=3, scheduler=Factory("StepLR", {"step_size": 1, "gamma": 0.9}))
    replicas = [replica(Spiky, run) for _ in range(3)]
    scales = []
    for i, batch in enumerate(batches(6)):
        replicas[1].model.spike = i == 3
        before = replicas[0].parameter_hash(), replicas[0].learning_rate
        star_step(replicas, i, [batch], lambda rows: [5, 4, rows - 9], scaled=True)
        assert ((replicas[0].parameter_hash(), replicas[0].learning_rate) == before) == (i == 3)
        assert len({r.parameter_hash() for r in replicas}) == 1
        scales.append({r.loss_scale for r in replicas})
    assert scales == [{65536.0}] * 3 + [{32768.0}] * 3
    assert replicas[2].learning_rate == pytest.approx(0.1 * 0.9**5)


def test_a_lone_fp16_worker_finds_its_own_overflow() -> None:
    made = replica(Spiky, spec(precision="fp16"))
    made.model.spike = True
    x, y = batches(1)[0]
    result = made.run_shard(ShardWork(0, 0, [(x, y)], 13, 13))
    assert not result.finite and result.nonfinite
    before = made.parameter_hash()
    made.apply(None, Commit(1.0, skip=True))
    assert made.parameter_hash() == before and made.loss_scale == 32768.0


def test_half_precision_parameters_are_summed_in_float32() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(4, dtype=torch.float16))

    def push(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
        return (model.w * batch).sum(), 1.0

    run = spec(criterion=None, step=Factory("push"), optimizer=Factory("SGD", {"lr": 1e-3}))
    replicas = [replica(Half, run, push=push) for _ in range(8)]
    contributions, results = [], []
    for shard, target in enumerate(replicas):
        contributions.append(Contribution(1))
        data = torch.full((1, 4), 2e4, dtype=torch.float16)
        results.append(target.run_shard(ShardWork(0, shard, [data], 1, 1), contributions[-1]))
    means = sum_shards(contributions)
    assert means[0][1].dtype == torch.float32 and all_finite(means) and BUFFERS not in means
    assert means[0][1].tolist() == [1.6e5] * 4
    replicas[0].apply(means, Commit(1 / 8, False))
    assert torch.allclose(replicas[0].model.w, torch.full((4,), -20.0, dtype=torch.float16), rtol=1e-3)
