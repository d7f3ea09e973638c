"""What every process group must do; each case runs on all ranks at once, over guava and over gloo alike."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from guava_nb.errors import CollectiveError, CollectiveTimeout, GroupBroken
from tests.support.hub_ranks import Here

EXACT = (torch.float64, torch.float32, torch.int64, torch.int32, torch.uint8, torch.int8)
ONLY_OURS = (torch.uint16, torch.uint32, torch.uint64, torch.complex128, torch.complex64)


def values(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (3, 5)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(17 + rank)
    drawn = torch.randint(1, 4, shape, generator=generator)
    return drawn.to(dtype)


def everyone(here: Here, dtype: torch.dtype, shape: tuple[int, ...] = (3, 5)) -> list[torch.Tensor]:
    return [values(rank, dtype, shape) for rank in range(here.size)]


# --------------------------------------------------------------------------------------------------------- reductions


def all_reduce_ops(here: Here) -> None:
    wide = {
        dist.ReduceOp.SUM: lambda a: sum(a[1:], a[0]),
        dist.ReduceOp.PRODUCT: lambda a: torch.stack(a).prod(0),
        dist.ReduceOp.MIN: lambda a: torch.stack(a).amin(0),
        dist.ReduceOp.MAX: lambda a: torch.stack(a).amax(0),
    }
    for dtype in EXACT:
        parts = [one.double() for one in everyone(here, dtype)]
        for op, expected in wide.items():
            tensor = values(here.rank, dtype)
            dist.all_reduce(tensor, op)
            assert torch.equal(tensor, expected(parts).to(dtype)), (dtype, op)
    for op, bits in ((dist.ReduceOp.BAND, "and"), (dist.ReduceOp.BOR, "or"), (dist.ReduceOp.BXOR, "xor")):
        expected = everyone(here, torch.int64)[0]
        for part in everyone(here, torch.int64)[1:]:
            expected = getattr(torch, f"bitwise_{bits}")(expected, part)
        tensor = values(here.rank, torch.int64)
        dist.all_reduce(tensor, op)
        assert torch.equal(tensor, expected), op


def half_types(here: Here) -> None:
    names = ["float16", "bfloat16"]
    if here.backend == "guava":
        names += ["float8_e4m3fn", "float8_e5m2"]
    for name in names:
        dtype = getattr(torch, name)
        tensor = values(here.rank, torch.float32).to(dtype)
        expected = sum(part.float() for part in everyone(here, torch.float32)).to(dtype)  # type: ignore[union-attr]
        dist.all_reduce(tensor)
        assert torch.equal(tensor.float(), expected.float()), name


def types_of_ours(here: Here) -> None:
    for dtype in ONLY_OURS:
        tensor = values(here.rank, dtype)
        dist.all_reduce(tensor)
        total = sum(part.to(torch.complex128) for part in everyone(here, torch.float64))
        assert torch.equal(tensor.to(torch.complex128), total), dtype
    truth = torch.tensor([here.rank == 0, False, True])
    dist.all_reduce(truth, dist.ReduceOp.MAX)
    assert truth.tolist() == [True, False, True]
    mean = values(here.rank, torch.float64)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert torch.allclose(mean, sum(everyone(here, torch.float64)) / here.size)
    scaled = values(here.rank, torch.float64)
    factor = torch.distributed._make_nccl_premul_sum(0.5)
    dist.all_reduce(scaled, factor)
    assert torch.equal(scaled, sum(everyone(here, torch.float64)) * 0.5)


def half_sums_are_rounded_once(here: Here) -> None:
    """1 + 2^-9 and so on: in bfloat16 each addition alone would be lost."""
    tensor = torch.full((4,), 1.0 if here.rank == 0 else 2.0**-9, dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    exact = 1.0 + (here.size - 1) * 2.0**-9
    assert torch.equal(tensor, torch.full((4,), exact).bfloat16())


def large_and_odd(here: Here) -> None:
    """Many chunks, sizes that divide by nothing, results in place, two at a time."""
    shape = (1_300_003,)
    first, second = values(here.rank, torch.float64, shape), values(here.rank, torch.float32, (700_001,))
    works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
    for work in reversed(works):
        assert work.wait()
    assert torch.equal(first, sum(everyone(here, torch.float64, shape)))
    assert torch.equal(second, sum(everyone(here, torch.float32, (700_001,))))


def shapes(here: Here) -> None:
    scalar = torch.tensor(float(here.rank))
    dist.all_reduce(scalar)
    assert scalar.item() == sum(range(here.size))
    empty = torch.empty(0, 4)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    gathered = [torch.empty(0, 4) for _ in range(here.size)]
    dist.all_gather(gathered, empty)
    if here.backend == "guava":  # gloo refuses them
        base = values(here.rank, torch.float64, (6, 4))
        dist.all_reduce(base.t()[1:3])
        expected = values(here.rank, torch.float64, (6, 4))
        expected[:, 1:3] = sum(part[:, 1:3] for part in everyone(here, torch.float64, (6, 4)))
        assert torch.equal(base, expected)
        strided = torch.zeros(4, 6, dtype=torch.float64)
        dist.broadcast(strided[:, ::2], 1)
        weight = nn.Parameter(torch.full((2,), float(here.rank)))
        dist.broadcast(weight.data, 1)
        assert weight.tolist() == [1.0, 1.0]


def reduce_to_root(here: Here) -> None:
    for size in (5, 300_000):
        tensor = values(here.rank, torch.float64, (size,))
        dist.reduce(tensor, 1)
        if here.rank == 1:
            assert torch.equal(tensor, sum(everyone(here, torch.float64, (size,))))
        elif here.backend == "guava":
            assert torch.equal(tensor, values(here.rank, torch.float64, (size,)))


def reduce_scatters(here: Here) -> None:
    for size in (6, 200_001):
        inputs = [values(here.rank * 10 + k, torch.float64, (size,)) for k in range(here.size)]
        output = torch.empty(size, dtype=torch.float64)
        dist.reduce_scatter(output, inputs)
        expected = sum(values(rank * 10 + here.rank, torch.float64, (size,)) for rank in range(here.size))
        assert torch.equal(output, expected)
        dist.reduce_scatter_tensor(output, torch.cat(inputs))
        assert torch.equal(output, expected)


# ------------------------------------------------------------------------------------------------------------ moving


def broadcasts(here: Here) -> None:
    for root in range(here.size):
        for shape in ((7,), (400_000,)):
            tensor = values(here.rank, torch.float64, shape)
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, values(root, torch.float64, shape))


def gathers(here: Here) -> None:
    for shape in ((2, 3), (300_000,)):
        own = values(here.rank, torch.float32, shape)
        outputs = [torch.empty(shape) for _ in range(here.size)]
        dist.all_gather(outputs, own)
        assert all(torch.equal(a, b) for a, b in zip(outputs, everyone(here, torch.float32, shape), strict=True))
        flat = torch.empty(here.size * shape[0], *shape[1:])
        dist.all_gather_into_tensor(flat, own)
        assert torch.equal(flat, torch.cat(everyone(here, torch.float32, shape)))
        into = [torch.empty(shape) for _ in range(here.size)] if here.rank == 1 else None
        dist.gather(own, into, dst=1)
        if into is not None:
            assert torch.equal(torch.stack(into), torch.stack(everyone(here, torch.float32, shape)))
        output = torch.empty(shape)
        dist.scatter(output, everyone(here, torch.float32, shape) if here.rank == 0 else None, src=0)
        assert torch.equal(output, own)


def all_to_alls(here: Here) -> None:
    if here.backend == "guava":  # gloo has only the single form
        inputs = [torch.full((3,), 10.0 * here.rank + k) for k in range(here.size)]
        outputs = [torch.empty(3) for _ in range(here.size)]
        dist.all_to_all(outputs, inputs)
        assert [int(one[0]) for one in outputs] == [10 * k + here.rank for k in range(here.size)]
    rows = torch.arange(here.size * 2, dtype=torch.float64).reshape(here.size, 2) + 100 * here.rank
    mixed = torch.empty_like(rows)
    dist.all_to_all_single(mixed, rows)
    assert [int(row[0]) for row in mixed] == [100 * k + 2 * here.rank for k in range(here.size)]
    given = [k + 1 for k in range(here.size)]  # k + 1 rows for rank k
    source = torch.full((sum(given), 2), float(here.rank))
    target = torch.empty((here.rank + 1) * here.size, 2)
    dist.all_to_all_single(target, source, [here.rank + 1] * here.size, given)
    assert target[:, 0].tolist() == [float(k) for k in range(here.size) for _ in range(here.rank + 1)]


def objects(here: Here) -> None:
    listed: list[Any] = [None] * here.size
    dist.all_gather_object(listed, {"rank": here.rank, "text": "x" * here.rank})
    assert [one["rank"] for one in listed] == list(range(here.size))
    said: list[Any] = [{"a": 1}, "b"] if here.rank == 0 else [None, None]
    dist.broadcast_object_list(said, src=0)
    assert said == [{"a": 1}, "b"]


# ---------------------------------------------------------------------------------------------------------- messages


def sends(here: Here) -> None:
    following, before = (here.rank + 1) % here.size, (here.rank - 1) % here.size
    for numel in (0, 3, 500_000):
        outgoing = torch.full((numel,), float(here.rank), dtype=torch.float64)
        incoming = torch.empty(numel, dtype=torch.float64)
        operations = [dist.P2POp(dist.isend, outgoing, following), dist.P2POp(dist.irecv, incoming, before)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert torch.equal(incoming, torch.full_like(incoming, float(before)))


def tags_and_order(here: Here) -> None:
    if here.rank == 0:
        works = [dist.isend(torch.tensor([number]), 1, tag=number % 2) for number in range(4)]
        for work in works:
            work.wait()
    elif here.rank == 1:
        got = []
        for tag in (1, 0, 1, 0):
            tensor = torch.zeros(1, dtype=torch.int64)
            dist.recv(tensor, 0, tag=tag)
            got.append(int(tensor))
        assert got == [1, 0, 3, 2]
    dist.barrier()


def from_anyone(here: Here) -> None:
    if here.rank:
        dist.send(torch.tensor([here.rank]), 0)
        return
    seen = set()
    for _ in range(here.size - 1):
        tensor = torch.zeros(1, dtype=torch.int64)
        assert dist.recv(tensor) == int(tensor)
        seen.add(int(tensor))
    assert seen == set(range(1, here.size))


# ------------------------------------------------------------------------------------------------------------- groups


def subgroups(here: Here) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    for ranks, group in zip(((0, 1), (1, 2)), pairs, strict=True):
        if here.rank in ranks:
            tensor = torch.tensor([float(here.rank)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(ranks)
            dist.broadcast(tensor, ranks[1], group=group)
            dist.barrier(group)
    dist.barrier()


def meshes(here: Here) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (here.size,), mesh_dim_names=("tp",))
    torch.manual_seed(3)
    full = torch.randn(7, 6, dtype=torch.float64)
    for placement in (Shard(0), Shard(1), Replicate()):
        spread = distribute_tensor(full, mesh, [placement])
        assert torch.equal(spread.full_tensor(), full)
        assert torch.equal(spread.redistribute(mesh, [Shard(1)]).full_tensor(), full)
    left = distribute_tensor(full, mesh, [Shard(0)])
    right = distribute_tensor(full.t().contiguous(), mesh, [Replicate()])
    product = left @ right
    assert isinstance(product, DTensor)
    assert torch.allclose(product.full_tensor(), full @ full.t())


def futures(here: Here) -> None:
    tensor = torch.full((4,), float(here.rank))
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert torch.equal(doubled.wait(), torch.full((4,), 2.0 * sum(range(here.size))))
    assert work.wait()
    assert work.is_completed()


def futures_that_call(here: Here) -> None:
    """A collective in a future's callback, waited for by call and by future; one callback at a time, so that ranks agree."""

    def then(future: torch.futures.Future[Any]) -> torch.Tensor:
        total = future.value()[0].clone()
        dist.all_reduce(total)
        again = dist.all_reduce(total, async_op=True).get_future()
        return again.then(lambda done: done.value()[0] + 0).wait()

    for _ in range(5):
        made = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(then)
        assert torch.equal(made.wait(), torch.full((2,), float(here.size**3)))


def group_s_backend(here: Here) -> None:
    group = dist.group.WORLD
    for device in group._device_types:
        assert group._get_backend(device) is not None
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=30))


def profiled(here: Here) -> None:
    """torch's profiler shows the collectives, by the backend's name."""
    tensor = torch.ones(4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
    names = {event.key for event in seen.key_averages()}
    assert {f"{here.backend}:all_reduce", f"{here.backend}:broadcast"} <= names


def named_backends(here: Here) -> None:
    """Another backend for another device is not taken, since torch keeps a group that is written in Python alone."""
    group = dist.group.WORLD
    for config, told in (("cpu:gloo,cuda:guava", True), ("cpu:guava,cuda:guava", False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            group._tell_names(config)
        texts = [str(one.message) for one in caught]
        assert len(texts) == told and all("tensors on cpu go through the hub, too" in text for text in texts)
    mine = dist.new_group(backend="gloo")
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=mine)
    assert torch.equal(tensor, torch.full((2,), float(here.size)))


def resized(here: Here) -> None:
    """Storages stay as they were: FSDP frees and takes memory by resizing them."""
    tensor = torch.full((8,), 1.0)
    dist.all_reduce(tensor)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(32)


# ----------------------------------------------------------------------------------------- what torch builds on top


def _net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)).to(dtype)


def _batch(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, 3, generator=generator, dtype=torch.float64)


def _plain(steps: int, rows: int) -> nn.Module:
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        x, y = _batch(step, rows)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def _train_spread(here: Here, model: nn.Module, steps: int, rows: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    share = rows // here.size
    for step in range(steps):
        x, y = (part[here.rank * share : (here.rank + 1) * share] for part in _batch(step, rows))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def data_parallel(here: Here) -> None:
    rows, steps = 12, 5
    model = nn.parallel.DistributedDataParallel(_net())
    _train_spread(here, model, steps, rows)
    for ours, plain in zip(model.module.parameters(), _plain(steps, rows).parameters(), strict=True):
        assert torch.allclose(ours, plain, atol=1e-12, rtol=0)


def power_sgd(here: Here) -> None:
    """A hook whose callbacks call collectives; replicas stay alike."""
    if torch.cuda.is_available():
        return  # torch's hook then synchronises the parameters' device as a GPU, whatever it is; so it does over gloo
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = nn.parallel.DistributedDataParallel(_net(torch.float32))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        x, y = (part[here.rank :: here.size].float() for part in _batch(step, 12))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    parts = [torch.empty_like(flat) for _ in range(here.size)]
    dist.all_gather(parts, flat)
    assert all(torch.equal(part, flat) for part in parts)


def uneven_inputs(here: Here) -> None:
    """`join`, each rank with another number of batches, and the mean over those that still have one."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False, dtype=torch.float64))
    with torch.no_grad():
        model.module.weight.fill_(1.0)
    steps = 2 + here.rank
    with model.join(divide_by_initial_world_size=False):
        for _ in range(steps):
            model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    # Every rank that still has a batch brings a gradient of ones; their mean adds up once a step.
    assert torch.equal(model.module.weight.grad, torch.full((1, 2), float(steps), dtype=torch.float64))


def _meet(here: Here, name: str) -> None:
    """Wait until all ranks are here: what a case loads first takes a busy machine longer than a collective waits."""
    (here.folder / f"{here.backend}-{name}-{here.rank}").touch()
    while len(list(here.folder.glob(f"{here.backend}-{name}-*"))) < here.size:
        time.sleep(0.005)


def fully_sharded_flat(here: Here) -> None:
    """FSDP1, which resizes storages."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    _meet(here, "flat")
    model = FullyShardedDataParallel(_net(), device_id=torch.device("cpu"))
    _train_spread(here, model, 3, 12)
    with FullyShardedDataParallel.summon_full_params(model):
        ours = [p.detach().clone() for p in model.parameters()]
    theirs = torch.cat([p.detach().flatten() for p in _plain(3, 12).parameters()])
    assert torch.allclose(torch.cat([p.flatten() for p in ours]), theirs, atol=1e-9)


def fully_sharded(here: Here) -> None:
    """FSDP2, and its sharded checkpoint."""
    from torch.distributed import checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rows, steps = 12, 5
    model = _net()
    mesh = init_device_mesh("cpu", (here.size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _train_spread(here, model, steps, rows)
    folder = [tempfile.mkdtemp() if here.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    kept = model.state_dict()
    checkpoint.save(kept, checkpoint_id=folder[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    checkpoint.load(kept, checkpoint_id=folder[0])
    for ours, plain in zip(model.parameters(), _plain(steps, rows).parameters(), strict=True):
        assert torch.allclose(ours.full_tensor(), plain, atol=1e-12, rtol=0)  # type: ignore[attr-defined]
    if here.rank == 0:  # `full_tensor` was a call of all ranks, so all have read it
        shutil.rmtree(folder[0])


def tensor_parallel(here: Here) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = _net()
    mesh = init_device_mesh("cpu", (here.size,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x, _ = _batch(0, 5)
    model(x).sum().backward()
    plain = _net()
    plain(x).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        gradient = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
        assert torch.allclose(gradient, theirs.grad, atol=1e-12, rtol=0)


def pipelined(here: Here) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    x, y = _batch(0, 8)
    plain = _net()
    loss_of = nn.functional.mse_loss
    loss_of(plain(x), y).backward()
    for kind in (ScheduleGPipe, Schedule1F1B):
        model = _net()
        first, middle = nn.Sequential(model[0], model[1]), nn.Sequential(model[2], model[3])
        parts = [first, middle, nn.Sequential(model[4])]
        stage = PipelineStage(parts[here.rank], here.rank, here.size, torch.device("cpu"))
        schedule = kind(stage, n_microbatches=4, loss_fn=loss_of)
        target = {"target": y} if here.rank == here.size - 1 else {}
        schedule.step(*((x,) if here.rank == 0 else ()), **target)
        names = (("0.weight", plain[0]), ("0.weight", plain[2]), ("0.weight", plain[4]))
        name, theirs = names[here.rank]
        ours = dict(parts[here.rank].named_parameters())[name].grad
        assert torch.allclose(ours, theirs.weight.grad, atol=1e-12, rtol=0)


# ------------------------------------------------------------------------------------------------------ what goes wrong


def different_sizes(here: Here) -> None:
    with pytest.raises(CollectiveError, match=r"rank \d \(w\d\) called all_reduce \(sum\) of [45] float32"):
        dist.all_reduce(torch.ones(4 if here.rank == 0 else 5))
    fine = torch.ones(2)
    dist.all_reduce(fine)  # the group stands
    assert fine.tolist() == [here.size] * 2


def different_calls(here: Here) -> None:
    with pytest.raises(
        CollectiveError, match=r"do not agree: rank \d.*called (broadcast of 3 float32, root 0|all_reduce)"
    ):
        if here.rank == 0:
            dist.broadcast(torch.ones(3), 0, async_op=True).wait()
            dist.all_reduce(torch.ones(3))
        else:
            dist.all_reduce(torch.ones(3))


def missing_rank(here: Here) -> float:
    """Rank 2 does not come: the others are told so by name."""
    started = time.monotonic()
    if here.rank != 2:
        with pytest.raises(CollectiveTimeout, match=r"rank 2 \(w2\)"):
            dist.all_reduce(torch.ones(3))
    return time.monotonic() - started


def missing_sender(here: Here) -> None:
    if here.rank == 0:
        with pytest.raises(CollectiveTimeout, match=r"rank 1 \(w1\) to send \(tag 7\)"):
            dist.recv(torch.ones(3), 1, tag=7)


def monitored(here: Here) -> None:
    from datetime import timedelta

    group = dist.distributed_c10d._get_default_group()
    group.monitored_barrier(timedelta(seconds=20))
    if here.rank != 1:
        with pytest.raises(RuntimeError, match=r"Ranks 1 failed to pass monitoredBarrier in 300 ms"):
            group.monitored_barrier(timedelta(seconds=0.3), wait_all_ranks=True)


def die_in_a_collective(here: Here) -> float:
    """Rank 1 is killed while the others wait for it; gives the seconds until they knew."""
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(GroupBroken, match=r"rank 1 \(w1\) was lost"):
        for _ in range(3):
            dist.all_reduce(torch.ones(1000))
    with pytest.raises(GroupBroken, match=r"rank 1 \(w1\) was lost"):
        dist.barrier()
    return time.monotonic() - started


def die_under_ddp(here: Here) -> None:
    """The future that DDP waits for carries the name, too."""
    model = nn.parallel.DistributedDataParallel(_net())
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"rank 1 \(w1\) was lost"):
        model(_batch(0, 4)[0]).sum().backward()


def wait_for_the_break(here: Here) -> str:
    (here.folder / f"waiting-{here.rank}").touch()
    with pytest.raises(GroupBroken, match="the step was given up") as caught:
        dist.recv(torch.ones(1), (here.rank + 1) % here.size)
    return str(caught.value)


def local_break(here: Here) -> None:
    """`break_groups` wakes whatever is blocked, from another thread."""
    import threading

    timer = threading.Timer(0.05, here.endpoint.break_groups, ("aborted by the test",))
    timer.start()
    with pytest.raises(GroupBroken, match="aborted by the test"):
        dist.recv(torch.ones(1), (here.rank + 1) % here.size)
    timer.join()


def reform(here: Here, name: str) -> None:
    """The same processes, a new group under a new name."""
    from guava_nb.backend import end_group, init_group

    end_group()
    assert not dist.is_initialized()
    end_group()
    init_group(here.endpoint, name, here.rank, here.size, [f"w{r}" for r in range(here.size)], 20.0)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [here.size] * 2


def split(here: Here) -> None:
    group = dist.distributed_c10d._get_default_group()
    part = group.split_group([0, 2], group_name=f"pair-{here.rank >= 0}")
    assert (part is None) == (here.rank == 1)
    if part is not None:
        tensor = torch.tensor([float(here.rank)])
        part.allreduce([tensor]).wait()
        assert tensor.item() == 2.0
        part.shutdown()


def left_member(here: Here) -> None:
    """A rank that destroys its group does not leave the others hanging."""
    group = dist.new_group([0, 1])
    if here.rank == 0:
        dist.destroy_process_group(group)
    elif here.rank == 1:
        with pytest.raises(CollectiveError, match=r"rank 0 \(w0\).* left"):
            dist.recv(torch.ones(1), 0, group=group)
        with pytest.raises(CollectiveError, match=r"rank 0 \(w0\).* left"):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()


def store_operations(here: Here) -> None:
    from datetime import timedelta

    from guava_nb.backend import store_for

    store = store_for(here.endpoint, f"case/{here.backend}/")
    assert store.add("counter", 1) >= 1
    dist.barrier()
    assert store.add("counter", 0) == here.size
    if here.rank == 0:
        store.set("late", b"\x00\xff")
        store.append("late", "z")
    assert store.get("late")[:2] == b"\x00\xff"
    store.wait(["late", "counter"])
    assert store.check(["late"]) and not store.check(["late", "never"])
    with pytest.raises(CollectiveTimeout, match=r"waited 0.05 s for the store to wait 'case/\w+/never'"):
        store.wait(["never"], timedelta(seconds=0.05))
    mine = f"mine-{here.rank}"
    assert store.compare_set(mine, "", "first") == b"first"
    assert store.compare_set(mine, "other", "second") == b"first"
    assert store.delete_key(mine) and not store.delete_key(mine)
    store.multi_set([f"{mine}/a", f"{mine}/b"], ["1", "2"])
    assert store.multi_get([f"{mine}/b", f"{mine}/a"]) == [b"2", b"1"]
    prefixed = dist.PrefixStore("under", store)
    prefixed.set(mine, "p")
    assert prefixed.get(mine) == b"p" and store.get(f"under/{mine}") == b"p"
    dist.barrier()
    assert store.num_keys() >= 3 * here.size


# --------------------------------------------------------------------------------------------------------------- CUDA


def cuda_moves(here: Here) -> None:
    """Every way a CUDA tensor can go, large and small, strided too."""
    device = torch.device("cuda", here.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    total = sum(range(here.size))
    for numel in (1, 5, 700_001):
        tensor = torch.full((numel,), float(here.rank), device=device)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full_like(tensor, float(total)))
        tensor = torch.full((numel,), float(here.rank), device=device)
        dist.broadcast(tensor, 1)
        assert torch.equal(tensor, torch.ones_like(tensor))
        flat = torch.empty(here.size * numel, device=device)
        dist.all_gather_into_tensor(flat, torch.full((numel,), float(here.rank), device=device))
        assert torch.equal(flat, torch.arange(here.size, device=device).float().repeat_interleave(numel))
        part = torch.empty(numel, device=device)
        dist.reduce_scatter_tensor(part, flat)
        assert torch.equal(part, torch.full_like(part, float(here.rank * here.size)))
        mixed = torch.empty_like(flat)
        dist.all_to_all_single(mixed, flat + 10 * here.rank)
        assert mixed[::numel].tolist() == [10.0 * k + here.rank for k in range(here.size)]
        following, before = (here.rank + 1) % here.size, (here.rank - 1) % here.size
        work = dist.isend(torch.full((numel,), float(here.rank), device=device), following)
        incoming = torch.empty(numel, device=device)
        dist.recv(incoming, before)
        work.wait()
        assert torch.equal(incoming, torch.full_like(incoming, float(before)))
    strided = torch.full((6, 4), float(here.rank), device=device, dtype=torch.bfloat16)
    dist.all_reduce(strided.t()[1:3])
    assert strided[:, 1:3].unique().tolist() == [float(total)] and strided[:, 0].unique().tolist() == [here.rank]


def cuda_streams(here: Here) -> None:
    """The call waits for kernels before it, kernels after `wait` see its result, whatever stream the caller is on."""
    device = torch.device("cuda", here.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    for stream in (torch.cuda.default_stream(device), torch.cuda.Stream(device)):
        with torch.cuda.stream(stream):
            tensor = torch.zeros(300_000, device=device)
            for _ in range(20):
                torch.cuda._sleep(1_000_000)
                tensor.fill_(here.rank + 1.0)
                work = dist.all_reduce(tensor, async_op=True)
                work.wait()
                doubled = tensor * 2
                tensor.zero_()
            assert torch.equal(doubled, torch.full_like(doubled, 2.0 * sum(range(1, here.size + 1))))


def cuda_data_parallel(here: Here) -> None:
    device = torch.device("cuda", here.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    rows, steps = 12, 5
    model = nn.parallel.DistributedDataParallel(_net().to(device), device_ids=[device.index])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    share = rows // here.size
    for step in range(steps):
        x, y = (part[here.rank * share : (here.rank + 1) * share].to(device) for part in _batch(step, rows))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    for ours, plain in zip(model.module.parameters(), _plain(steps, rows).parameters(), strict=True):
        assert torch.allclose(ours.cpu(), plain, atol=1e-9, rtol=0)


def no_such_root(here: Here) -> None:
    """A root that is no rank is refused here, before anybody waits for it."""
    tensor, group = torch.ones(2), dist.group.WORLD
    assert group is not None
    options = [(dist.BroadcastOptions, "broadcast"), (dist.ReduceOptions, "reduce")]
    for kind, name in options:
        for root in (-1, here.size):
            chosen = kind()
            chosen.rootRank = root
            with pytest.raises(
                CollectiveError, match=f"{name}: root {root} is no rank of this group, whose ranks are 0 to"
            ):
                getattr(group, name)([tensor], chosen)
    gathered, scattered = dist.GatherOptions(), dist.ScatterOptions()
    gathered.rootRank = scattered.rootRank = 9
    with pytest.raises(CollectiveError, match="gather: root 9"):
        group.gather([], [tensor], gathered)
    with pytest.raises(CollectiveError, match="scatter: root 9"):
        group.scatter([tensor], [], scattered)
    dist.all_reduce(tensor)  # nothing was counted: all are still in step
    assert tensor.tolist() == [here.size] * 2
