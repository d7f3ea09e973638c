"""A GAN as tutorials have it: two models, two optimizers, two backwards a step; started once per process."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", required=True)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    real, noise = torch.randn(6, 16, 5) + 2, torch.randn(6, 16, 3)  # steps, samples, features

    generator = DDP(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 5)))
    critic = DDP(nn.Sequential(nn.Linear(5, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)), broadcast_buffers=False)
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.999))
    for images, z in zip(real.chunk(size, 1)[rank], noise.chunk(size, 1)[rank], strict=True):
        made = generator(z)
        of_critic.zero_grad()
        judged = critic(torch.cat([images, made.detach()]))
        truth = torch.cat([torch.ones(len(images), 1), torch.zeros(len(made), 1)])
        bce(judged, truth).backward()
        of_critic.step()

        of_generator.zero_grad()
        loss = bce(critic(made), torch.ones(len(made), 1))
        loss.backward()
        of_generator.step()
    if rank == 0:
        state = {f"{name}.{key}": value for name, model in (("g", generator), ("c", critic))
                 for key, value in model.module.state_dict().items()}  # fmt: skip
        torch.save(state, args.save)
        print(f"loss {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
