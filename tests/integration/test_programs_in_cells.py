"""`%%guava_run` in a real kernel: programs with loops of their own on two workers, their mistakes, interrupts and losses."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.kernels import ROOT, Kernel, wait_until

PROGRAMS = ROOT / "tests" / "support" / "programs"
ALONE = ["RANK=0", "WORLD_SIZE=1", "LOCAL_RANK=0", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=0"]
TWO_OPTIMIZERS = """%%guava_run OPTIONS
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
torch.manual_seed(0)
net = DDP(nn.Linear(4, 2).double())
first, second = (torch.optim.SGD([one], lr=0.1) for one in net.parameters())
rank, size = dist.get_rank(), dist.get_world_size()
for rows in pushed.double().chunk(3):
    net(rows[rank::size]).square().mean().backward()
    for optimizer in (first, second):
        optimizer.step()
        optimizer.zero_grad()
print("rank", rank, "of", size, "is", __name__)
trained = {name: value.detach() for name, value in net.module.state_dict().items()}
"""
NET = """%%guava_share --name model
import time
from torch import nn

def Net():
    return nn.Linear(4, 2)

def slow_loss(outputs, targets):
    time.sleep(0.05)
    return nn.functional.cross_entropy(outputs, targets)
"""
TRAIN = "%guava_train --model Net --data train --loss slow_loss --optimizer SGD --lr 0.1 --seed 3"

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))  # libraries as here
    try:
        kernel.run("%load_ext guava_nb")
        status, text = kernel.attempt("%%guava_run\n1")
        assert status == "error" and "run %guava_up first" in text
        kernel.run("%guava_up --local 2")
        yield kernel
    finally:
        kernel.close()


def error_of(kernel: Kernel, cell: str) -> str:
    status, text = kernel.attempt(cell)
    assert status == "error", text
    return text


@pytest.mark.parametrize("path", ["auto", "relay"])
def test_a_loop_with_two_optimizers_trains_as_in_one_process(kernel: Kernel, path: str) -> None:
    kernel.run("import torch; torch.manual_seed(1); pushed = torch.randn(12, 4)\n%guava_push pushed")
    shown = kernel.run(TWO_OPTIMIZERS.replace("OPTIONS", f"--path {path}"))
    for wanted in ("| rank 0 of 2 is __main__", "| rank 1 of 2 is __main__", "ended: run", "local-1", "local-2"):
        assert wanted in shown, shown
    kernel.run(
        "%guava_pull trained --rank 0\n%guava_pull trained --rank 0\nfirst = trained\n%guava_pull trained --rank 1"
    )
    plain = """
torch.manual_seed(0)
net = torch.nn.Linear(4, 2).double()
for rows in pushed.double().chunk(3):
    net(rows).square().mean().backward()
    with torch.no_grad():
        for one in net.parameters():
            one -= 0.1 * one.grad
            one.grad = None
[max((found[name] - value).abs().max().item() for name, value in net.state_dict().items()) < 1e-12 for found in (first, trained)]
"""
    assert kernel.run(plain).strip() == "[True, True]"


def test_a_gan_from_a_file_trains_as_in_one_process(kernel: Kernel, tmp_path: Path) -> None:
    one, two = tmp_path / "one.pt", tmp_path / "two.pt"
    for variable in ALONE:
        kernel.run(f"%env {variable}")
    kernel.run(f"%run {PROGRAMS / 'gan.py'} --save {one}\ntorch.set_default_dtype(torch.float32)")
    shown = kernel.run(f"%guava_run {PROGRAMS / 'gan.py'} --save {two}")
    assert "| loss " in shown and "ended: gan.py" in shown
    assert same(one, two)
    assert "no such file" in error_of(kernel, "%guava_run not_there.py").lower()


@pytest.mark.parametrize(
    "library", [one for one in ("transformers", "lightning_fabric", "accelerate") if importlib.util.find_spec(one)]
)
def test_a_library_that_makes_its_own_group_trains_as_in_one_process(
    kernel: Kernel, library: str, tmp_path: Path
) -> None:
    name = {"transformers": "trainer.py", "lightning_fabric": "fabric.py", "accelerate": "accelerated.py"}[library]
    words = {"transformers": str(tmp_path), "accelerate": f"--save {tmp_path / 'two.pt'}"}.get(library, "")
    shown = kernel.run(f"%guava_run {PROGRAMS / name} {words}", 120)
    assert "rank 1 of 2" in shown or library == "accelerate", shown
    if library == "accelerate":
        assert "epoch 1: 256 samples" in shown
        return
    kernel.run("%guava_pull weights --rank 0\nfound = weights")
    kernel.run(
        f"import os, sys; [os.environ.pop(one.split('=')[0], None) for one in {ALONE}]; sys.argv = ['', {words!r}]\n"
        f"exec(open({str(PROGRAMS / name)!r}).read())"
    )
    assert kernel.run("all((found[n] - weights[n]).abs().max() < 1e-7 for n in weights)").split()[-1] == "True"


def test_the_rank_that_failed_is_shown_first_and_all_others_end(kernel: Kernel) -> None:
    text = error_of(
        kernel,
        "%%guava_run\nimport os, time, torch.distributed as dist\ndist.init_process_group()\ndist.barrier()\n"
        "if os.environ['RANK'] == '0':\n    time.sleep(600)\n{}['mine']",
    )
    assert "raised KeyError: 'mine'" in text and "line 6" in text and "failed, so the program ends on local-" in text
    assert "KeyboardInterrupt" not in text and "guava_nb/" not in text, text
    for path in ("auto", "relay"):
        text = error_of(
            kernel,
            f"%%guava_run --path {path}\nimport torch, torch.distributed as dist\ndist.init_process_group()\n"
            "if dist.get_rank() == 1:\n    raise ValueError('of one rank')\ndist.all_reduce(torch.ones(2))",
        )
        assert (
            "raised ValueError: of one rank" in text and "GroupBroken" not in text and "left the group" not in text
        ), text
    assert "the program ended with exit status 3" in error_of(kernel, "%%guava_run\nimport sys; sys.exit(3)")
    assert "notebook syntax" in error_of(kernel, "%%guava_run\n!ls")
    kernel.run(TWO_OPTIMIZERS.replace("OPTIONS", ""))


def test_an_interrupt_ends_all_ranks_wherever_they_wait(kernel: Kernel) -> None:
    for path in ("auto", "relay"):
        ended = kernel.start(
            f"%%guava_run --path {path}\nimport time, torch, torch.distributed as dist\ndist.init_process_group()\n"
            "print('begun')\nif dist.get_rank():\n    time.sleep(600)\ndist.all_reduce(torch.ones(2))"
        )
        kernel.wait_for(r"(\| begun(.|\n)*){2}")
        kernel.interrupt()
        status, text = ended()
        assert status == "error" and "they stay in the session" in text and "Traceback" not in text, text
    assert "| rank 1 of 2" in kernel.run(TWO_OPTIMIZERS.replace("OPTIONS", ""))


@pytest.mark.parametrize("mode", ["data", "zero --zero 3"])
def test_a_run_goes_on_after_a_program(kernel: Kernel, mode: str) -> None:
    kernel.run(NET)
    kernel.run(
        "from torch.utils.data import DataLoader, TensorDataset\ntorch.manual_seed(2)\n"
        "train = DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,))), 8)"
    )
    kernel.run(f"%guava_mode {mode}\n")
    kernel.run(f"{TRAIN} --epochs 1 --fresh")
    kernel.run(TWO_OPTIMIZERS.replace("OPTIONS", ""))
    shown = kernel.run(f"{TRAIN} --epochs 1 --out run")
    assert "goes on from the weights of the last run" in shown
    kernel.run("torch.manual_seed(3)\nafter = {n: v.clone() for n, v in run.model().state_dict().items()}")
    kernel.run(f"{TRAIN} --epochs 1 --fresh")
    kernel.run(f"{TRAIN} --epochs 1 --out run")
    assert (
        kernel.run("all((run.model().state_dict()[n] - v).abs().max() < 1e-5 for n, v in after.items())").strip()
        == "True"
    )
    kernel.run(f"{TRAIN} --epochs 40 --detach --out run")
    assert "is in progress: wait for it, or stop it" in error_of(kernel, "%%guava_run\n1")
    kernel.run("%guava_stop\nrun.wait()")


def test_a_worker_that_dies_is_named_and_the_rest_go_on(kernel: Kernel) -> None:
    text = error_of(
        kernel,
        "%%guava_run\nimport os, signal, torch, torch.distributed as dist\ndist.init_process_group()\n"
        "if dist.get_rank() == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.all_reduce(torch.ones(2))",
    )
    assert "its process ended with signal 9" in text and "GroupBroken" not in text, text
    wait_until(lambda: "rank 0 of 1" in kernel.run(TWO_OPTIMIZERS.replace("OPTIONS", "")), lambda: "program of one", 20)


def same(first: Path, second: Path) -> bool:
    ours, theirs = (torch.load(path, weights_only=True) for path in (first, second))
    return ours.keys() == theirs.keys() and all(torch.allclose(ours[n], theirs[n], atol=1e-9, rtol=0) for n in ours)
