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

def no_return(outputs, targets):
    nn.functional.cross_entropy(outputs, targets)

def of_one(outputs):
    return outputs.sum()

class NoModule:
    pass

class Wide(nn.Module):
    def __init__(self, width=7):
        super().__init__()
        self.only = nn.Linear(64, width)

    def forward(self, x):
        return self.only(x)

class Sized(Wide):
    def __init__(self, width):
        super().__init__(width)

class NoInit(nn.Module):
    def __init__(self):
        self.only = nn.Linear(64, 10)

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
BAD_CALLBACK = """
class Bad(Callback):
    def on_step(self, *args):
        raise ValueError("mine")

bad = Bad()
"""
#: Words behind a line that is right, or in the place of its model or loss; all are answered before a run begins.
WORDS = [
    ("--epochs 0", "0 is not 1 or more"), ("--epochs 1.5", "is not a whole number"), ("--lr fast", "is not a number"),
    ("--lr nan", "not a finite number"), ("--lr -1", "Invalid learning rate"), ("--optimizer Adamm", "did you mean 'Adam'?"),
    ("--optimizer-args {lr:0.1}", 'JSON has its names in double quotes: {"lr": ...}'), ("--epoch", "did you mean --epochs"),
    ('--optimizer SGD --optimizer-args {"betas":[0.9,0.9]}', "SGD does not take 'betas'; it takes: lr, momentum"),
    ("--scheduler StepLR", "missing a required argument: 'step_size'"), ("--save-every 5x", "90s, 10min or 1.5h"),
    ("--save-best", "a value is missing after it"), ("--patience 3", "--patience needs --val"),
    ("--log tensorbord", "csv, tensorboard"),
    ("--callbacks stopp", "no variable stopp"), ("--weights nothere.pt", "there are no weights in nothere.pt"),
    ("--max-steps 0", "0 is not 1 or more"), ("--checkpoint-dir nowhere/deep", "there is no folder nowhere"),
    ("--resume session", "contradict each other"), ('--val "train', "never closes it"),
    ("--val trian", "did you mean train?"),
]  # fmt: skip
PLACES = [
    ("Net", "Nett", "did you mean 'Net'?"), ("Net", "Net()", "give the name alone, Net"), ("Net", "NoModule", "torch.nn.Module"),
    ("Net", "Sized", "missing a required argument: 'width'"), ("Net", "NoInit", "before Module.__init__() call"),
    ("CrossEntropyLoss", "CrossEntropyLos", "did you mean 'CrossEntropyLoss'?"),
    ("CrossEntropyLoss", "nn.MSELoss()", "give the name alone, nn.MSELoss"),
    ("CrossEntropyLoss", "of_one", "is called with 2 arguments and takes 1: outputs"),
    ("CrossEntropyLoss", "no_return", "returned None; return a scalar tensor"), ("train", "5", "come from a DataLoader"),
    ("train", "train[0]", "not subscriptable"),
]  # fmt: skip
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
            answer(kernel, cell, wanted)
        kernel.run("%guava_mode data")
        for words, wanted in WORDS:
            answer(kernel, f"{TRAIN} {words}", wanted)
        for word, other, wanted in PLACES:
            answer(kernel, TRAIN.replace(f" {word} ", f" {other} "), wanted)
        _on_other_lines(kernel, tmp_path)
        port = kernel.run("get_ipython().magics_manager.registry['GuavaMagics'].session._orchestrator.join_code.port")
        other = "from guava_nb import Orchestrator\nOrchestrator(master_port={}, session_file='off').open()"
        answer(kernel, other.format(port.strip()), "choose another, or 0 for any free one")
    finally:
        kernel.close()


def answer(kernel: Kernel, cell: str, wanted: str) -> str:
    status, text = kernel.attempt(cell)
    assert status == "error" and wanted in text and "guava_nb/" not in text, f"{cell}\n{text}"
    return text


def _on_other_lines(kernel: Kernel, folder: Path) -> None:
    told = kernel.run("%%guava_share --name half\nclass Half(nn.Linear):\n    rows: DataLoader = None")
    assert "begin that cell with: from torch.utils.data.dataloader import DataLoader" in told, told
    kernel.run("%guava_share --forget half")
    kernel.run(f"{TRAIN} --max-steps 1 --out run\n%guava_save {folder}/net.pt")
    for cell, wanted in [
        (f"%guava_resume {folder}/net.pt --model Wide\n%guava_validate --data train", "belongs to another model"),
        ("%guava_save /nonexistent/net.pt", "there is no folder /nonexistent"),
        ("%guava_up --workers 0", "0 is not 1 or more"),
        ("%guava_up --local 99999", "give a smaller number"),
        ("%guava_up --loca 1", "did you mean --local?"),
        ("%guava_mode pipelines", "did you mean"),
        ("%guava_log nobody", "nobody"),
        ("%guava_push classes,trian", "did you mean train?"),
        ("%guava_predict --data train --top-k 0", "0 is not 1 or more"),
        ("%guava_runs run-99", "run-99"),
        ("%guava_worker guava1:abc", "the join code is cut off"),
    ]:
        answer(kernel, cell, wanted)
    # Nothing is learnt by a rate of 0, so the second validation is no better; the table says the rate, though it is 0.
    kernel.run(f"from guava_nb import Callback\nstop = Callback()\n%cd -q {folder}")
    told = kernel.run(
        f"{TRAIN} --val test --epochs 9 --lr 0 --patience 1 --save-best loss --callbacks stop --log csv -o run"
    )
    assert "learning rate" in told and kernel.run("run.status().epoch, len(run.validations)").strip() == "(2, 2)", told
    kept = [path.name for path in (folder / "checkpoints").iterdir()]
    assert [name for name in kept if "best" in name] and [name for name in kept if name.endswith(".csv")], kept
    kernel.run(BAD_CALLBACK)
    kernel.run(f"{TRAIN} --callbacks bad --detach -o run\nrun.wait()")
    for _ in range(2):  # again as at first: raising it adds no frames
        assert answer(kernel, "run.result()", "ValueError: mine").count("Cell In") == 2
    kernel.run(f"{TRAIN} --epochs 500 --detach")
    answer(kernel, TRAIN, "a run is going on; %guava_status shows it")
    answer(kernel, "%guava_validate --data train", "%guava_stop")
    assert "stopped" in kernel.run("%guava_down")
    assert "Nothing was open" in kernel.run("%guava_down")
    kernel.run("%guava_up --workers 1")
