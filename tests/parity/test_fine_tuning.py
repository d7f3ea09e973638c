"""Fine-tuning as plain PyTorch does it: pretrained weights from a file, a frozen base, LoRA, and a checkpoint of what learns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from guava_nb import Orchestrator
from guava_nb.errors import CheckpointError, ConfigError
from tests.support.processes import ROOT, Session
from tests.support.session import direct_session, said
from tests.support.training import SmallNet, difference
from tests.support.training import loader as vectors

CELL = """
import torch
from torch import nn


class Lora(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(self, width=64, classes=5):
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, classes)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def Tuned():
    model = Transformer().requires_grad_(False)
    for block in model.blocks:
        block.qkv = Lora(block.qkv)
    return model
"""


def made(name: str, seed: int = 0) -> Any:
    namespace: dict[str, Any] = {"__name__": "plain"}
    exec(CELL, namespace)
    torch.manual_seed(seed)
    return namespace[name]()


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 12, (44, 6), generator=generator)
    return DataLoader(TensorDataset(tokens, tokens.sum(1) % 5), batch_size=16)


def pretrained(folder: Path) -> Path:
    """Weights of the base, under the names that LoRA gives its frozen layers; nothing of LoRA itself."""
    tuned, base = made("Tuned"), made("Transformer", seed=7)
    names = {name.replace(".qkv.base.", ".qkv."): name for name in tuned.state_dict()}
    path = folder / "pretrained.pt"
    torch.save({names[name]: value for name, value in base.state_dict().items()}, path)
    return path


def plain(path: Path, epochs: int = 2) -> Any:
    model = made("Tuned")
    model.load_state_dict(torch.load(path, weights_only=True), strict=False)
    return plain_steps(model.double(), loader(), epochs)


def plain_steps(model: nn.Module, batches: Any, epochs: int) -> nn.Module:
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return model


OPTIONS: dict[str, Any] = {
    "optimizer": "AdamW", "optimizer_args": {"lr": 0.01}, "precision": "fp64", "progress": False
}  # fmt: skip


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        opened = Session(tmp_path_factory.mktemp("tuning"), num_workers=2, path="relay")
        try:
            opened.ensure(2)
            yield opened
        finally:
            opened.close()


@pytest.mark.parametrize("mode", [("data", {}), ("zero", {"zero_stage": 1})], ids=lambda mode: mode[0])
def test_lora_on_pretrained_weights_equals_plain_pytorch_and_saves_what_learns(
    session: Session, tmp_path: Path, mode: tuple[str, dict[str, Any]]
) -> None:
    orch, weights = session.orch, pretrained(tmp_path)
    orch.set_mode(mode[0], path="relay", **mode[1])
    orch.share(CELL, "model")
    orch.register_model("Tuned")
    options = {**OPTIONS, "weights": weights, "save_only": "trainable"}
    run = orch.start_training(loader(), num_epochs=1, **options)
    assert "no values of this shape for blocks.0.qkv.down.weight" in said(orch)
    adapter = orch.save_checkpoint(tmp_path / "adapter.pt")
    assert adapter.stat().st_size * 4 < weights.stat().st_size
    state = torch.load(adapter, weights_only=True)["model"]
    assert sorted(state) == sorted(name for name, one in run.model().named_parameters() if one.requires_grad)

    with pytest.raises(CheckpointError, match=r"frozen part .* is another one .* differ by SHA-256.*--weights"):
        orch.start_training(loader(), num_epochs=2, resume=adapter, **OPTIONS)
    run = orch.start_training(loader(), num_epochs=2, resume=adapter, **options)
    assert "as the model is built" not in said(orch)  # what learns comes from the adapter
    assert len(run.history) == len(loader())
    assert difference(run.model(), plain(weights)) <= 1e-9


@pytest.mark.parametrize(
    "mode",
    [("pipeline", {}), ("tensor", {}), ("zero", {"zero_stage": 2}), ("zero", {"zero_stage": 3})],
    ids=["pipeline", "tensor", "zero2", "zero3"],
)
def test_weights_from_a_file_are_where_a_spread_model_begins(
    session: Session, tmp_path: Path, mode: tuple[str, dict[str, Any]]
) -> None:
    orch, base = session.orch, made("Transformer", seed=7)
    path = tmp_path / "base.pt"
    torch.save(base.state_dict(), path)
    orch.set_mode(mode[0], path="relay", **mode[1])
    orch.share(CELL, "model")
    orch.register_model("Transformer")
    run = orch.start_training(loader(), num_epochs=1, weights=path, fresh=True, **OPTIONS)
    assert difference(run.model(), plain_steps(base.double(), loader(), 1)) <= 1e-9


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_from_a_file_of_weights_equals_plain_pytorch(tmp_path: Path, workers: int) -> None:
    torch.manual_seed(5)
    net, path = SmallNet(norm=False), tmp_path / "net.pt"
    torch.save({f"module.{name}": value for name, value in net.state_dict().items()}, path)
    with direct_session(workers) as session:
        session.register_model(SmallNet)
        session.start_training(vectors(), num_epochs=1, **OPTIONS)
        run = session.start_training(vectors(), num_epochs=2, weights=str(path), **OPTIONS)
        assert difference(run.model(), plain_steps(net.double(), vectors(), 2)) <= 1e-9
        whole = session.save_checkpoint(tmp_path / "whole.pt")
        for given, told in (
            ({"weights": path, "resume": whole}, r"weights \(--weights\) would have no effect"),
            ({"save_only": "trainable"}, "this model has none: freeze them"),
        ):
            with pytest.raises(ConfigError, match=told):
                session.start_training(vectors(), num_epochs=3, **OPTIONS, **given)
        with pytest.raises(CheckpointError, match="there are no weights in"):
            session.start_training(vectors(), weights=tmp_path / "none.pt", **OPTIONS)
    closed = Orchestrator()
    closed.register_model(SmallNet)
    assert closed.forecast(vectors(), num_epochs=1, weights=path).steps == len(vectors())
