"""A training script as tutorials have it: plain PyTorch, started once per process, knows nothing of guava."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="of all processes together")
    parser.add_argument("--save", required=True)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)

    x = torch.randn(256, 20)
    data = TensorDataset(x, (x.sum(dim=1) > 0).long())
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(data, batch_size=args.batch_size // world_size, sampler=sampler)

    torch.manual_seed(rank)  # DDP gives all ranks the weights of rank 0
    model = DDP(nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / world_size:.4f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), args.save)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    print("local rank", os.environ["LOCAL_RANK"])
    main()
