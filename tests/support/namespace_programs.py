"""What runs inside the namespaces: an orchestrator that trains, and ranks that try gloo."""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any


def orchestrate(folder: Path, jobs: list[tuple[str, dict[str, Any]]]) -> None:
    """Wait for two workers, train in each mode, and write down what plain PyTorch says to it."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from guava_nb import Orchestrator
    from guava_nb.cli.demo_model import DigitNet
    from guava_nb.datasets.digits import split_digits

    torch.set_num_threads(1)
    train = TensorDataset(*split_digits(0)[0])
    torch.manual_seed(0)
    plain, losses = DigitNet().double(), []
    optimizer = torch.optim.Adam(plain.parameters(), lr=5e-3)
    for x, y in DataLoader(train, 128):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(plain(x.double()), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    results = []
    with Orchestrator(num_workers=2, master_ip="0.0.0.0", precision="fp64") as orch:
        code = folder / "code.part"
        code.write_text(
            json.dumps([orch.join_code.with_address(f"10.77.{k}.1", orch.join_code.port).encode() for k in (0, 1)])
        )
        code.rename(folder / "code.json")
        orch.wait_for_workers(timeout=60)
        orch.register_model("guava_nb.cli.demo_model:DigitNet")
        for mode, settings in jobs:
            orch.set_mode(mode, **settings)
            run = orch.start_training(
                DataLoader(train, 128),
                num_epochs=1,
                optimizer="Adam",
                optimizer_args={"lr": 5e-3},
                progress=False,
                fresh=True,
            )
            ours = run.model().state_dict()
            gap = max(float((ours[name] - value).abs().max()) for name, value in plain.state_dict().items())
            loss_gap = max(abs(a - b["loss"]) for a, b in zip(losses, run.history, strict=True))
            results.append(
                {"mode": mode, "gap": max(gap, loss_gap), "path": run.report()["path"], "notes": orch.status().notes}
            )
    (folder / "results.json").write_text(json.dumps(results))


def keep_store(folder: Path) -> None:
    """A store that both ranks reach, until all is over."""
    import torch.distributed as dist

    store = dist.TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False)
    (folder / "port.part").write_text(str(store.port))
    (folder / "port.part").rename(folder / "port")
    store.set_timeout(datetime.timedelta(seconds=60))
    store.wait(["over 0", "over 1"])


def try_gloo(host: str, port: int, rank: int, interface: str) -> None:
    """Meet at the store, then form a gloo group; prints what comes of it."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = interface
    store = dist.TCPStore(host, port, None, False)
    try:
        store.set(f"here {rank}", "yes")
        store.wait([f"here {1 - rank}"], datetime.timedelta(seconds=40))
        print("met at the store", flush=True)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=5))
        print("gloo started", flush=True)
    except RuntimeError as error:
        print("gloo failed:", error, flush=True)
    store.set(f"over {rank}", "yes")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["orchestrate", folder, jobs]:
            orchestrate(Path(folder), json.loads(jobs))
        case ["store", folder]:
            keep_store(Path(folder))
        case ["gloo", host, port, rank, interface]:
            try_gloo(host, int(port), int(rank), interface)
