"""Weights of the hub: fetched once, pinned to a commit, from the cache without a network; refusals name the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.hf_hub import COMMIT, hub_of
from tests.support.processes import ROOT

save = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").save
pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")


def shards() -> dict[str, bytes]:
    torch.manual_seed(5)
    state = nn.Linear(3, 2).state_dict()
    files = {"model-00001-of-00002.safetensors": ["weight"], "model-00002-of-00002.safetensors": ["bias"]}
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    parts = {file: save({name: state[name] for name in names}) for file, names in files.items()}
    other = {"consolidated.safetensors": save({"other": state["bias"]}), "pytorch_model.bin": b"never read"}
    return {**parts, **other, "model.safetensors.index.json": json.dumps(index).encode()}


PROGRAM = """
import torch
from torch import nn
from guava_nb.errors import GuavaError
from guava_nb.replica.model.pretrained import load_pretrained, pinned

def told(name, model=None):
    try:
        return pinned(name) if model is None else load_pretrained(name, model)
    except GuavaError as error:
        return f"{type(error).__name__}: {error}"

net = nn.Linear(3, 2)
found = pinned("hf:me/split")
tuned = nn.Sequential()
tuned.base, tuned.head = nn.Linear(3, 2).requires_grad_(False), nn.Linear(2, 2)
print(repr([
    found, load_pretrained(found, net), net.bias.tolist(), told("hf:me/none"), told("hf:me/split@v9"), told("hf:me/pickled"),
    told("hf:"), told("hf:me/one", nn.Linear(3, 3)), told("hf:me/based", tuned),
    told("hf:me/one", nn.Conv1d(1, 1, 1, bias=False)),
]))
"""


def run(program: str, folder: Path, **variables: str) -> Any:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    (folder / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.script", str(folder / "program.py")], cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), **variables}, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return eval(done.stdout)


@pytest.mark.timeout(120)
def test_weights_come_once_and_what_is_wrong_is_told(tmp_path: Path) -> None:
    one = save(nn.Linear(3, 2).state_dict())
    repositories = {
        "me/split": shards(),
        "me/one": {"model.safetensors": one},
        "me/based": {"model.safetensors": save({"base.weight": torch.ones(2, 3), "base.bias": torch.ones(2)})},
        "me/pickled": {"pytorch_model.bin": b"never read"},
    }
    with hub_of(repositories) as hub:
        found, added, bias, none, revision, pickled, empty, shapes, based, names = run(
            PROGRAM, tmp_path, HF_ENDPOINT=hub.address, HF_HOME=str(tmp_path / "cache")
        )
        asked = list(hub.asked)
    torch.manual_seed(5)
    assert (found, added, bias) == (f"hf:me/split@{COMMIT}", [], nn.Linear(3, 2).bias.tolist())
    assert not any("consolidated" in one or "pytorch_model" in one for one in asked)
    assert none.startswith("ConfigError: hf:me/none cannot be loaded") and "look at the name" in none
    assert "look at the revision" in revision
    assert "has no .safetensors file" in pickled and "save_pretrained" in pickled
    assert "names no repository" in empty
    assert "other shapes: weight: (2, 3) in" in shapes and based == ["head.weight", "head.bias"]
    assert "not in the model: bias" in names

    # The hub is gone: what is in the cache serves, and of the rest it is told what to do.
    again = (
        "from guava_nb.replica.model.pretrained import pinned\ndef told(name):\n    try:\n        return pinned(name)\n"
    )
    again += "    except Exception as error:\n        return str(error)\n"
    again += "print([told('hf:me/split'), told('hf:me/new')])"
    kept, lacking = run(again, tmp_path, HF_ENDPOINT=hub.address, HF_HOME=str(tmp_path / "cache"))
    assert kept == found
    assert "does not reach the hub" in lacking and "hf download me/new" in lacking and "--weights PATH" in lacking
