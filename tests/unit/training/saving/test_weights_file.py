"""Weights of other programs fit or are refused with what does not; no file runs code."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from guava_nb.errors import CheckpointError, ConfigError
from guava_nb.training import checkpoint
from guava_nb.training.plan import Position
from guava_nb.training.saving import weights_file
from guava_nb.training.saving.frozen_base import digests_of
from guava_nb.training.saving.weights_file import fitting_weights
from tests.support.training import SmallNet, spec


def fits(path: Path, model: nn.Module, like: nn.Module) -> None:
    weights, added = fitting_weights(path, model)
    assert not added
    expected = like.state_dict()
    assert weights.keys() == expected.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("place", ["", "model", "state_dict", "model_state_dict"])
def test_a_state_dict_fits_whatever_wrapper_or_place_it_was_saved_with(tmp_path: Path, prefix: str, place: str) -> None:
    like, path = SmallNet(norm=True), tmp_path / "a.pt"
    state: Any = {f"{prefix}{name}": value for name, value in like.state_dict().items()}
    torch.save({place: state, "epoch": 3} if place else state, path)
    fits(path, SmallNet(norm=True), like)


def test_safetensors_fit_in_one_file_or_a_folder_of_them(tmp_path: Path) -> None:
    like = SmallNet()
    items = list(like.state_dict().items())
    for name, part in (("one-1", items[:1]), ("one-2", items[1:])):
        write_safetensors(tmp_path / "parts" / f"{name}.safetensors", dict(part))
    write_safetensors(tmp_path / "a.safetensors", dict(items))
    pytest.importorskip("safetensors")
    fits(tmp_path / "a.safetensors", SmallNet(), like)
    fits(tmp_path / "parts", SmallNet(), like)


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """As https://github.com/huggingface/safetensors describes the format."""
    path.parent.mkdir(exist_ok=True)
    header, place = {}, 0
    for name, one in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(one.shape),
            "data_offsets": [place, place := place + 4 * one.numel()],
        }
    text = json.dumps(header).encode()
    values = b"".join(one.numpy().tobytes() for one in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + values)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_what_is_tied_in_the_model_may_stand_once(tmp_path: Path) -> None:
    like, path = Tied(), tmp_path / "a.pt"
    torch.save({"embed.weight": like.embed.weight.detach()}, path)
    fits(path, Tied(), like)


class Adapted(nn.Module):
    """As peft changes a model: a frozen layer below a new name, with what learns beside it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.ModuleDict({"base_layer": nn.Linear(3, 4), "lora": nn.Linear(3, 4)})
        layer["base_layer"].requires_grad_(False)
        self.base_model = nn.ModuleDict({"model": nn.ModuleDict({"first": layer})})


def test_a_file_of_the_frozen_part_is_enough_also_where_peft_renamed_it(tmp_path: Path) -> None:
    base, model, path = nn.Linear(3, 4), Adapted(), tmp_path / "a.pt"
    torch.save({f"first.{name}": value for name, value in base.state_dict().items()}, path)
    weights, added = fitting_weights(path, model)
    assert added == ["base_model.model.first.lora.weight", "base_model.model.first.lora.bias"]
    model.load_state_dict(weights)
    assert torch.equal(model.state_dict()["base_model.model.first.base_layer.weight"], base.weight)
    torch.save({"first.weight": base.weight.detach()}, path)
    with pytest.raises(CheckpointError, match=r"not in a.pt: base_model.model.first.base_layer.bias, "):
        fitting_weights(path, model)


class AdaptedAsInTransformers(nn.Module):
    """As peft changes a model of transformers: it tells of the base's prefix as its own, and keeps a trained layer aside."""

    base_model_prefix = "body"

    def __init__(self) -> None:
        super().__init__()
        layer = nn.ModuleDict({"base_layer": nn.Linear(3, 4), "lora": nn.Linear(3, 4)})
        head = nn.ModuleDict(
            {"original_module": nn.Linear(4, 2), "modules_to_save": nn.ModuleDict({"default": nn.Linear(4, 2)})}
        )
        for frozen in (layer["base_layer"], head["original_module"]):
            frozen.requires_grad_(False)
        inner = nn.ModuleDict({"body": nn.ModuleDict({"first": layer}), "head": head})
        self.base_model = nn.ModuleDict({"model": inner})


@pytest.mark.parametrize(("has_head", "prefix"), [(True, "body."), (False, "body."), (False, "")])
def test_a_base_of_transformers_is_found_below_adapters_with_and_without_its_head(
    tmp_path: Path, has_head: bool, prefix: str
) -> None:
    base, path, model = (
        nn.ModuleDict({"first": nn.Linear(3, 4), "head": nn.Linear(4, 2)}),
        tmp_path / "a.pt",
        AdaptedAsInTransformers(),
    )
    state = {f"{prefix}first.{name}": value for name, value in base["first"].state_dict().items()}
    if has_head:
        state |= {f"head.{name}": value for name, value in base["head"].state_dict().items()}
    torch.save(state, path)
    weights, added = fitting_weights(path, model)
    model.load_state_dict(weights)
    inner: Any = model.base_model["model"]
    assert torch.equal(inner["body"]["first"]["base_layer"].weight, base["first"].weight)
    assert torch.equal(inner["head"]["modules_to_save"]["default"].weight, base["head"].weight) == has_head
    assert sorted(name.rpartition(".")[2] for name in added if "lora" not in name) == (
        [] if has_head else ["bias", "weight"]
    )


def test_a_last_layer_of_another_size_begins_as_it_is_built_over_a_frozen_part_that_is_read(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 10)).state_dict(), tmp_path / "a.pt")
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match=r"1\.weight.*freeze all that is read"):
        fitting_weights(tmp_path / "a.pt", model)
    model[0].requires_grad_(False)
    weights, added = fitting_weights(tmp_path / "a.pt", model)
    assert added == ["1.weight", "1.bias"] and torch.equal(weights["1.weight"], model[1].weight)
    assert torch.equal(weights["0.weight"], torch.load(tmp_path / "a.pt", weights_only=True)["0.weight"])
    model[1].requires_grad_(False)
    with pytest.raises(CheckpointError, match=r"1\.weight"):
        fitting_weights(tmp_path / "a.pt", model)


def test_a_checkpoint_of_guava_nb_gives_its_weights_and_one_without_its_base_the_rest_of_the_model(
    tmp_path: Path,
) -> None:
    like, path = SmallNet(), tmp_path / "a.pt"
    like.first.requires_grad_(False)
    checkpoint.write(path, {"model": like.state_dict()}, 3, Position(), spec())
    fits(path, SmallNet(), like)
    checkpoint.write(path, {"model": like.state_dict()}, 3, Position(), spec(), checkpoint.Extras(digests_of(like)))
    model = SmallNet()
    with pytest.raises(CheckpointError, match="holds only the trainable part"):
        fitting_weights(path, model)
    model.first.load_state_dict(like.first.state_dict())
    fits(path, model, like)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"first.weight": torch.zeros(16, 10)}, r"not in a.pt: first.bias, last.weight, last.bias\)"),
        ({**SmallNet().state_dict(), "fc.weight": torch.zeros(1)}, r"not in the model: fc.weight\)"),
        (
            {**SmallNet().state_dict(), "last.weight": torch.zeros(7, 16)},
            r"other shapes: last.weight: \(7, 16\) in a.pt, \(4, 16\) in the model\).*strict=False",
        ),
        ([1, 2], "holds no state dict"),
        ({"model": {"a": 1}}, "holds no state dict"),
        ({"model": SmallNet}, r"cannot be read .*nothing but a state dict: torch.save\(model.state_dict\(\), path\)"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_names_and_the_way_out(tmp_path: Path, content: Any, told: str) -> None:
    path = tmp_path / "a.pt"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=told):
        fitting_weights(path, SmallNet())


def test_a_file_that_is_missing_or_damaged_and_a_missing_package_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.pt").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "a.safetensors").write_bytes(b"no")
    for name, told in (("b.pt", "there are no weights in"), ("a.pt", "cannot be read"), ("", "cannot be read")):
        with pytest.raises(CheckpointError, match=told):
            fitting_weights(tmp_path / name, SmallNet())

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(weights_file.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match="pip install safetensors"):
        fitting_weights(tmp_path / "a.safetensors", SmallNet())


def test_a_whole_model_is_refused_without_torchs_advice_to_unpickle_it(tmp_path: Path) -> None:
    torch.save(SmallNet(), path := tmp_path / "whole.pt")
    with pytest.raises(
        CheckpointError, match=r"such as a whole model\)\. .*torch.save\(model.state_dict\(\), path\)$"
    ) as caught:
        fitting_weights(path, SmallNet())
    assert "weights_only" not in str(caught.value).lower() and "options" not in str(caught.value)
