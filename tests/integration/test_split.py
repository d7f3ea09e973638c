"""The two-sided form in two processes: CPULoader here, GPUTrainer in a script of its own whose model nobody else knows."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from guava_nb import ColabGPUTrainer, ConfigError, CPULoader, DistributedConfig, GPUTrainer
from guava_nb.data.loader_sources import LoadError
from guava_nb.protocol.joincode import JoinCode
from tests.support.console import Console
from tests.support.processes import eventually
from tests.support.split import Rows, StandIn

CONFIG = DistributedConfig(grace_s=20, rejoin_timeout_s=60, batch_size=32)
GPU_SIDE = """
import os, threading, torch
from torch import nn
from guava_nb import ColabGPUTrainer, DistributedConfig, GPUTrainer


class MyModel(nn.Module):  # this process's __main__ alone has it
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        return self.layers(x)


config = DistributedConfig(grace_s=20, rejoin_timeout_s=60)
def show(code, call):
    print("shown", code.encode(), call, flush=True)

def fresh(**arguments):
    torch.manual_seed(3)
    model = MyModel().double()
    trainer.setup_model(model, **arguments)

trainer = GPUTrainer(port=0, device="cpu", config=config, show=show)
fresh()
answer = trainer.listen().encode()
"""


def plain(rows: int, epochs: int, **arguments: Any) -> torch.nn.Module:
    """The same training without guava_nb, in this process."""
    from torch import nn

    class MyModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

        def forward(self, x: torch.Tensor) -> Any:
            return self.layers(x)

    torch.manual_seed(3)
    model = MyModel().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    order = torch.Generator().manual_seed(CONFIG.seed)
    loader: Any = DataLoader(Rows(rows), 32, shuffle=True, generator=order)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def difference(ours: dict[str, torch.Tensor], theirs: torch.nn.Module) -> float:
    expected = theirs.state_dict()
    assert ours.keys() == expected.keys()
    return max(float((ours[name].double() - value.double()).abs().max()) for name, value in expected.items())


@pytest.fixture(scope="module")
def gpu() -> Iterator[Console]:
    with Console() as console:
        console.code = JoinCode.decode(console.run(GPU_SIDE))  # type: ignore[attr-defined]
        yield console


def its_weights(gpu: Console, tmp_path: Path) -> dict[str, torch.Tensor]:
    gpu.run(f"torch.save(trainer.model.state_dict(), {str(tmp_path / 'gpu.pt')!r})")
    found: dict[str, torch.Tensor] = torch.load(tmp_path / "gpu.pt", weights_only=True)
    return found


@pytest.mark.timeout(150)
def test_the_gpu_side_listens_and_its_own_model_and_optimizer_are_trained_in_place(
    gpu: Console, tmp_path: Path
) -> None:
    gpu.run("fresh(learning_rate=0.01)\nbefore = trainer.model")
    gpu.start("answer = [trainer.start_training(), trainer.model is before]")
    loader = CPULoader(config=CONFIG)
    loader.setup_dataset(Rows(), batch_size=32, val_dataset=Rows(37))
    code: JoinCode = gpu.code  # type: ignore[attr-defined]
    run = loader.start_loading(gpu_host="127.0.0.1", gpu_port=code.port, epochs=3, join_code=code, progress=False)
    reason, same = gpu.finish(30)
    assert "closed the session" in reason and same
    expected = plain(101, 3)
    assert difference(its_weights(gpu, tmp_path), expected) <= 1e-9
    assert difference(run.model().state_dict(), expected) <= 1e-9  # after the session, too
    assert [record["samples"] for record in run.validations] == [37] * 3
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)
    with pytest.raises(Exception, match="worker's process only"):
        run.model()(torch.zeros(1, 10))
    gpu.run("answer = None\nassert not any(p._backward_hooks for p in trainer.model.parameters())")


@pytest.mark.timeout(150)
def test_validation_as_a_service_is_exact_moves_no_weights_and_refuses_training(gpu: Console) -> None:
    gpu.run("fresh(criterion=nn.CrossEntropyLoss(label_smoothing=0.1))")
    gpu.start("answer = trainer.start_service(mode='validation')")
    code: JoinCode = gpu.code  # type: ignore[attr-defined]
    with CPULoader(config=CONFIG) as loader:
        loader.setup_dataset(Rows(21), batch_size=8, shuffle=False)
        result = loader.run_validation(join_code=code)
        model = plain(21, 0)
        x, y = Rows(21).x, Rows(21).y
        loss = torch.nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
        assert result["average_loss"] == pytest.approx(float(loss), abs=1e-12)
        assert result["accuracy"] == float((model(x).argmax(1) == y).double().mean())
        assert result["total_samples"] == 21
        again = loader.run_validation(val_dataset=(x.numpy()[:5], y.numpy()[:5]), join_code=code)
        assert again["total_samples"] == 5
        assert loader.orchestrator is not None
        cluster = loader.orchestrator._open_cluster()
        [session] = [cluster.session(rank) for rank in cluster.roster.alive()]
        assert session is not None
        from guava_nb.protocol.messages import Channel

        assert session.wire.out_bytes[Channel.CHECKPOINT] == session.wire.in_bytes[Channel.CHECKPOINT] == 0
        with pytest.raises(ConfigError, match="start_training"):
            loader.start_loading(join_code=code)
    gpu.interrupt()
    assert gpu.finish(20) == "it was asked to leave"


@pytest.mark.timeout(150)
def test_a_data_set_that_raises_is_told_here_and_the_gpu_side_stays(gpu: Console) -> None:
    gpu.run("fresh(learning_rate=0.01)")
    gpu.start("answer = trainer.start_training()")
    code: JoinCode = gpu.code  # type: ignore[attr-defined]
    with CPULoader(config=CONFIG) as loader:
        loader.setup_dataset(Rows(fails_at=17), batch_size=8, shuffle=False)
        with pytest.raises(LoadError, match="sample 17 .*this row is rotten"):
            loader.start_loading(join_code=code, progress=False)
        assert loader.orchestrator is not None
        assert [worker.state for worker in loader.orchestrator.status().workers] == ["ready"]
        loader.setup_dataset(Rows(), batch_size=32)
        assert len(loader.start_loading(join_code=code, epochs=1, progress=False).history) == 4
    assert "closed the session" in gpu.finish(30)


CPU_SIDE = """
import os, torch
from guava_nb import CPULoader, DistributedConfig
from tests.support.split import Rows, StandIn

loader = CPULoader(config=DistributedConfig(grace_s=20, rejoin_timeout_s=60))
loader.setup_dataset(Rows(), batch_size=8)
"""


@pytest.mark.timeout(150)
def test_a_killed_cpu_side_comes_back_as_another_process_and_goes_on_with_the_model(gpu: Console) -> None:
    gpu.run("fresh(learning_rate=0.01)\nstart = trainer.model.layers[0].weight.detach().clone()")
    gpu.start("answer = trainer.start_training()")
    code: JoinCode = gpu.code  # type: ignore[attr-defined]
    with Console() as cpu:
        cpu.run(CPU_SIDE)
        cpu.start(
            f"with loader:\n run = loader.start_loading(join_code={code.encode()!r}, epochs=10_000, detach=True)\n"
            " while len(run.history) < 5: run.wait(0.05)\n print('on its way', flush=True)\n run.wait()\n"
        )
        cpu.wait_line("on its way")
        os.kill(cpu.process.pid, signal.SIGKILL)
        cpu.process.wait(10)
    with CPULoader(config=CONFIG) as loader:
        loader.setup_dataset(Rows(), batch_size=32)

        def trained() -> Any:
            try:
                return loader.start_loading(join_code=code, epochs=2, progress=False)
            except Exception as error:
                assert "another orchestrator" in str(error), error
                return None

        run = eventually(trained, 30, "the place of the dead CPU side is free")
        assert (len(run.history), run.lost_samples, run.duplicated_samples) == (8, 0, 0)
    assert "closed the session" in gpu.finish(30)
    gpu.run("assert not torch.equal(start, trainer.model.layers[0].weight)")


@pytest.mark.timeout(150)
def test_the_cpu_side_listens_and_a_killed_gpu_side_is_replaced(gpu: Console, tmp_path: Path) -> None:
    way = StandIn()
    loader = CPULoader(config=CONFIG.replace(master_port=0, rejoin_timeout_s=90), tunnel=way)
    with Console() as first:
        code = loader.listen()
        assert way.relay is not None and code.port == way.relay.port, "it is dialled through the tunnel"
        first.run(GPU_SIDE.replace("answer = trainer.listen().encode()", ""))
        dialling = (
            f"trainer.close()\nanswer = trainer.start_training('127.0.0.1', {code.port}, join_code={code.encode()!r})"
        )
        first.run("fresh(learning_rate=0.01)")
        first.start(dialling)
        loader.setup_dataset(Rows(), batch_size=32)
        loader.orchestrator.wait_for_workers(1, timeout=60)  # type: ignore[union-attr]
        run = loader.start_loading(epochs=120, detach=True)
        eventually(lambda: len(run.history) > 6, 60, "it trains")
        gpu.run("fresh(learning_rate=0.01)")
        gpu.start(dialling)
        eventually(lambda: len(loader.orchestrator.status().workers) == 2, 60, "the second one is here")  # type: ignore[union-attr]
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait(10)
    run.wait(100)
    assert run.state == "done", run.message
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)
    weights = run.model().state_dict()
    loader.close()
    assert "closed the session" in gpu.finish(30)
    assert all(torch.equal(value, weights[name]) for name, value in its_weights(gpu, tmp_path).items())


@pytest.mark.timeout(150)
def test_colab_s_form_goes_through_a_tunnel_that_is_cut_once() -> None:
    with Console() as colab:
        colab.run(GPU_SIDE.replace("trainer = GPUTrainer(", "trainer = ColabGPUTrainer(") + "answer = None")
        colab.run(
            "from tests.support.split import StandIn\nway = StandIn()\nfresh(learning_rate=0.01)\nimport signal\n"
            "signal.signal(signal.SIGUSR2, lambda *_: [link.cut(reset=True) for link in list(way.relay.links)])"
        )
        colab.start(
            "answer = [trainer.start_training_with_tunnel(tunnel=way), way.relay.links[0].bytes['up'], len(way.relay.links)]\n"
            "trainer.close()\n"
        )
        with CPULoader(config=CONFIG) as loader:
            loader.setup_dataset(Rows(), batch_size=32)
            code = colab.wait_line("^shown guava1:").split()[1]
            run = loader.start_loading(join_code=code, epochs=60, detach=True)
            eventually(lambda: len(run.history) > 5, 40, "it trains")
            os.kill(colab.process.pid, signal.SIGUSR2)  # its relay cuts both connections
            run.wait(60)
            assert run.state == "done", run.message
            assert difference(run.model().state_dict(), plain(101, 60)) <= 1e-9
        reason, through, links = colab.finish(30)
        assert "closed the session" in reason and through > 0 and links >= 3


def test_a_tunnel_without_a_token_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pyngrok = pytest.importorskip("pyngrok")
    from pyngrok import conf

    assert pyngrok
    monkeypatch.delenv("NGROK_AUTHTOKEN", raising=False)
    monkeypatch.setattr(conf, "DEFAULT_NGROK_CONFIG_PATH", str(tmp_path / "none.yml"))
    monkeypatch.setattr(conf, "_default_pyngrok_config", None)  # it keeps what the environment had when it was made
    trainer = ColabGPUTrainer(port=0, device="cpu", config=CONFIG)
    trainer.setup_model(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="NGROK_AUTHTOKEN"):
        trainer.start_training_with_tunnel()
    trainer.close()


def test_what_is_missing_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GUAVA_JOIN_CODE", raising=False)
    loader = CPULoader(config=CONFIG)
    with pytest.raises(ConfigError, match="setup_dataset"):
        loader.start_loading()
    loader.setup_dataset((np.zeros((4, 2), np.float32), np.zeros(4, np.int64)))
    with pytest.raises(ConfigError, match=r"192\.168\.1\.100 accepts only peers with its join code.*GUAVA_JOIN_CODE"):
        loader.start_loading(gpu_host="192.168.1.100", gpu_port=29500)
    trainer = GPUTrainer(port=0, device="cpu", config=CONFIG)
    with pytest.raises(ConfigError, match="setup_model"):
        trainer.start_training()
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="not both"):
        trainer.setup_model(model, optimizer=torch.optim.SGD(model.parameters(), 0.1), learning_rate=0.1)
    trainer.setup_model(model)
    with pytest.raises(ConfigError, match="validation, inference"):
        trainer.start_service(mode="training")


@pytest.mark.timeout(150)
def test_two_gpu_sides_with_models_of_their_own_begin_with_the_first_one_s(tmp_path: Path) -> None:
    with Console() as first, Console() as second:
        for console in (first, second):
            console.start(GPU_SIDE + "fresh(learning_rate=0.01)\n")
        codes: Any = [JoinCode.decode(console.finish()) for console in (first, second)]
        second.run("for p in trainer.model.parameters(): p.data.add_(1.0)")
        for console in (first, second):
            console.start("answer = trainer.start_training()")
        loader = CPULoader(config=CONFIG)
        loader.setup_dataset([(x, y) for x, y in zip(Rows().x.float().double(), Rows().y, strict=True)], batch_size=32)
        run = loader.start_loading(join_code=codes, epochs=2, progress=False)
        assert all("closed the session" in console.finish(30) for console in (first, second))
        assert sum(worker["samples"] for worker in run.report()["workers"]) == 202
        weights = run.model().state_dict()
        for console in (first, second):
            assert all(torch.equal(value, weights[name]) for name, value in its_weights(console, tmp_path).items())


@pytest.mark.timeout(150)
def test_inference_as_a_service_in_the_order_of_the_file(tmp_path: Path) -> None:
    """A CSV with three bad rows is predicted by a model that only the other process has; then from arrays on disk."""
    x = Rows(101).x.float()
    lines = [",".join(f"c{k}" for k in range(10))] + [",".join(repr(float(v)) for v in row) for row in x]
    lines[5:5] = ["1,2,3", ",".join(["x"] * 10), ",".join(["0"] * 9 + [""])]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    np.save(tmp_path / "x.npy", x.numpy())
    with Console() as gpu:
        code = JoinCode.decode(gpu.run(GPU_SIDE + "trainer.setup_model(trainer.model.float())\n"))
        gpu.start("answer = trainer.start_service(mode='inference', once=True)")
        with CPULoader(config=CONFIG) as loader:
            with pytest.warns(UserWarning, match="3 of 104 rows"):
                loader.setup_dataset(tmp_path / "t.csv", batch_size=16, on_bad_rows="skip")
            found = loader.run_inference(join_code=code, top_k=3, progress=False)
            full = loader.run_inference(
                inference_dataset=tmp_path / "x.npy", join_code=code, return_full_probabilities=True, progress=False
            )
        assert "closed the session" in gpu.finish(30)
    model = plain(101, 0).float()
    with torch.no_grad():
        expected = torch.softmax(model(x), 1)
    assert found["total_samples"] == 101 and found["estimated_memory_mb"] > 0
    assert np.array_equal(found["predictions"], expected.topk(3).indices.numpy())
    np.testing.assert_allclose(found["confidences"], expected.topk(3).values.numpy(), atol=1e-6)
    assert np.array_equal(full["predictions"], found["predictions"][:, 0])
    np.testing.assert_allclose(full["probabilities"], expected.numpy(), atol=1e-6)
