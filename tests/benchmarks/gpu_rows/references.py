"""What guava_nb is measured against in `gpu.py`: plain PyTorch and its own ways to use several GPUs, each as bare as can be.

One process a rank, with torchrun's environment; a block of steps per line read. The loop waits for the device nowhere: batches
are pinned and copied without waiting, losses stay on the device until the block has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpu_rows.model import GPT, batches, flat_loss, make, optimizer_args
from gpu_rows.watch import Watch

Step = Callable[[Tensor, Tensor], Tensor]
#: Steps of a block that are not timed, as for guava_nb.
SKIPPED = 5
#: As guava_nb's default.
MICRO_BATCHES = 4


class Reference:
    """One rank of a reference: its model, optimizer and batches."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.on_cuda = args.device == "cuda"
        self.device = torch.device(f"cuda:{args.rank}" if self.on_cuda else "cpu")
        if self.on_cuda:
            torch.cuda.set_device(self.device)
        if args.world > 1:
            dist.init_process_group("nccl" if self.on_cuda else "gloo")
        torch.manual_seed(0)
        self.optimizer_args = optimizer_args(args.fused)
        self.step: Step = getattr(self, f"_{args.row}")()
        # Replicas share the rows out; stages and halves of layers see all of them.
        self.share = args.world if args.row in ("data", "zero1", "zero3") else 1
        self.batches = self._pinned()

    def _pinned(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows = self.args.rows // self.share
        begin = rows * (self.args.rank if self.share > 1 else 0)
        kept: list[tuple[Tensor, Tensor]] = []
        for x, y in batches(self.args.size, self.args.rows):
            pair = x[begin : begin + rows].clone(), y[begin : begin + rows].clone()
            kept.append((pair[0].pin_memory(), pair[1].pin_memory()) if self.on_cuda else pair)
            if len(kept) == 8:
                break
        while True:
            yield from kept

    def block(self, steps: int) -> dict[str, Any]:
        """Do so many steps; returns milliseconds a step."""
        loss = torch.zeros(())
        for number in range(steps):
            if number == SKIPPED:
                self._settle()
                began = time.perf_counter()
            x, y = (part.to(self.device, non_blocking=True) for part in next(self.batches))
            loss = self.step(x, y)
        self._settle()
        return {"step_ms": 1e3 * (time.perf_counter() - began) / (steps - SKIPPED), "loss": float(loss)}

    def profile(self, steps: int, table: str) -> dict[str, Any]:
        """Do a block under the profiler."""
        watch = Watch()
        self.block(steps)
        return watch.end(Path(table.replace("RANK", str(self.args.rank))) if table else None)

    def _settle(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16)

    # ------------------------------------------------------------------------------------------------ one way for each row

    def _plain(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            with self._autocast():
                loss = flat_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def _lone(self) -> Step:
        model = make(self.args.size).to(self.device)
        return self._plain(model, torch.optim.AdamW(model.parameters(), **self.optimizer_args))

    def _compiled(self) -> Step:
        model = make(self.args.size, compiled=True).to(self.device)
        return self._plain(model, torch.optim.AdamW(model.parameters(), **self.optimizer_args))

    def _replicated(self) -> nn.Module:
        model = make(self.args.size).to(self.device)
        return nn.parallel.DistributedDataParallel(model, device_ids=[self.device] if self.on_cuda else None)

    def _data(self) -> Step:
        model = self._replicated()
        return self._plain(model, torch.optim.AdamW(model.parameters(), **self.optimizer_args))

    def _zero1(self) -> Step:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = self._replicated()
        return self._plain(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **self.optimizer_args))

    def _zero3(self) -> Step:
        from torch.distributed.fsdp import fully_shard

        model = make(self.args.size).to(self.device)
        mesh = dist.init_device_mesh(self.device.type, (self.args.world,))
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return self._plain(model, torch.optim.AdamW(model.parameters(), **self.optimizer_args))

    def _tensor(self) -> Step:
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            loss_parallel,
            parallelize_module,
        )

        model = make(self.args.size).to(self.device)
        assert isinstance(model, GPT)
        mesh = dist.init_device_mesh(self.device.type, (self.args.world,))
        plan: dict[str, Any] = {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        for number in range(len(model.blocks)):
            plan |= {f"blocks.{number}.{name}": ColwiseParallel() for name in ("qkv", "up")}
            plan |= {f"blocks.{number}.{name}": RowwiseParallel() for name in ("out", "down")}
        parallelize_module(model, mesh, plan)
        model.head.weight = model.tokens.weight  # the plan has made two of the one
        # Fused and foreach optimizers do not mix DTensors with plain parameters: two groups do not help, two optimizers do.
        cut = [p for p in model.parameters() if hasattr(p, "placements")]
        whole = [p for p in model.parameters() if not hasattr(p, "placements")]
        optimizers = [torch.optim.AdamW(part, **self.optimizer_args) for part in (cut, whole)]

        def step(x: Tensor, y: Tensor) -> Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            with loss_parallel():
                with self._autocast():
                    loss = flat_loss(model(x), y)
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            return loss.detach()

        return step

    def _pipeline(self) -> Step:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        whole = GPT(self.args.size)
        first = self.args.rank == 0
        blocks = list(whole.blocks.children())
        half = len(blocks) // 2
        model = (_FirstHalf(whole, blocks[:half]) if first else _SecondHalf(whole, blocks[half:])).to(self.device)
        tied = model.tied

        def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
            with self._autocast():
                return flat_loss(outputs, targets)

        # Within the stage: the schedule's first step runs it without gradients, and autocast would keep weights cast so.
        model.forward = self._autocast()(model.forward)
        stage = PipelineStage(model, self.args.rank, 2, self.device)
        schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_fn)
        optimizer = torch.optim.AdamW(model.parameters(), **self.optimizer_args)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            losses: list[Tensor] = []
            if first:
                schedule.step(x)
            else:
                schedule.step(target=y, losses=losses)
            dist.all_reduce(tied.grad)  # one parameter that stands in both stages
            optimizer.step()
            return torch.stack(losses).mean() if losses else torch.zeros(())

        return step


class _FirstHalf(nn.Module):
    """Embeddings and the first blocks."""

    def __init__(self, whole: GPT, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.tokens, self.places, self.blocks = whole.tokens, whole.places, nn.Sequential(*blocks)
        self.tied = whole.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device)))


class _SecondHalf(nn.Module):
    """The other blocks and the head."""

    def __init__(self, whole: GPT, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = nn.Sequential(*blocks), whole.norm, whole.head
        self.tied = whole.head.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(x)))


def main() -> None:
    """Answer each line with one line."""
    parser = argparse.ArgumentParser()
    for name, kind in (("row", str), ("size", str), ("device", str), ("rows", int), ("world", int), ("rank", int)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--fused", action="store_true")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what anybody prints is not an answer
    if args.device == "cpu":
        torch.set_num_threads(1)
    reference = Reference(args)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(reference, order.pop("do"))(**order)), file=answers)
    if args.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
