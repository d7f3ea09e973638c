"""The process group named "guava": torch.distributed's calls, carried by a hub.

torch asks a group by other names in other releases; each old name here is the new method. Only what torch's own
libraries and programs call is here; how bytes travel is `collectives` and `group_member`.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, Work
from torch.distributed import distributed_c10d as c10d

from guava_nb.backend import collectives
from guava_nb.backend.collectives import Place, Prepared
from guava_nb.backend.endpoint import Endpoint
from guava_nb.backend.group_member import GroupMember
from guava_nb.backend.staging import runner_for
from guava_nb.backend.work import GuavaWork, JointWork, profiled, untraced
from guava_nb.errors import CollectiveError, CollectiveTimeout, GroupBroken
from guava_nb.hub.typed_reduce import dtype_name

__all__ = ["GuavaGroup"]

# all_reduce of sparse tensors: everyone's indices and values, everywhere, then a local sum.
#
# The numbers of entries differ between ranks and have to be known before anything can be received, so the call itself
# waits; the work it returns is done.

#: Starts an all-gather: lists of outputs, inputs.
AllGather = Callable[[list[list[torch.Tensor]], list[torch.Tensor]], Work]


@untraced
class _Done(JointWork):
    """Work that is over, with its outputs."""

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__(())
        self._outputs = outputs

    def result(self) -> list[torch.Tensor]:
        """The outputs."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is done."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


def all_reduce_sparse(allgather: AllGather, tensor: torch.Tensor, reduction: str, size: int) -> Work:
    """Sum a sparse COO tensor over all ranks, in place.

    Args:
        allgather: of the group.
        tensor: of this rank, of any shape that all have; the sum afterwards.
        reduction: its name; only "sum" can be made.
        size: ranks of the group.

    Raises:
        CollectiveError: another reduction or layout, or shapes that differ between ranks.
    """
    if tensor.layout is not torch.sparse_coo or reduction != "sum":
        raise CollectiveError(f"all_reduce of a {tensor.layout} tensor: only sums of COO tensors can be made")
    own = tensor.detach().coalesce()
    shape = torch.tensor([own.sparse_dim(), *own.shape], dtype=torch.int64)
    shapes = _gather(allgather, shape, [shape.numel()] * size)
    if any(not torch.equal(other, shape) for other in shapes):
        raise CollectiveError(f"all_reduce: sparse tensors differ between ranks: {[s.tolist() for s in shapes]}")
    count = torch.tensor([own.indices().size(1)], dtype=torch.int64)
    counts = [int(one) for one in _gather(allgather, count, [1] * size)]
    entry = own.values().new_empty((1, *own.values().shape[1:])).numel()
    indices = _gather(allgather, own.indices().cpu().reshape(-1), [own.sparse_dim() * n for n in counts])
    values = _gather(allgather, own.values().cpu().reshape(-1), [entry * n for n in counts])
    dims = own.values().shape[1:]
    total = torch.sparse_coo_tensor(
        torch.cat([part.reshape(own.sparse_dim(), -1) for part in indices], dim=1),
        torch.cat([part.reshape(n, *dims) for part, n in zip(values, counts, strict=True)]),
        own.shape,
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(total.to(tensor.device))
    return _Done([tensor])


def _gather(allgather: AllGather, tensor: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    outputs = [tensor.new_empty(count) for count in counts]
    allgather([outputs], [tensor]).wait()
    return outputs


_NAME_OF_OP = {
    dist.ReduceOp.PREMUL_SUM: "sum",
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}


#: The newest small works are kept. torch's C++ may wait for one whose Python object the program let go of (DDP's `join` does, for
#: a tensor of one number), and then it would wait for ever.
_KEPT_WORKS, _KEPT_BYTES = 256, 4096


@untraced
class GuavaGroup(dist.ProcessGroup):
    """A process group whose members reach each other only through a hub.

    Args:
        endpoint: the way to the hub.
        name: unique at the hub; the same on all ranks.
        rank: of this process.
        members: names of all ranks, in order.
        timeout_s: for every operation that says nothing else.
        on_shutdown: called once when the group is destroyed.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        name: str,
        rank: int,
        members: Sequence[str],
        timeout_s: float,
        on_shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(rank, len(members))  # type: ignore[call-arg]
        self._endpoint, self._timeout_s, self._on_shutdown = endpoint, timeout_s, on_shutdown
        self._circle: GroupMember = endpoint.open_group(name, rank, members)
        self._coalesced: list[Work] | None = None
        self._kept: deque[Work] = deque(maxlen=_KEPT_WORKS)
        self._over = False
        self._torch_name, self._description = name, "undefined"
        self._splits = 0
        self._names_told = False

    # ---------------------------------------------------------------------------------------------------- who we are

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Name of the backend."""
        return "guava"

    def name(self) -> str:
        """Name of the backend."""
        return "guava"

    # torch keeps these two with the backends inside a group, and this group has none inside.
    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Take torch's own name for the group."""
        self._torch_name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Give torch's own name for the group."""
        return self._torch_name

    def setGroupDesc(self, text: str) -> None:  # noqa: N802 - torch's name
        """Take the user's words for the group."""
        self._description = text

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """Give the user's words for the group."""
        return self._description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        cuda = [torch.device("cuda")] if torch.cuda.is_available() else []
        return [torch.device("cpu"), *cuda]

    def _get_backend(self, device: torch.device) -> GuavaGroup:
        """Give what torch keeps inside a group: for each device this is the group itself."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """From here on operations wait so long, unless told otherwise."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """The circle counts; nothing has to be agreed upon."""

    def _get_sequence_number_for_group(self) -> int:
        return self._circle.sequence

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> GuavaGroup | None:
        """A new group of some of these ranks, in that order; None on the others. Every rank counts the call."""
        self._splits += 1
        if self._circle.rank not in ranks:
            return None
        name = f"{self._circle.name}/{group_name or f'split-{self._splits}'}"
        members = [self._circle.members[rank] for rank in ranks]
        seconds = timeout.total_seconds() if timeout is not None else self._timeout_s
        made = GuavaGroup(self._endpoint, name, list(ranks).index(self._circle.rank), members, seconds)
        made._set_group_name(group_name or name)
        made._set_group_desc(group_desc or "undefined")
        return made

    # ------------------------------------------------------------------------------------------------------- starting

    def _place(self, opts: Any = None) -> Place:
        timeout = getattr(opts, "timeout", None)
        seconds = timeout.total_seconds() if timeout is not None else -1.0
        return Place(self._circle.rank, self._circle.size, seconds if seconds > 0 else self._timeout_s)

    def _start(self, prepared: Prepared) -> Work:
        operation = prepared.operation
        self._endpoint.watch(operation.deadline)
        with profiled(operation.call):
            self._circle.start(operation, runner_for(prepared.reads))
        return self._work(prepared)

    def _work(self, prepared: Prepared) -> Work:
        if not self._names_told:
            # By the table itself: asked by torch's function, a group that was split off another one is an error.
            self._tell_names(str(c10d._world.pg_backend_config.get(self, "")))
        work = GuavaWork(self._circle, prepared.operation, prepared.outputs, prepared.writes)
        if sum(staged.data.nbytes for staged in prepared.writes) <= _KEPT_BYTES:
            self._kept.append(work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _tell_names(self, config: str) -> None:
        """Warn where a program named other backends for other devices: torch keeps a group that is written in Python alone."""
        named = dict(pair.split(":") for pair in config.split(",") if ":" in pair)
        self._names_told = bool(named)  # torch notes them after the group was made
        if others := {device: name for device, name in named.items() if name != "guava"}:
            name = next(iter(others.values()))
            warnings.warn(
                f"this group was asked for as {config!r}, and torch gives it to guava: tensors on {' and '.join(others)} go "
                f"through the hub, too. Where all ranks reach each other, make a second group for them, of {name}",
                stacklevel=4,
            )

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return JointWork(works)

    # ------------------------------------------------------------------------------------------------- reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Reduce in place, everywhere. Takes options, or a bare reduction with a timeout."""
        op, opts = _op_of(opts), _options(opts, timeout)
        works = [self._all_reduce(tensor, op, opts) for tensor in _list(tensors)]
        return works[0] if len(works) == 1 else JointWork(works)

    def _all_reduce(self, tensor: torch.Tensor, op: Any, opts: Any) -> Work:
        if tensor.is_sparse:
            return all_reduce_sparse(self.allgather, tensor, _reduction("all_reduce", op, tensor), self._circle.size)
        tensor = _scaled(op, tensor)
        return self._start(collectives.all_reduce(self._place(opts), tensor, _reduction("all_reduce", op, tensor)))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        """Reduce several tensors in place, everywhere."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        """Reduce in place on the root."""
        (tensor,), op = _list(tensors), _op_of(opts)
        if op == dist.ReduceOp.PREMUL_SUM:
            tensor = _scaled(op, tensor if self._circle.rank == opts.rootRank else tensor.clone())
        reduction = _reduction("reduce", op, tensor)
        return self._start(collectives.reduce(self._place(opts), tensor, reduction, opts.rootRank))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Reduce lists and give each rank one result."""
        op = _op_of(opts)
        works = []
        for output, several in zip(_list(outputs), inputs, strict=True):
            given = [_scaled(op, one.clone()) for one in several] if op == dist.ReduceOp.PREMUL_SUM else list(several)
            reduction = _reduction("reduce_scatter", op, output)
            works.append(self._start(collectives.reduce_scatter(self._place(opts), output, given, reduction)))
        return works[0] if len(works) == 1 else JointWork(works)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Reduce one tensor, `[world * n, ...]`, and give each rank an equal part of the result, `[n, ...]`."""
        op = _op_of(opts)
        given = _scaled(op, tensor.clone()) if op == dist.ReduceOp.PREMUL_SUM else tensor
        reduction = _reduction("reduce_scatter", op, output)
        return self._start(collectives.reduce_scatter(self._place(opts), output, given, reduction))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """`reduce_scatter_single` of several tensors."""
        pairs = zip(_list(outputs), _list(inputs), strict=True)
        return JointWork([self.reduce_scatter_single(output, tensor, opts) for output, tensor in pairs])

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -------------------------------------------------------------------------------------------------- moving tensors

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> Work:
        """The root's content, everywhere. Takes options, or a bare rank of the root with a timeout."""
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", root or 0)
        opts = _options(opts, timeout)
        works = [self._start(collectives.broadcast(self._place(opts), one, root)) for one in _list(tensors)]
        return works[0] if len(works) == 1 else JointWork(works)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Everyone's tensor, everywhere, into lists."""
        works = [
            self._start(collectives.all_gather(self._place(opts), list(several), tensor, [list(several)]))
            for several, tensor in zip(outputs, _list(inputs), strict=True)
        ]
        return works[0] if len(works) == 1 else JointWork(works)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """The tensor of each rank, `[n, ...]`, everywhere, into one tensor, `[world * n, ...]`."""
        return self._start(collectives.all_gather(self._place(opts), output, tensor, [output]))

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """`all_gather_single` of several tensors."""
        pairs = zip(_list(outputs), _list(inputs), strict=True)
        return JointWork([self.all_gather_single(output, tensor, opts) for output, tensor in pairs])

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> Work:
        """Everyone's list of tensors: one list of outputs per rank."""
        works = []
        for index, tensor in enumerate(_list(inputs)):
            outputs = [one_rank[index] for one_rank in output_lists]
            works.append(self._start(collectives.all_gather(self._place(opts), outputs, tensor, outputs)))
        return JointWork(works)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Everyone's tensor, on the root."""
        root = opts.rootRank if opts is not None else 0
        given = list(outputs[0]) if outputs and self._circle.rank == root else []
        return self._start(collectives.gather(self._place(opts), given, _list(inputs)[0], root))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """One tensor of the root's list for each rank."""
        root = opts.rootRank if opts is not None else 0
        given = list(inputs[0]) if inputs and self._circle.rank == root else []
        return self._start(collectives.scatter(self._place(opts), _list(outputs)[0], given, root))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """A tensor from each to each, as lists."""
        outputs, inputs = list(outputs), list(inputs)
        dtype = outputs[0].dtype
        return self._start(collectives.all_to_all(self._place(opts), outputs, inputs, outputs, dtype))

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_rows: Any, input_rows: Any, opts: Any = None
    ) -> Work:
        """A part from each to each, of one tensor into one: `[rows, ...]`, cut into those rows, or into equal parts."""
        dtype = output.dtype
        to, given = (output, list(output_rows or ())), (tensor, list(input_rows or ()))
        return self._start(collectives.all_to_all(self._place(opts), to, given, [output], dtype))

    alltoall_base = all_to_all_single

    # ------------------------------------------------------------------------------------------------------- barriers

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Wait for each other."""
        opts = _options(None, opts) if isinstance(opts, timedelta) else _options(opts, timeout)
        return self._start(collectives.barrier(self._place(opts)))

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for each other; who does not come in time is named: the first, or with `wait_all_ranks` all of them.

        Raises:
            CollectiveTimeout: some ranks did not come.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if seconds is not None and seconds <= 0:
            raise CollectiveTimeout(
                f"Rank {self._circle.rank} timed out in monitoredBarrier: 0 s leave no time to wait"
            )
        place = Place(self._circle.rank, self._circle.size, self._timeout_s if seconds is None else seconds)
        work = self._start(collectives.barrier(place, "monitored_barrier"))
        try:
            work.wait()
        except CollectiveTimeout as problem:
            missing = [str(rank) for rank in getattr(problem, "missing", ())]
            who = f"Ranks {', '.join(missing)}" if wait_all_ranks else f"Rank {missing[0] if missing else '?'}"
            waited_ms = round(place.timeout_s * 1000)
            raise CollectiveTimeout(f"{who} failed to pass monitoredBarrier in {waited_ms} ms: {problem}") from problem

    # ------------------------------------------------------------------------------------------------ send and receive

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        """To one rank."""
        (tensor,) = _list(tensors)
        self._check_peer("send", dst)
        prepared = collectives.send(self._place(), tensor, dst, self._circle.who(dst))
        self._endpoint.watch(prepared.operation.deadline)
        part = prepared.operation.parts[0]
        run = runner_for(prepared.reads)
        with profiled(prepared.operation.call):
            self._circle.send(prepared.operation, part, dtype_name(tensor.dtype), tag, run)
        return self._work(prepared)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        """From one rank."""
        self._check_peer("recv", src)
        return self._receive(_list(tensors), src, tag, self._circle.who(src))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """From whichever rank sends first."""
        return self._receive(_list(tensors), -1, tag, "any other rank")

    def _receive(self, tensors: list[torch.Tensor], source: int, tag: int, who: str) -> Work:
        prepared, slot = collectives.receive(self._place(), tensors[0], who, tag)
        self._endpoint.watch(prepared.operation.deadline)
        with profiled(prepared.operation.call):
            self._circle.receive(prepared.operation, source, tag, slot)
        return self._work(prepared)

    def _check_peer(self, what: str, rank: int) -> None:
        if not 0 <= rank < self._circle.size or rank == self._circle.rank:
            raise CollectiveError(f"{what}: rank {rank} is not another rank of this group of {self._circle.size}")

    # --------------------------------------------------------------------------------------------------------- the end

    def abort(self) -> None:
        """Fail everything that is pending here, and leave."""
        self._circle.end(GroupBroken(f"group {self._circle.name!r} was aborted here"))
        self.shutdown()

    def shutdown(self) -> None:
        """Leave the group; never waits for the other ranks."""
        if self._over:
            return
        self._over = True
        self._endpoint.close_group(self._circle)
        self._on_shutdown()


def _list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _op_of(opts: Any) -> Any:
    """The reduction of an options object; torch also passes bare ones."""
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def _options(opts: Any, timeout: timedelta | None) -> Any:
    """Options of a call that brought a bare timeout."""
    if timeout is None:
        return opts
    made = AllreduceOptions()
    made.timeout = timeout
    return made


def _reduction(what: str, op: Any, tensor: torch.Tensor) -> str:
    name = _NAME_OF_OP.get(getattr(op, "op", op))
    if name is None:
        raise CollectiveError(f"{what}: there is no reduction {op}")
    if tensor.is_complex() and name in ("min", "max", "band", "bor", "bxor"):
        raise CollectiveError(f"{what} does not support {name} on complex tensors: they have no order and no bits")
    if tensor.is_floating_point() and name in ("band", "bor", "bxor"):
        raise CollectiveError(f"Cannot use {what} with {name.upper()} on {tensor.dtype}: bits of integers only")
    return name


def _scaled(op: Any, tensor: torch.Tensor) -> torch.Tensor:
    """With PREMUL_SUM every rank multiplies what it brings by its factor; in place."""
    if op == dist.ReduceOp.PREMUL_SUM:
        with torch.no_grad():
            tensor.mul_(op.__getstate__()[1])
    return tensor
