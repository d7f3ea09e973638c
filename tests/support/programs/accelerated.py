"""The same with Hugging Face accelerate, as its own examples have it."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="of all processes together")
    parser.add_argument("--save", required=True)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    x = torch.randn(256, 20)
    data = TensorDataset(x, (x.sum(dim=1) > 0).long())
    loader = DataLoader(data, batch_size=args.batch_size // accelerator.num_processes)
    model = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # Each process takes every n-th batch, so that n small batches are one large batch of a single process.
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(args.epochs):
        seen = 0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            seen += len(accelerator.gather_for_metrics(targets))
        accelerator.print(f"epoch {epoch}: {seen} samples")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), args.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()
