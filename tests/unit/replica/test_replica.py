from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from guava_nb.data.sample_count import count_rows
from guava_nb.errors import CheckpointError, ConfigError, LocalProtocolError, PreparationError, TrainingError
from guava_nb.protocol.messages import Commit, Factory
from guava_nb.replica.buckets import BUFFERS, present_at
from guava_nb.replica.model.wrappers import is_compiled
from guava_nb.replica.preprocess import place
from guava_nb.replica.replica import Replica
from guava_nb.replica.rng import seeded, shard_seed
from guava_nb.replica.shard import ShardWork
from tests.support.star import CPU, Contribution, all_finite, cloned, commit_of, replica, resolver, spec, sum_shards


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def batch(rows: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, generator=g), torch.randint(0, 3, (rows,), generator=g)


def work(data: object, rows: int = 6, step: int = 0, shard: int = 0, global_rows: int | None = None) -> ShardWork:
    return ShardWork(step, shard, [data], rows, global_rows or rows)


def step(target: Replica, data: object, number: int = 0, rows: int = 6) -> Contribution:
    contribution = Contribution(rows)
    result = target.run_shard(work(data, rows, number), contribution)
    target.apply(cloned(sum_shards([contribution])), commit_of([result]))
    return contribution


# -------------------------------------------------------------------------------------------------------- building


def test_the_model_is_that_of_the_seed_and_the_process_keeps_its_random_numbers() -> None:
    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)
    drawn = torch.rand(2), np.random.rand(), random.random()
    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)
    made = replica(Net, spec(seed=5))
    assert torch.equal(torch.rand(2), drawn[0]) and (np.random.rand(), random.random()) == drawn[1:]
    torch.manual_seed(5)
    plain = Net()
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), plain.parameters(), strict=True))


def test_a_given_model_is_trained_in_place() -> None:
    model = Net()
    before = model.last.weight.detach().clone()
    made = Replica(spec(model=None), resolver(), CPU, model)
    step(made, batch())
    assert made.model is model and not torch.equal(model.last.weight, before)
    made.close()
    assert not model.last.weight._post_accumulate_grad_hooks


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"sync_batchnorm": True}, ConfigError, "process group"),
        ({"precision": "int8"}, ConfigError, "choose one of fp32, bf16, fp16, fp64"),
        ({"optimizer_site": "hub"}, ConfigError, "workers"),
        ({"max_grad_norm": 0.0}, ConfigError, "positive"),
        ({"model": None}, ConfigError, "no model"),
        ({"model": Factory("Nett")}, ConfigError, "'Nett' cannot be found"),
        ({"model": Factory("Net", {"wide": 1})}, ConfigError, "does not take 'wide'.*it takes: width"),
        ({"model": Factory("Net", {"width": -1})}, PreparationError, "'Net' raised"),
        ({"model": Factory("dict")}, ConfigError, "returned a dict"),
        ({"model": Factory("made")}, ConfigError, "a model already"),
        ({"scheduler": Factory("odd")}, ConfigError, "cannot be saved"),
    ],
)
def test_what_cannot_work_is_refused_at_once(changes: dict, error: type[Exception], says: str) -> None:
    class Odd(torch.optim.lr_scheduler.StepLR):
        def state_dict(self) -> dict:
            return {"x": {1, 2}}

    odd = lambda optimizer: Odd(optimizer, 1)  # noqa: E731
    with pytest.raises(error, match=says):
        Replica(spec(**changes), resolver(Net=Net, dict=dict, made=nn.ReLU(), odd=odd), CPU)


# ---------------------------------------------------------------------------------------------------- handing over


class Recorder(torch.autograd.Function):
    """Notes when backward passes it."""

    @staticmethod
    def forward(ctx, x, log, name):
        ctx.log, ctx.name = log, name
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(ctx.name)
        return grad, None, None


def test_buckets_leave_in_reverse_order_while_backward_runs() -> None:
    log: list[object] = []

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for i, layer in enumerate(self.layers):
                x = layer(Recorder.apply(x, log, f"before {i}"))
            return x

    made = replica(Deep, spec(bucket_bytes=80, criterion=Factory("MSELoss")))
    data = (torch.randn(3, 4, requires_grad=True), torch.randn(3, 4))
    made.run_shard(work(data, 3), lambda *_: log.append("counted"))
    assert log == ["before 3", "before 2", "before 1", "before 0"] + ["counted"] * 4
    made.restore()
    log.clear()
    made.run_shard(work(data, 3), lambda bucket, *_: log.append(bucket))
    # The input of a layer may be differentiated before or after its weights, but not before the layer above it.
    assert [entry for entry in log if isinstance(entry, int)] == [0, 1, 2, 3]
    assert log.index(0) < log.index("before 2") and log.index(2) < log.index("before 0")


def test_handed_over_memory_stays_until_the_step_is_over() -> None:
    made = replica(Net, spec())
    kept = []
    for shard in range(3):
        made.run_shard(
            work(batch(seed=shard), shard=shard, global_rows=18), lambda i, p, t: kept.append((t, t.clone()))
        )
    assert len({t.data_ptr() for t, _ in kept}) == 3
    assert all(torch.equal(t, copy) for t, copy in kept)
    made.restore()
    reused = []
    made.run_shard(work(batch()), lambda i, p, t: reused.append(t.data_ptr()))
    assert set(reused) <= {t.data_ptr() for t, _ in kept}


def test_the_same_shards_give_the_same_bits() -> None:
    class Drop(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.dropout(x, 0.5) + torch.tensor(np.random.rand()) + random.random())

    def run(prelude: int) -> list[Tensor]:
        torch.rand(prelude)
        np.random.rand(prelude)
        made = replica(Drop, spec(seed=3))
        handed = [step(made, batch(seed=i), i).buckets[0][1] for i in range(3)]
        return [*handed, *[p.detach().clone() for p in made.model.parameters()]]

    assert all(torch.equal(a, b) for a, b in zip(run(1), run(1000), strict=True))


def test_seeds_differ_by_seed_step_and_shard_and_fit_any_generator() -> None:
    seeds = {shard_seed(a, b, c) for a in range(5) for b in range(5) for c in range(5)} | {shard_seed(1, 11, 1)}
    assert len(seeds) == 126 and all(0 <= s < 1 << 63 for s in seeds)
    state = torch.get_rng_state()
    with seeded(2**63 - 1, CPU):
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_unused_parameters_are_absent_and_stay_without_gradient() -> None:
    class Branch(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(3, 3)

    made = replica(Branch, spec(optimizer=Factory("SGD", {"lr": 0.1, "weight_decay": 0.5})))
    before = made.model.unused.weight.detach().clone()
    for number in range(3):
        contribution = step(made, batch(), number)
        present, flat = contribution.buckets[0]
        bits = dict(zip(made.layout.buckets[0].names, present_at(present, 6), strict=True))
        assert bits == {
            "unused.bias": False,
            "unused.weight": False,
            "last.bias": True,
            "last.weight": True,
            "first.bias": True,
            "first.weight": True,
        }
        assert not flat[:12].any()
    assert torch.equal(made.model.unused.weight, before)


def test_a_shard_without_rows_hands_over_empty_buckets() -> None:
    class Norm(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

    made = replica(Norm, spec())
    for parts in ([], [batch(0)]):
        contribution = Contribution(0)
        result = made.run_shard(ShardWork(0, 1, parts, 0, 8), contribution)
        assert (result.loss_sum, result.count, result.rows, result.finite) == (0.0, 0.0, 0, True)
        assert contribution.buckets[0][0] == b"\0" and not contribution.buckets[0][1].any()
        assert contribution.buckets[BUFFERS][1].numel() == 0
        made.restore()


def test_a_parameter_frozen_during_the_run_is_absent() -> None:
    made = replica(Net, spec())
    step(made, batch())
    made.model.first.requires_grad_(False)
    contribution = step(made, batch(), 1)
    assert present_at(contribution.buckets[0][0], 4) == [True, True, False, False]
    made.model.first.requires_grad_(True)
    assert present_at(step(made, batch(), 2).buckets[0][0], 4) == [True] * 4


def test_a_parameter_unfrozen_before_a_run_takes_part() -> None:
    model = Net()
    model.first.requires_grad_(False)
    run = spec(model=None)
    first = Replica(run, resolver(), CPU, model)
    assert first.layout.buckets[0].names == ("last.bias", "last.weight")
    step(first, batch())
    first.close()
    model.first.requires_grad_(True)
    second = Replica(run, resolver(), CPU, model)
    before = model.first.weight.detach().clone()
    step(second, batch())
    assert not torch.equal(before, model.first.weight)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_the_same_block_twice_gives_the_bits_of_plain_backward(reentrant: bool) -> None:
    class Checked(nn.Module):
        def __init__(self, use: bool = True) -> None:
            super().__init__()
            self.use = use
            self.block = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Tanh())
            self.head = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(self.block, x, use_reentrant=reentrant) if self.use else self.block(x)
            return self.head(self.block[0](x))

    def run(use: bool) -> list[Tensor]:
        made = replica(Checked, spec(model=Factory("Net", {"use": use}), bucket_bytes=64))
        handed = []
        for number in range(4):
            data, labels = batch(seed=number)
            handed += [t for _, t in step(made, (data.requires_grad_(), labels), number).buckets.values()]
        return handed

    for mine, theirs in zip(run(True), run(False), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-7) if reentrant else torch.equal(mine, theirs)


def test_a_gradient_that_grows_after_it_left_is_an_error_and_the_next_try_is_right() -> None:
    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice = False
            self.block = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            inner = checkpoint(self.block, x, use_reentrant=True) if self.twice else x
            return self.block(inner)

    made = replica(Switched, spec(criterion=Factory("MSELoss")))
    data = (torch.randn(4, 3, requires_grad=True), torch.randn(4, 3))
    step(made, data, 0, rows=4)
    made.model.twice = True
    with pytest.raises(TrainingError, match=r"'block\.(weight|bias)' changed after it had been handed over"):
        made.run_shard(work(data, 4, 1), Contribution(4))
    made.restore()
    contribution = Contribution(4)
    made.run_shard(work(data, 4, 1), contribution)
    made.restore()
    (((made.model(data[0]) - data[1]) ** 2).sum() / 4).backward()
    assert torch.allclose(contribution.buckets[0][1][3:].view(3, 3), made.model.block.weight.grad)


def test_a_compiled_replica_trains_as_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_compile = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: plain_compile(module, backend="eager"))
    mine = replica(Net, spec(precision="fp64", compile=True))
    plain = replica(Net, spec(precision="fp64"))
    assert is_compiled(mine.model) and not is_compiled(plain.model)
    for number in range(3):
        for one in (mine, plain):
            step(one, batch(seed=number), number)
    assert list(mine.model.state_dict()) == list(plain.model.state_dict())
    for value, wanted in zip(mine.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(value, wanted, rtol=0, atol=1e-12)


class Noisy(torch.optim.SGD):
    """Draws noise in its step, as Langevin dynamics do."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn_like(parameter), alpha=0.01)


def test_an_optimizer_that_draws_draws_the_same_on_every_worker() -> None:
    made = [replica(Net, spec(optimizer=Factory("Noisy", {"lr": 0.1})), Noisy=Noisy) for _ in range(2)]
    for number, (one, before) in enumerate(zip(made, (3, 4), strict=True)):
        torch.manual_seed(before)  # what was drawn before must not matter
        one.run_shard(work(batch(seed=1), shard=0))
        one.apply(None, Commit(1.0, False), step=7)
        assert number == 0 or one.parameter_hash() == made[0].parameter_hash()
    made[0].run_shard(work(batch(seed=1)))
    made[1].run_shard(work(batch(seed=1)))
    made[0].apply(None, Commit(1.0, False), step=8)
    made[1].apply(None, Commit(1.0, False), step=9)
    assert made[0].parameter_hash() != made[1].parameter_hash()


def test_channels_last_is_asked_for_by_an_option() -> None:
    made = replica(lambda: nn.Sequential(nn.Conv2d(4, 3, 2), nn.Flatten()), spec(channels_last=True))
    assert made.model[0].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index, union-attr]


def test_sparse_and_channels_last_gradients_arrive_by_value() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4, sparse=True)
            self.conv = nn.Conv2d(4, 3, 2).to(memory_format=torch.channels_last)
            self.scale = nn.Parameter(torch.ones(()))
            self.empty = nn.Parameter(torch.ones(0, 3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(self.embed(x).permute(0, 3, 1, 2)) * self.scale
            return y.mean((2, 3)) + self.empty.sum()

    made = replica(Odd, spec())
    data = (torch.randint(0, 7, (4, 3, 3)), torch.randint(0, 3, (4,)))
    contribution = Contribution(4)
    made.run_shard(work(data, 4), contribution)
    made.restore()
    (nn.functional.cross_entropy(made.model(data[0]), data[1], reduction="sum") / 4).backward()
    views = dict(
        zip(made.layout.buckets[0].names, made.layout.buckets[0].views(contribution.buckets[0][1]), strict=True)
    )
    for name, parameter in made.model.named_parameters():
        gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        assert torch.equal(views[name], gradient), name


def test_a_lone_worker_with_sparse_and_mixed_gradients_steps_as_torch_does() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4, sparse=True)
            self.head = nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x).mean(1).double())

    made = replica(Mixed, spec())
    torch.manual_seed(0)
    model = Mixed()
    x, y = torch.randint(0, 7, (4, 3)), torch.randint(0, 3, (4,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (nn.functional.cross_entropy(model(x), y, reduction="sum") * 0.25).backward()
    optimizer.step()
    result = made.run_shard(work((x, y), 4))
    made.apply(None, commit_of([result]))
    assert result.finite
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), model.parameters(), strict=True))


def test_an_exception_in_user_code_leaves_the_committed_state() -> None:
    class Moody(Net):
        fail = False

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.fail:
                y.register_hook(lambda grad: 1 / 0)
            return y

    made = replica(Moody, spec())
    step(made, batch())
    before = made.parameter_hash()
    made.model.fail = True
    with pytest.raises(ZeroDivisionError):
        made.run_shard(work(batch(), step=1), Contribution(6))
    assert all(p.grad is None for p in made.model.parameters())
    made.restore()
    made.model.fail = False
    assert made.parameter_hash() == before
    step(made, batch(), 1)


def test_an_exception_of_the_receiver_comes_out() -> None:
    made = replica(Net, spec())
    step(made, batch())

    def broken(*_: object) -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        made.run_shard(work(batch(), step=1), broken)


def test_a_loss_without_graph_is_explained() -> None:
    made = replica(Net, spec(criterion=Factory("f")), f=lambda o, t: o.detach().mean())
    with pytest.raises(TrainingError, match="no trainable parameter"):
        made.run_shard(work(batch()))


def test_forward_and_backward_are_timed() -> None:
    class Slow(Net):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.02)
            return super().forward(x)

    result = replica(Slow, spec()).run_shard(work(batch()))
    assert 0.02 <= result.forward_s < 5 and 0 < result.backward_s < 5


# ------------------------------------------------------------------------------------------------ commit and abort


def test_not_finite_is_told_and_nothing_is_applied_on_skip() -> None:
    made = replica(Net, spec(), f=None)
    data = batch()
    data[0][2, 1] = float("nan")
    before = made.parameter_hash()
    contribution = Contribution(6)
    result = made.run_shard(work(data), contribution)
    assert not result.finite and not all_finite(contribution.buckets)
    assert "last.weight" in made.layout.buckets[0].not_finite(contribution.buckets[0][1], b"")
    made.apply(None, Commit(1.0, skip=True))
    assert made.parameter_hash() == before and made.state()["scaler"] is None


def test_a_lone_worker_checks_its_own_gradients() -> None:
    class Root(Net):
        def forward(self, x: Tensor) -> Tensor:
            # The value is 0, the derivative infinite.
            return super().forward(x) + torch.sqrt((self.first.bias * 0).clamp(min=0)).sum()

    result = replica(Root, spec()).run_shard(work(batch()))
    assert result.nonfinite == "first.bias" and not result.finite
    huge = replica(Net, spec(criterion=Factory("f")), f=lambda o, t: o.sum() * 1e30)
    result = huge.run_shard(work(batch()))
    assert result.finite and result.nonfinite == ""  # squares overflow, values do not


def test_a_missing_or_foreign_mean_is_our_bug_and_says_so() -> None:
    made = replica(Net, spec())
    with pytest.raises(LocalProtocolError, match="bucket 0 is missing"):
        made.apply({}, Commit(1.0, False))
    with pytest.raises(LocalProtocolError, match="elements, 3 came"):
        made.apply({0: (b"\x0f", torch.zeros(3))}, Commit(1.0, False))


def test_no_copy_is_made_of_the_means() -> None:
    made = replica(Net, spec())
    seen = []
    hook = made.optimizer.register_step_pre_hook(lambda opt, *_: seen.extend(p.grad for p in made.model.parameters()))
    flat = torch.ones(made.layout.buckets[0].numel)
    made.apply({0: (b"\x0f", flat)}, Commit(1.0, False))
    hook.remove()
    low, high = flat.data_ptr(), flat.data_ptr() + flat.numel() * 4
    assert len(seen) == 4 and all(low <= g.data_ptr() < high for g in seen)
    assert all(p.grad is None for p in made.model.parameters())


# ---------------------------------------------------------------------------------------------------------- buffers


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("mask", torch.full((64, 64), float("-inf")))
        self.register_buffer("positions", torch.arange(1000))
        self.register_buffer("average", torch.zeros(5), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int32))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.data.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
            self.seen += 1
        return self.last(self.norm(x))


def test_only_buffers_that_move_travel_and_every_shard_starts_from_the_committed_ones() -> None:
    made = replica(Normed, spec())
    data = batch()
    handed = []
    for shard in range(2):
        contribution = Contribution(6)
        made.run_shard(work(data, shard=shard, global_rows=12), contribution)
        handed.append(contribution.buckets[BUFFERS])
    assert handed[0][0] == handed[1][0] and torch.equal(handed[0][1], handed[1][1])
    names = [n for n, bit in zip(made.layout.buffers.names, present_at(handed[0][0], 7), strict=True) if bit]
    assert names == ["average", "seen", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert handed[0][1].numel() == 5 + 1 + 5 + 5 + 1
    made.restore()
    assert int(made.model.norm.num_batches_tracked) == 0 and not made.model.average.any()


def test_buffers_are_equal_everywhere_after_a_commit() -> None:
    replicas = [replica(Normed, spec()) for _ in range(3)]
    for number in range(3):
        contributions, results = [], []
        for shard, (target, rows) in enumerate(zip(replicas[:2], (4, 2), strict=True)):
            contributions.append(Contribution(rows))
            results.append(target.run_shard(work(batch(rows, shard), rows, number, shard, 6), contributions[-1]))
        means = sum_shards(contributions)
        for target in replicas:  # the third had no shard
            target.apply(cloned(means), commit_of(results))
    first, *others = (dict(r.model.named_buffers()) for r in replicas)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    assert int(first["norm.num_batches_tracked"]) == 3 and int(first["seen"]) == 3
    alone = nn.BatchNorm1d(5)
    for _ in range(3):
        means_of = []
        for shard, rows in enumerate((4, 2)):
            probe = nn.BatchNorm1d(5)
            probe.load_state_dict(alone.state_dict())
            probe(batch(rows, shard)[0])
            means_of.append((probe.running_mean * rows / 6, probe.running_var * rows / 6))
        alone.running_mean.copy_(means_of[0][0] + means_of[1][0])
        alone.running_var.copy_(means_of[0][1] + means_of[1][1])
    assert torch.allclose(first["norm.running_mean"], alone.running_mean, atol=1e-6)
    assert torch.allclose(first["norm.running_var"], alone.running_var, atol=1e-6)


def test_a_lone_worker_keeps_its_buffers_on_commit_and_drops_them_on_abort() -> None:
    made = replica(Normed, spec())
    made.run_shard(work(batch()))
    assert made.state()["model"]["norm.num_batches_tracked"] == 0
    made.apply(None, Commit(1.0, False))
    assert made.state()["model"]["norm.num_batches_tracked"] == 1
    mean = made.model.norm.running_mean.clone()
    made.run_shard(work(batch(seed=1), step=1))
    made.restore()
    assert torch.equal(made.model.norm.running_mean, mean) and int(made.model.seen) == 1


def test_state_carries_moving_buffers_that_are_not_persistent() -> None:
    made = replica(Normed, spec())
    step(made, batch())
    other = replica(Normed, spec(seed=9))
    other.load_state(made.state())
    assert torch.equal(other.model.average, made.model.average) and other.model.average.any()
    assert set(made.state()["buffers"]) == {"average"}


def test_foreign_buffers_are_refused() -> None:
    made = replica(Normed, spec())
    with pytest.raises(LocalProtocolError, match="average have 5 elements, 4 came"):
        made._buffers.adopt(bytes([0b100]), torch.zeros(4))


# ------------------------------------------------------------------------------------------------------- evaluation


def test_evaluation_measures_in_evaluation_mode_and_leaves_no_trace() -> None:
    class Frozen(Normed):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.norm.eval()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.drop(x))

    made = replica(Frozen, spec())
    data = batch()
    before = {k: v.clone() for k, v in made.model.state_dict().items()}
    sums = made.evaluate(data)
    expected = made.model.last(made.model.norm(data[0])).detach()
    assert sums.loss_sum == pytest.approx(float(nn.functional.cross_entropy(expected, data[1], reduction="sum")))
    assert (sums.count, sums.rows, sums.correct) == (6.0, 6, int((expected.argmax(1) == data[1]).sum()))
    assert all(torch.equal(v, before[k]) for k, v in made.model.state_dict().items())
    assert made.model.training and made.model.drop.training and not made.model.norm.training


def test_a_model_left_in_evaluation_mode_is_trained_in_training_mode() -> None:
    model = Normed().eval()
    made = Replica(spec(model=None), resolver(), CPU, model)
    made.run_shard(work(batch()))
    assert model.training and int(model.norm.num_batches_tracked) == 1


# ------------------------------------------------------------------------------------------------------------ state


def test_a_foreign_state_is_refused_by_name() -> None:
    state = replica(Net, spec(optimizer=Factory("Adam"))).state()
    with pytest.raises(CheckpointError, match=r"first.weight has shape \(8, 5\), the model has \(4, 5\)"):
        replica(Net, spec(model=Factory("Net", {"width": 4}))).load_state(state)
    with pytest.raises(CheckpointError, match="mask is missing; .* and 8 more"):
        replica(Normed, spec()).load_state(state)
    other = replica(Net, spec(optimizer=Factory("two")), two=two_groups)
    with pytest.raises(CheckpointError, match="optimizer state does not fit"):
        other.load_state(state)


def two_groups(named: list) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p for _, p in named[:1]]}, {"params": [p for _, p in named[1:]]}], lr=0.1)


def test_parts_of_a_state_and_its_independence() -> None:
    made = replica(Net, spec(optimizer=Factory("Adam")))
    step(made, batch())
    assert set(made.state(optimizer=False)) == {"model", "buffers"}
    state = made.state()
    assert set(state) == {"model", "buffers", "optimizer", "scheduler", "scaler"}
    first, second = replica(Net, spec(optimizer=Factory("Adam"))), replica(Net, spec(optimizer=Factory("Adam")))
    first.load_state(state)
    second.load_state(state)
    for number in range(1, 3):
        step(first, batch(), number)
    step(second, batch(), 1)
    step(made, batch(), 1)
    assert made.parameter_hash() == second.parameter_hash() != first.parameter_hash()


def test_parameters_travel_in_buckets() -> None:
    source, target = replica(Normed, spec(seed=1, bucket_bytes=8)), replica(Normed, spec(seed=2, bucket_bytes=8))
    contribution = Contribution(6)
    target.run_shard(work(batch()), contribution)
    buckets = {number: (present, flat) for number, present, flat in source.parameter_buckets()}
    with pytest.raises(LocalProtocolError, match="is missing"):
        target.take_parameters({0: buckets[0]})
    target.take_parameters({**buckets, BUFFERS: contribution.buckets[BUFFERS]})
    assert source.parameter_hash() == target.parameter_hash()
    assert int(target.model.norm.num_batches_tracked) == 1


# ---------------------------------------------------------------------------------------------------------- batches


def test_batches_are_placed_without_copies_and_counted() -> None:
    from collections import OrderedDict, namedtuple
    from dataclasses import dataclass, field

    @dataclass(frozen=True)
    class Item:
        x: Tensor
        n: list = field(default_factory=list)

    pair = namedtuple("pair", "a b")
    data = {
        "x": torch.ones(3, dtype=torch.float32),
        "m": [pair(torch.ones(3, 2), None)],
        "i": Item(torch.ones(3)),
        "s": "t",
    }
    assert place(data, CPU) is data
    double = place(data, CPU, double=True)
    assert double["x"].dtype == double["m"][0].a.dtype == double["i"].x.dtype == torch.float64
    assert type(double["m"][0]) is pair and type(double["i"]) is Item and double["s"] == "t"
    odd = OrderedDict(b=torch.ones(2), a=torch.tensor([1]))
    assert type(place(odd, CPU, double=True)) is OrderedDict and odd["b"].dtype == torch.float32
    assert place(odd, CPU, double=True)["a"].dtype == torch.int64
    assert count_rows({"s": "abc", "k": [np.zeros((4, 2))]}) == 4 and count_rows(("a", 1)) is None
    assert count_rows(torch.tensor(3)) is None and count_rows(Item(torch.ones(5))) == 5


def test_rows_that_cannot_be_counted_are_asked_for() -> None:
    made = replica(Net, spec(criterion=None, step=Factory("s")), s=lambda m, b: m(torch.ones(2, 5)).mean())
    assert made.run_shard(ShardWork(0, 0, ["ab", "c"], 3, 3, [2, 1])).count == 3
    with pytest.raises(ConfigError, match="cannot count the samples"):
        made.run_shard(ShardWork(0, 0, ["ab", "c"], 3, 3))


def test_a_position_that_workers_add_up_is_named_beside_an_error() -> None:
    class Queue(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.pointer[0] = (self.pointer[0] + len(x)) % 12
            return super().forward(x)

    made = replica(Queue, spec())
    assert made.notes_on_error(is_shared=True) == []
    step(made, batch())
    (note,) = made.notes_on_error(is_shared=True)
    assert "pointer (now [6])" in note and "buffers='pointer=first'" in note
    assert made.notes_on_error(is_shared=False) == []
