"""A loop under Lightning Fabric; started once per process."""

import os

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

size = int(os.environ.get("WORLD_SIZE", 1))
fabric = Fabric(accelerator="auto", devices=size, strategy="ddp" if size > 1 else "auto")
fabric.launch()
torch.manual_seed(0)
net = nn.Linear(4, 2).double()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data = TensorDataset(torch.randn(32, 4, dtype=torch.float64), torch.randn(32, 2, dtype=torch.float64))
model, optimizer = fabric.setup(net, optimizer)
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8 // size, shuffle=False))
for inputs, targets in loader:
    optimizer.zero_grad()
    fabric.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
weights = {name: value.detach().cpu() for name, value in net.state_dict().items()}
print(f"rank {fabric.global_rank} of {fabric.world_size}")
