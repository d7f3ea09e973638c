"""A training script with FSDP2 that goes on from a sharded checkpoint by any number of processes; knows nothing of guava."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--resume", default="", help="folder of a checkpoint")
    parser.add_argument("--checkpoint", default="", help="folder to save to")
    parser.add_argument("--asynchronous", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 31), nn.GELU(), nn.Linear(31, 2))  # 31 rows are shared out unevenly
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"step": 0}
    if args.resume:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        kept = {"model": model_state, "optimizer": optimizer_state, "progress": state}
        dcp.load(kept, checkpoint_id=args.resume)
        set_state_dict(model, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
        state = kept["progress"]

    for step in range(state["step"], state["step"] + args.steps):
        x = torch.randn(24, 20, generator=torch.Generator().manual_seed(step))
        own_x, own_y = x.chunk(world_size)[rank], (x.sum(dim=1) > 0).long().chunk(world_size)[rank]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(own_x), own_y)
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step}: loss {loss.item():.12f}", flush=True)
    state["step"] += args.steps

    if args.checkpoint:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        kept = {"model": model_state, "optimizer": optimizer_state, "progress": state}
        if args.asynchronous:
            dcp.async_save(kept, checkpoint_id=args.checkpoint, process_group=dist.new_group(backend="gloo")).result()
        else:
            dcp.save(kept, checkpoint_id=args.checkpoint)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    print("local rank", os.environ["LOCAL_RANK"])
    main()
