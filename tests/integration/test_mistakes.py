"""Mistakes that everybody makes once, in a real kernel: each is answered at once by a sentence that says what to do."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from guava_nb.protocol.joincode import JoinCode
from tests.integration.test_two_kernels import DATA, SHARE, open_session
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
    ("--val trian", "did you mean train?"), ("--workers 2", "--workers is an option of %guava_up"),
    ("--out print", "would hide Python's own print"), ("--optimizer optim.Adam", "(did you mean 'Adam'?)"),
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
        ("%guava_up --epochs 3", "--epochs is an option of %guava_train"),
        ("%guava_up --on gpu1", "nothing starts workers by the name"),
        ("%guava_mode ddp", "did you mean data?"),
        ("%guava_files /", "every worker would get it"),
        ("%guava_push DataLoader", "DataLoader is a class"),
        ("%guava_push images.shape", "value = images.shape, then %guava_push value"),
        ('%guava_predict --generate --data "the quick"', "put the value into a variable"),
        ("%%guava_px\nawait x", "call asyncio.run(...)"),
        (f"drained = iter(train); list(drained)\n{TRAIN.replace('--data train', '--data drained')}", "used up before"),
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


SECOND_LOADERS = """
def rows(inputs, targets, size=64):
    return DataLoader(TensorDataset(inputs, targets), size)

one, double = rows(images, labels, 1), rows(images.double(), labels)
hot, column = rows(images, nn.functional.one_hot(labels, 10)), rows(images, labels[:, None])
alone, named = DataLoader(TensorDataset(images), 64), DataLoader([{"x": images[0], "y": labels[0]}] * 9, 3)
"""
SECOND_MODELS = """%%guava_share --name seconds
class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))

    def forward(self, x):
        return self.body(x.float())

class Raw(Normed):
    def forward(self, x):
        return self.body(x)
"""
#: Model, data and further words of a line behind a session with one worker.
TRAINED = [
    ("Normed", "one", "", "got one value per channel"), ("Raw", "double", "", "float32 of the data"),
    ("Normed", "hot", "", "do not fit the targets [64, 10]"), ("Normed", "column", "", "flatten both or neither"),
    ("Normed", "alone", "", "give a step instead"), ("Normed", "named", "", "give a step instead"),
    ("Net", "train", "--precision fp64", "leave float() out of forward"), ("Net", "train", "--amp", "--precision bf16 does it"),
    ("Net", "train", "--scheduler cosine --fresh", "did you mean 'CosineAnnealingLR'?"),
    ("guava_nb.foo:Net", "train", "", "'guava_nb' is installed on this machine and has no module 'foo'"),
    ("Net", "train", "--val test --metrics acuracy", "accuracy are measured without being named"),
    ("Net", "train", "--checkpoint-dir /sys", "/sys takes no files"),
]  # fmt: skip


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A disk with room for 64 KiB; None where this user may mount none."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], stderr=subprocess.DEVNULL, check=False
    )
    try:
        yield folder if made.returncode == 0 else None
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.timeout(240)
def test_mistakes_between_notebooks_and_on_a_full_disk(tmp_path: Path) -> None:
    notebook = {"XDG_STATE_HOME": str(tmp_path / "state"), "JPY_SESSION_NAME": "one.ipynb"}
    laptop, other = Kernel(**notebook), Kernel(**notebook)
    try:
        for kernel in (laptop, other):
            kernel.run("%load_ext guava_nb")
        answer(laptop, "%guava_up --tunnel ngrok", "set the environment variable NGROK_AUTHTOKEN")
        laptop.run(DATA)
        code, _ = open_session(laptop, "--workers 1")
        second = other.run("%guava_up --workers 1")
        assert "Another kernel has a session of this notebook open" in second and code not in second, second
        other.run("%guava_down")
        _join_in_vain(other, code)
        answer(laptop, f"%guava_worker {code}", "this code is of this notebook's own session")
        laptop.run("%guava_up --local 1")
        for cell in (SHARE, SECOND_MODELS, SECOND_LOADERS):
            laptop.run(cell)
        for model, data, words, wanted in TRAINED:
            answer(laptop, f"{TRAIN.replace('Net', model).replace('train --loss', f'{data} --loss')} {words}", wanted)
        answer(laptop, "%%guava_px\nimport not_installed_xyz", "%guava_pip installs it here")
        laptop.run(f"{TRAIN} --max-steps 1")
        answer(laptop, "%guava_save /sys/net.pt", "Choose another place with save_checkpoint(path) (%guava_save PATH)")
        with small_disk(tmp_path / "disk") as disk:
            if disk is not None:
                _on_a_full_disk(laptop, disk)
        laptop.run("%guava_down")
        answer(other, f"%guava_worker {code}", "the session of this code was closed")
    finally:
        for kernel in (laptop, other):
            kernel.close()
    if disk is None:
        pytest.skip("the full disk needs the right to mount one; all else was answered")


def _join_in_vain(kernel: Kernel, code: str) -> None:
    right = JoinCode.decode(code)
    for device in ("cuda:31", "cuda:99"):
        answer(kernel, f"%guava_worker {code} --device {device}", "here are: cpu")
    for host, port, pin, secret, wanted in [
        (right.host, right.port, right.fingerprint, b"of another notebk", "it does not know this join code"),
        (right.host, right.port, b"x" * 16, right.secret, "a session that was closed and opened again"),
        (right.host, 1, right.fingerprint, right.secret, "no session listens here"),
        ("no.such.host.example", 1, right.fingerprint, right.secret, "is this machine online"),
    ]:
        told = answer(kernel, f"%guava_worker {JoinCode.new(host, port, pin, secret[:16]).encode()}", wanted)
        assert ".;" not in told and secret.hex() not in told, told
    answer(kernel, f"%guava_worker {code[:-3]}", "the join code is cut off")


def _on_a_full_disk(kernel: Kernel, disk: Path) -> None:
    answer(kernel, f"%guava_save {disk}/net.pt", "No space left on device: it needs more than")
    assert list(disk.iterdir()) == []
    kernel.run(f"with open({str(disk / 'filled')!r}, 'wb', 0) as filled: filled.write(bytes(65536))")
    answer(kernel, f"%guava_save {disk}/net.pt", "are free in")
    answer(kernel, f"%guava_export {disk}/train.py", "No space left on device; make room, or give another path")
    answer(kernel, f"%guava_runs --csv {disk}/runs.csv", "No space left on device; name another file")
    answer(
        kernel,
        f"%guava_predict --data test --path {disk}/found --full",
        "give a path on a larger disk, or ask for less",
    )
    told = kernel.run(f"{TRAIN} --epochs 1 --save-every 5 --log csv --checkpoint-dir {disk} --out full")
    assert told.count("was not saved: No space left on device") == 1 and "checkpoints of run-" in told, told
    assert "cannot be written now" in told and kernel.run("full.state").strip() == "'done'", told
