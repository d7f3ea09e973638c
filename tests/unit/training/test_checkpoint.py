from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from guava_nb.errors import CheckpointError
from guava_nb.protocol.messages import Factory
from guava_nb.training import checkpoint
from guava_nb.training.plan import Position
from tests.support.training import SmallNet, spec


def save(path: Path) -> SmallNet:
    model = SmallNet()
    state = {"model": model.state_dict(), "optimizer": None, "scheduler": None, "scaler": None}
    checkpoint.write(path, state, 7, Position(1, 2, 3), spec())
    return model


def test_plain_pytorch_reads_it_without_running_code(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "model.pt"
    model = save(path)
    content = torch.load(path, weights_only=True)
    other = SmallNet()
    other.load_state_dict(content["model"])
    assert torch.equal(other.first.weight, model.first.weight)
    assert content["step"] == 7 and content["position"] == {"epoch": 1, "batches": 2, "samples": 3, "feed": None}
    assert content["spec"]["optimizer"][0] == "AdamW" or content["spec"]["optimizer"]["name"] == "AdamW"
    assert [p.name for p in path.parent.iterdir()] == ["model.pt"], "no partial file is left"


def test_a_missing_file_names_those_there_are(tmp_path: Path) -> None:
    save(tmp_path / "here.pt")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*gone.pt; in .* there are: here.pt"):
        checkpoint.read(tmp_path / "gone.pt")


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    save(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint"):
        checkpoint.read(path)
    torch.save({"model": {}}, path)
    with pytest.raises(CheckpointError, match="not a checkpoint of guava_nb"):
        checkpoint.read(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError):
        checkpoint.read(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", None),
        ("model", [1]),
        ("spec", 3),
        ("step", "x"),
        ("position", None),
        ("position", {"epoch": -5, "batches": 0, "samples": 0, "feed": None}),
        ("position", {"epoch": 0, "batches": 0, "samples": 0, "feed": []}),
        ("base", [1]),
        ("base", {1: "a"}),
        ("log", None),
        ("log", ["run-1", "3", 0]),
    ],
)
def test_a_checkpoint_with_a_damaged_part_is_refused_when_it_is_read(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "model.pt"
    save(path)
    content = torch.load(path, weights_only=True)
    torch.save({**content, key: value}, path)
    with pytest.raises(CheckpointError, match=f"is a damaged checkpoint: {key} is missing or"):
        checkpoint.read(path)


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = tmp_path / "bomb.pt"
    path.write_bytes(b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR.")
    with pytest.raises(CheckpointError):
        checkpoint.read(path)
    assert not marker.exists()


def test_another_model_is_refused_with_the_first_differences() -> None:
    model = SmallNet().state_dict()
    assert checkpoint.differences(model, model) == ""
    wider = {**model, "first.weight": torch.zeros(99, 10), "extra": torch.zeros(1)}
    del wider["last.bias"]
    text = checkpoint.differences(wider, model)
    assert "not in the file: last.bias" in text and "not in the model: extra" in text
    assert "first.weight: (99, 10) in the file, (16, 10) in the model" in text


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        save(tmp_path / "file" / "model.pt")


def test_another_model_is_refused_with_both_names_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    save(path)
    content, current = checkpoint.read(path), SmallNet().state_dict()
    checkpoint.check_model(path, content, current, Factory("Other"))
    current["head.weight"] = current.pop("last.weight")
    made = str(msgspec.convert(content["spec"]["model"], Factory).name).rpartition(":")[2]
    with pytest.raises(CheckpointError, match=r"another model than Wide\(width=3\)") as caught:
        checkpoint.check_model(path, content, current, Factory("shared:Wide", {"width": 3}))
    for said in ("not in the file: head.weight", "not in the model: last.weight", f"made with, {made}(", "--fresh"):
        assert said in str(caught.value)
    content["spec"].pop("model")
    with pytest.raises(CheckpointError, match=r"the model it was made with \(--model"):
        checkpoint.check_model(path, content, current, Factory("Wide"))
