"""Mistakes that everybody makes once, in a real kernel: each is answered at once by a sentence that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_two_kernels import DATA, SHARE
from tests.support.kernels import Kernel

LOSSES = """%%guava_share --name losses
def nan_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets) * float("nan")

def mse(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)

class Big(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = nn.Linear(64, 10)

    def forward(self, x):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
"""
BAD_DATA = """
def rows(inputs, targets):
    return DataLoader(TensorDataset(inputs, targets), 10)

classes = torch.randint(0, 10, (40,))
narrow, unknown = rows(torch.randn(40, 50), classes), rows(torch.randn(40, 64), classes + 10)
real, empty = rows(torch.randn(40, 64), torch.rand(40)), rows(torch.randn(0, 64), torch.rand(0))
class Mine(nn.Module):
    pass
"""
TRAIN = "%guava_train --model Net --data train --loss CrossEntropyLoss --fresh"


@pytest.mark.timeout(240)
def test_each_mistake_is_answered_by_what_to_do(tmp_path: Path) -> None:
    kernel = Kernel()
    try:
        kernel.run("%load_ext guava_nb")
        answer(kernel, TRAIN, "no session is open here: run %guava_up first")
        answer(kernel, "%guava_up --tunnel cloudflard", 'Did you mean "cloudflared"?')
        answer(kernel, "%guava_up --tunnel ssh:nobody@127.0.0.1:1", "check that its ssh server runs")
        answer(
            kernel, "%env NGROK_AUTHTOKEN=wrong\n%guava_up --tunnel ngrok", "copy it from https://dashboard.ngrok.com"
        )
        kernel.run(DATA)
        kernel.run("%guava_up --local 1")
        answer(kernel, "%%guava_share\nimport not_installed_xyz", "%guava_pip not_installed_xyz at the workers")
        for cell in (SHARE, LOSSES, BAD_DATA):
            kernel.run(cell)
        for cell, wanted in [
            (TRAIN.replace("--data train", "--data narrow"), "takes 64 values for each row got 50"),
            (TRAIN.replace("--data train", "--data unknown"), "labels of classes go from 0 to"),
            (TRAIN.replace("--data train", "--data real"), "labels.long()"),
            (TRAIN.replace("--data train", "--data empty"), "makes no batches from 0 samples"),
            (TRAIN.replace("--data train", "--data train.dataset"), "wrap it in a DataLoader"),
            (TRAIN.replace("CrossEntropyLoss", "mse"), "for classes the loss is CrossEntropyLoss"),
            (TRAIN.replace("CrossEntropyLoss", "nan_loss"), "lower the learning rate"),
            (TRAIN.replace("Net", "Big"), "use a smaller model, lower precision or another device"),
            (TRAIN.replace("Net", "Mine"), "put %%guava_share on top of the cell that defines it"),
            ("%guava_mode tensor --tp 4\n" + TRAIN, "start 3 more with"),
            ("%guava_resume nothere.pt", f"{Path.cwd()} holds no checkpoint"),
        ]:
            text = answer(kernel, cell, wanted)
            assert "guava_nb/" not in text, text
        port = kernel.run("get_ipython().magics_manager.registry['GuavaMagics'].session._orchestrator.join_code.port")
        kernel.run("%guava_mode data")
        other = "from guava_nb import Orchestrator\nOrchestrator(master_port={}, session_file='off').open()"
        answer(kernel, other.format(port.strip()), "choose another, or 0 for any free one")
    finally:
        kernel.close()


def answer(kernel: Kernel, cell: str, wanted: str) -> str:
    status, text = kernel.attempt(cell)
    assert status == "error" and wanted in text, f"{cell}\n{text}"
    return text
