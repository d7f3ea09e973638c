"""A student fine-tunes a small transformer with LoRA, restarts the kernel in the middle, and finds the result.

transformers and peft are no dependencies: without them this is skipped. The model is made from a configuration; nothing is
downloaded.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.integration.test_two_kernels import open_session
from tests.support.kernels import ROOT, Kernel

MODEL = """%%guava_share --name gpt
import time
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config

def Base():
    return AutoModelForCausalLM.from_config(GPT2Config(
        vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))

def Tuned():
    return get_peft_model(Base(), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0))

def step(model, batch):
    time.sleep(0.02)
    return model(**batch).loss
"""
DATA = """
import torch
from torch.utils.data import DataLoader
tokens = [torch.tensor([(start + k) % 31 for k in range(8)]) for start in range(40)]
train = DataLoader([{"input_ids": one, "labels": one} for one in tokens], 8)
"""
#: What peft itself makes of the adapter, over the same base, against the model that was trained.
PLAIN = """
from peft import PeftModel
trained = run.model().eval()
trained.save_pretrained("{folder}/peft")
base = Base()
base.load_state_dict(torch.load("{folder}/base.pt", weights_only=True))
loaded = PeftModel.from_pretrained(base, "{folder}/peft").eval()
batch = next(iter(train))
with torch.no_grad():
    far = float((loaded(**batch).logits - trained(**batch).logits).abs().max())
print(far)
"""
TRAIN = "%guava_train --model Tuned --step step --data train --optimizer AdamW --lr 0.02 --save-only trainable"


def notebook(state: Path) -> Kernel:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    kernel = Kernel(XDG_STATE_HOME=str(state), JPY_SESSION_NAME="tuning.ipynb", PYTHONPATH=paths)
    kernel.run("%load_ext guava_nb")
    return kernel


@pytest.mark.timeout(300)  # transformers is imported in three processes
def test_a_kernel_is_restarted_in_the_middle_of_fine_tuning_and_the_result_is_found(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    gpu, laptop = notebook(tmp_path / "gpu"), notebook(tmp_path / "laptop")
    try:
        code, _ = open_session(laptop, "--workers 1")
        worker = gpu.start(f"%guava_worker {code} --name colab", timeout_s=240)
        laptop.run(MODEL)
        laptop.run(f"{DATA}\ntorch.manual_seed(1)\ntorch.save(Base().state_dict(), {str(tmp_path / 'base.pt')!r})")
        line = f"{TRAIN} --weights {tmp_path / 'base.pt'} --epochs 30"
        laptop.start(line, timeout_s=120)
        laptop.wait_for("step [1-9][0-9]", 90)
        laptop.kill()
        laptop.close()

        laptop = notebook(tmp_path / "laptop")
        shown = laptop.run("%guava_up --workers 1")
        assert "--resume session" in shown, shown
        laptop.run(MODEL)
        laptop.run(DATA)
        told = laptop.run(f"{line} --resume session --out run", 120)
        assert "goes on after step" in told, told
        first, last = map(int, laptop.run("print(run.history[0]['step'], run.history[-1]['step'])").split())
        assert first > 1 and last == 150
        assert laptop.run("run.state, run.lost_samples").strip() == "('done', 0)"
        assert laptop.run("run.history[-1]['loss'] < run.history[0]['loss'] < 3.5").strip() == "True"  # log(32)

        saved = laptop.run(f"%guava_save {tmp_path / 'adapter.pt'}")
        assert re.search(r"Saved [\d.]+ kB", saved), saved
        names = laptop.run(f"sorted(torch.load({str(tmp_path / 'adapter.pt')!r}, weights_only=True)['model'])")
        assert names.count("lora_A") == names.count("lora_B") == 2 and "wte" not in names, names
        assert (tmp_path / "adapter.pt").stat().st_size * 2 < (tmp_path / "base.pt").stat().st_size
        assert float(laptop.run(PLAIN.format(folder=str(tmp_path))).split()[-1]) < 1e-5  # a library may tell more
        laptop.run("%guava_down")
        assert worker()[0] == "ok"
    finally:
        for kernel in (gpu, laptop):
            kernel.close()
