"""A checkpoint without the frozen part is small, and is completed with that very part or refused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from guava_nb.errors import CheckpointError, ConfigError
from guava_nb.training import checkpoint
from guava_nb.training.plan import Position
from guava_nb.training.saving.frozen_base import complete, digests_of, without_base
from tests.support.training import spec


def made() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200), nn.Linear(200, 2))
    model[0].requires_grad_(False)
    return model


def test_only_what_is_frozen_and_did_not_change_is_left_out() -> None:
    model = made()
    base = digests_of(model)
    assert set(base) == {"0.weight", "0.bias"}
    with torch.no_grad():
        model[0].bias += 1  # type: ignore[operator]
    state = without_base({"model": model.state_dict(), "optimizer": None}, base)
    assert set(state["model"]) == set(model.state_dict()) - {"0.weight"}
    assert state["base"] == {"0.weight": base["0.weight"]} and state["optimizer"] is None


def test_the_file_is_small_and_plain_pytorch_and_the_same_base_make_it_whole(tmp_path: Path) -> None:
    model, path = made(), tmp_path / "a.pt"
    checkpoint.write(path, {"model": model.state_dict()}, 3, Position(), spec(), checkpoint.Extras(digests_of(model)))
    assert path.stat().st_size < 200 * 200 * 4 / 2
    other = made()
    left = other.load_state_dict(torch.load(path, weights_only=True)["model"], strict=False)
    assert left.missing_keys == ["0.weight", "0.bias"] and not left.unexpected_keys
    content = checkpoint.read(path)
    checkpoint.check_model(path, content, other.state_dict(), None)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in content["model"].items())
    assert list(content["model"].keys() ^ model.state_dict().keys()) == []


def test_another_base_is_refused_with_the_way_out() -> None:
    model = made()
    content = without_base({"model": model.state_dict()}, digests_of(model))
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[0].weight[0, 0] += 1e-6  # type: ignore[index]
    with pytest.raises(
        CheckpointError, match=r"a.pt holds only the trainable part.*0\.weight \(1 of 2 differ.*--weights"
    ):
        complete(Path("a.pt"), dict(content), changed.state_dict())
    with pytest.raises(CheckpointError, match=r"0\.weight, 0\.bias \(2 of 2 differ"):
        complete(Path("a.pt"), dict(content), {})


def test_a_model_without_frozen_parameters_has_no_base() -> None:
    with pytest.raises(ConfigError, match=r"this model has none: freeze them"):
        digests_of(nn.Linear(2, 2))
