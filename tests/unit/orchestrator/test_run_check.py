"""A slip in a run's names, options or loaders is told before any worker is here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb import Orchestrator, WorkerData
from guava_nb.errors import ClusterError, ConfigError, GuavaError
from tests.support.session import direct_session

CELL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=2):
        super().__init__()
        assert False, "a check builds nothing"

def one_argument(outputs):
    return outputs.sum()

def loss(outputs, targets):
    return outputs.sum()

def views(batch):
    return batch

def samples():
    assert False, "a check builds nothing"
"""
ROWS = DataLoader(TensorDataset(torch.zeros(8, 3), torch.zeros(8)), 4, shuffle=True)


@pytest.fixture
def session() -> Orchestrator:
    found = Orchestrator(session_file="off")
    found.share(CELL, "cell")
    return found


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": "Nett"}, "did you mean 'Net'?"),
        ({"model": "Net()"}, "give the name alone, Net"),
        ({"model_args": {"widht": 3}}, "did you mean 'width'?"),
        ({"criterion": "CrossEntropyLos"}, "did you mean 'CrossEntropyLoss'?"),
        ({"criterion": "lost"}, "is not in torch.nn"),
        ({"criterion": "one_argument"}, "is called with 2 arguments and takes 1"),
        (
            {"criterion": "CrossEntropyLoss", "criterion_args": {"label_smothing": 0.1}},
            "did you mean 'label_smoothing'?",
        ),
        ({"criterion": None, "step": "stepp"}, "step 'stepp' cannot be found"),
        ({"criterion": "CrossEntropy"}, "did you mean 'CrossEntropyLoss'?"),
        ({"criterion": "categorical_crossentropy"}, "did you mean 'CrossEntropyLoss'?"),
        ({"criterion": "l1"}, "did you mean 'L1Loss'?"),
        ({"criterion": "CE"}, "(there are: CrossEntropyLoss, NLLLoss, MSELoss, "),
        ({"criterion": "loss_"}, "'loss_' is not in the shared cells; did you mean 'loss'"),
        ({"optimizer": "Adamm"}, "did you mean 'Adam'?"),
        ({"optimizer": "optim.AdamW"}, "did you mean 'AdamW'?"),
        ({"optimizer": "Momentum"}, "(there are: Adafactor, "),
        ({"scheduler": "cosine"}, "did you mean 'CosineAnnealingLR'?"),
        ({"scheduler": "Plateau"}, "did you mean 'ReduceLROnPlateau'?"),
        ({"optimizer": "SGD", "optimizer_args": {"betas": [0.9, 0.9]}}, "SGD does not take 'betas'"),
        ({"scheduler": "StepLRR"}, "did you mean 'StepLR'?"),
        ({"scheduler": "StepLR"}, "missing a required argument: 'step_size'"),
        ({"preprocess": "veiws"}, "preprocess 'veiws' cannot be found"),
        ({"augment": "veiws"}, "augment 'veiws' cannot be found"),
        ({"tokens": "veiws"}, "tokens 'veiws' cannot be found"),
        ({"val_loader": ROWS, "metrics": ["los"]}, "metric 'los' cannot be found"),
        ({"val_loader": ROWS, "metrics": ["acuracy"]}, "accuracy are measured without being named"),
        ({"val_loader": ROWS, "save_best": "f1"}, "no validation of this run gives"),
        ({"train_loader": 5}, "come from a DataLoader"),
        ({"train_loader": DataLoader(TensorDataset(torch.zeros(0, 3)), 4)}, "makes no batches"),
        ({"train_loader": WorkerData("sampels", batch_size=4)}, "data set 'sampels' cannot be found"),
        ({"weights": "nothere.pt"}, "there are no weights in nothere.pt"),
        ({"resume": "nothere.pt"}, "there is no checkpoint nothere.pt"),
        ({"num_epochs": 0}, "num_epochs is 0"),
        ({"epochs": 3}, "num_epochs"),
    ],
)
def test_a_slip_is_told_while_no_worker_is_here(session: Orchestrator, given: dict[str, Any], told: str) -> None:
    right = {"train_loader": ROWS, "model": "Net", "criterion": "loss"}
    with pytest.raises((GuavaError, TypeError)) as raised:
        session.check_training(**{**right, **given})
    assert told in str(raised.value)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"criterion": "CrossEntropyLoss", "criterion_args": {"weight": [1.0, 2.0]}, "optimizer": "AdamW"},
        {"sync": "auto", "shares": "measured"},
        {"shares": [1.0, 2.0, 3.0], "precision": "auto", "resume": "session"},
        {"resume": Path("session")},  # as a line gives it
        {"train_loader": WorkerData("samples", batch_size=4)},
        {"weights": "hf:name/of", "augment": "views", "scheduler": "StepLR", "scheduler_args": {"step_size": 3}},
    ],
)
def test_what_is_right_passes_and_changes_nothing(session: Orchestrator, given: dict[str, Any]) -> None:
    before, status = torch.get_rng_state(), session.status()
    session.check_training(**{"train_loader": ROWS, "model": "Net", "criterion": "loss", **given})
    assert torch.equal(before, torch.get_rng_state()) and session.status() == status
    with pytest.raises(GuavaError, match="no model is named yet"):  # nothing was registered
        session.forecast(ROWS, criterion="loss")


def test_an_iterator_is_left_alone(session: Orchestrator, tmp_path: Path) -> None:
    batches = iter([(torch.zeros(2, 3), torch.zeros(2))])
    session.check_training(batches, model="Net", criterion="loss", checkpoint_dir=tmp_path)
    assert len(list(batches)) == 1


def test_a_misspelt_step_of_a_prediction_is_told_here(session: Orchestrator) -> None:
    session._open_cluster = lambda: None  # type: ignore[method-assign,assignment,return-value]  # nothing is asked of it
    with pytest.raises(ConfigError, match=r"predict_step 'viewss' cannot be found: .*did you mean 'views'"):
        session.predict(ROWS, predict_step="viewss")


def test_a_question_tells_a_slip_before_it_says_that_no_worker_is_here() -> None:
    with direct_session(0) as session:
        session.share(CELL, "cell")
        session.register_model("Nett")
        with pytest.raises(ConfigError, match="did you mean 'Net'"):
            session.validate([1], progress=False)
        session.register_model("Net")
        with pytest.raises(ConfigError, match="did you mean 'CrossEntropyLoss'"):
            session.validate([1], criterion="CrossEntropyLos", progress=False)
        with pytest.raises(ClusterError, match="no worker is here: run %guava_worker"):
            session.validate([1], progress=False)
