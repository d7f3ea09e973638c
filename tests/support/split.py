"""What both processes of a two-sided test use: a data set, and a tunnel that is a relay."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from guava_nb.tunnels import Address, Tunnel
from tests.support.relay import Relay


class Rows(Dataset[Any]):
    def __init__(self, rows: int = 101, fails_at: int = -1) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(rows, 10, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 4, (rows,), generator=generator)
        self.fails_at = fails_at

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        if index == self.fails_at:
            raise ValueError("this row is rotten")
        return self.x[index], self.y[index]


class StandIn(Tunnel):
    """A tunnel of the tests' own: a relay to the port."""

    def __init__(self) -> None:
        self.relay: Relay | None = None

    def start(self, port: int) -> Address:
        self.relay = Relay(port)
        return Address("127.0.0.1", self.relay.port)

    def stop(self) -> None:
        if self.relay is not None:
            self.relay.__exit__()
