"""The replica on CUDA: gradients cross to the host while the device still computes, and must arrive whole."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from guava_nb.protocol.messages import Factory
from guava_nb.replica.shard import ShardWork
from tests.support.star import Contribution, replica, solo_step, spec, star_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")


def cuda() -> torch.device:
    return torch.device("cuda", 0)


class Deep(nn.Module):
    """`layers` blocks of width `width`; with `own_stream`, every second block computes on a stream of its own."""

    def __init__(self, width: int = 64, layers: int = 6, own_stream: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(width, 10)
        self.own_stream = own_stream

    def forward(self, x: Tensor) -> Tensor:
        side = torch.cuda.Stream() if self.own_stream else None
        for i, layer in enumerate(self.body):
            if side is None or i % 2:
                x = torch.relu(layer(x))
                continue
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x = torch.relu(layer(x))
            torch.cuda.current_stream().wait_stream(side)
        return self.head(self.drop(self.norm(x)))


def batches(count: int, rows: int = 48, width: int = 64) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(rows, width, generator=g), torch.randint(0, 10, (rows,), generator=g)) for _ in range(count)]


@pytest.mark.parametrize("own_stream", [False, True])
def test_float64_equals_the_plain_loop(own_stream: bool) -> None:
    run = spec(
        model=Factory("Net", {"own_stream": own_stream}),
        precision="fp64",
        optimizer=Factory("AdamW", {"lr": 0.01}),
        bucket_bytes=40_000,
        seed=2,
    )
    data = batches(50)
    torch.manual_seed(2)
    model = Deep().double().to(cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(cuda()).double()), y.to(cuda())).backward()
        optimizer.step()
    for exchange in (True, False):
        mine = replica(Deep, run, cuda())
        for i, batch in enumerate(data):
            star_step([mine], i, [batch], lambda rows: [rows]) if exchange else solo_step(mine, i, [batch])
        pairs = zip(mine.model.state_dict().values(), model.state_dict().values(), strict=True)
        assert max(float((a - b).abs().max()) for a, b in pairs) <= 1e-9


def test_handed_over_gradients_are_whole_under_load() -> None:
    """Wide layers keep the device far behind the host, and memory is given back as soon as a bucket is on its way."""
    run = spec(model=Factory("Net", {"width": 1024, "layers": 12}), bucket_bytes=1 << 20)
    made = replica(Deep, run, cuda())
    [(x, y)] = batches(1, 2048, 1024)
    for step in range(6):
        contribution = Contribution(2048)
        made.run_shard(ShardWork(step, 0, [(x, y)], 2048, 2048), contribution)
        made.restore()
        loss = nn.functional.cross_entropy(made.model(x.to(cuda())), y.to(cuda()), reduction="sum")
        (loss / 2048).backward()
        named = dict(made.model.named_parameters())
        for bucket in made.layout.buckets:
            for name, view in zip(bucket.names, bucket.views(contribution.buckets[bucket.index][1]), strict=True):
                assert torch.allclose(view, named[name].grad.cpu(), rtol=1e-4, atol=1e-6), (step, name)
        made.restore()


def test_buckets_leave_while_the_device_still_computes() -> None:
    made = replica(Deep, spec(model=Factory("Net", {"width": 4096, "layers": 24}), bucket_bytes=1 << 26), cuda())
    [(x, y)] = batches(1, 8192, 4096)
    times: list[float] = []
    for step in range(3):
        times.clear()
        result = made.run_shard(ShardWork(step, 0, [(x, y)], 8192, 8192), lambda *_: times.append(time.perf_counter()))
        made.restore()
    gradients = times[:-1]
    assert gradients[-1] - gradients[0] > 0.3 * result.backward_s
    assert result.forward_s > 0 and result.backward_s > result.forward_s


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_replicas_agree_and_resume_bit_for_bit(precision: str) -> None:
    run = spec(
        model=Factory("Net", {"drop": 0.3}), precision=precision, optimizer=Factory("AdamW", {"lr": 0.01}), seed=5
    )
    data = batches(20)

    def train(replicas, steps) -> list[float]:
        torch.cuda.manual_seed(len(replicas) + steps.start)  # what was drawn before must not matter
        return [
            star_step(replicas, i, [data[i]], lambda rows: [rows - 20, 20], scaled=precision == "fp16") for i in steps
        ]

    whole = [replica(Deep, run, cuda()) for _ in range(2)]
    losses = train(whole, range(20))
    half = [replica(Deep, run, cuda()) for _ in range(2)]
    first = train(half, range(10))
    state = half[0].state()
    assert all(not t.is_cuda for t in state["model"].values())
    resumed = [replica(Deep, run, cuda()) for _ in range(2)]
    for target in resumed:
        target.load_state(state)
    assert first + train(resumed, range(10, 20)) == losses
    assert len({r.parameter_hash() for r in [*whole, *resumed]}) == 1


def test_evaluation_on_the_device() -> None:
    made = replica(Deep, spec(), cuda())
    [(x, y)] = batches(1)
    sums = made.evaluate((x, y))
    outputs = made.model.eval()(x.to(cuda()))
    assert sums.correct == int((outputs.argmax(1).cpu() == y).sum()) and sums.rows == 48
    expected = float(nn.functional.cross_entropy(outputs, y.to(cuda()), reduction="sum").detach())
    assert sums.loss_sum == pytest.approx(expected, rel=1e-5)


class Plain(nn.Module):
    """Without buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_a_lone_workers_step_waits_for_the_device_nowhere() -> None:
    run = spec(precision="fp64", optimizer=Factory("AdamW", {"lr": 0.01, "fused": True}), seed=2)
    data = [(x.to(cuda()).double(), y.to(cuda())) for x, y in batches(20)]
    torch.manual_seed(2)
    model = Plain().double().to(cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    mine = replica(Plain, run, cuda())
    assert mine.can_apply_ahead
    found, ahead = [], None
    for i, batch in enumerate(data):
        try:
            # The first step makes what later ones have: libraries' handles, the optimizer's state.
            torch.cuda.set_sync_debug_mode("error" if i else "default")
            launched = mine.launch_shard(ShardWork(i, 0, [batch], 48, 48), gates=True)
            torch.cuda.set_sync_debug_mode("default")
            found += [] if ahead is None else [mine.confirm(ahead)]
            torch.cuda.set_sync_debug_mode("error" if i else "default")
            mine.apply_ahead(launched)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        ahead = launched
    assert ahead is not None
    found.append(mine.confirm(ahead))
    assert [one.loss_sum / one.count for one in found] == pytest.approx(losses, abs=1e-12)
    assert all(
        float((a - b).abs().max()) <= 1e-9 for a, b in zip(mine.model.parameters(), model.parameters(), strict=True)
    )
    before = [p.clone() for p in mine.model.parameters()]
    bad = mine.launch_shard(ShardWork(20, 0, [(data[0][0] * float("nan"), data[0][1])], 48, 48), gates=True)
    mine.apply_ahead(bad)
    result = mine.confirm(bad)
    assert not result.finite and all(map(torch.equal, before, mine.model.parameters()))
