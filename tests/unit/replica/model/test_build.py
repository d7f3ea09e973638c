"""A model begins to train as in a plain loop: its own train() is called, and what is frozen stays so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from guava_nb.errors import ConfigError
from guava_nb.replica.model.build import begin_training, compile_modules


class Frozen(nn.Module):
    """Keeps its norm in evaluation mode, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.calls = nn.BatchNorm1d(3), nn.Dropout(), 0

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.calls += 1
        self.norm.eval()
        return self


def test_the_own_train_of_a_module_inside_is_called_once() -> None:
    model = begin_training(nn.Sequential(nn.Linear(3, 3), Frozen()))
    assert model[1].calls == 1 and model.training and model[1].drop.training and not model[1].norm.training


def test_what_the_factory_froze_stays_frozen() -> None:
    model = nn.Sequential(Frozen(), nn.Dropout())
    model[1].eval()
    assert not begin_training(model)[1].training and not model[0].norm.training


def test_a_model_in_evaluation_mode_is_left_alone() -> None:
    model = Frozen().eval()
    calls = model.calls
    assert begin_training(model).calls == calls and not model.training


def test_modules_are_compiled_unless_the_factory_did(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: called.append(module))
    plain, done = nn.Linear(2, 2), nn.Linear(2, 2)
    done._compiled_call_impl = done._call_impl  # as torch.compile leaves it
    compile_modules([plain, done], torch.device("cpu"))
    assert called == [plain]


def test_what_the_compiler_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    def missing() -> str:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(ConfigError, match=r"compile=True \(--compile\) needs a C\+\+ compiler on each worker"):
        compile_modules([nn.Linear(2, 2)], torch.device("cpu"))
