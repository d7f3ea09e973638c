import gc
import math

import pytest
import torch
from torch import nn

from guava_nb.spec.changed_code import CodeHere
from guava_nb.training.handed_out import HandedOut


def net():
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))


def freeze(model):
    model[0].bias.requires_grad_(False)


def clamp(model):
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)


def undrop(model):
    model[1].p = 0.0


def look(model):
    model.eval()(torch.ones(1, 2)).sum().item()
    model.train()


@pytest.mark.parametrize(
    ("change", "named"), [(freeze, "requires_grad of 0.bias"), (clamp, "0.weight"), (undrop, "1.p"), (look, None)]
)
@pytest.mark.parametrize("is_copy", [False, True])
def test_what_a_callback_changes_where_no_worker_sees_it_is_told_once(change, named, is_copy):
    said, model = [], net()
    handed = HandedOut(said.append, None if is_copy else model)
    if is_copy:
        assert handed.note(model) is model
    handed.look("Mine.on_step")
    assert said == []
    change(model)
    if named is None or (is_copy and change is undrop):
        handed.look("Mine.on_step")
        assert said == []
        return
    what = "the copy that run.model() gave" if is_copy else "the registered model"
    with pytest.warns(UserWarning, match="no effect on the run"):
        handed.look("Mine.on_step")
    handed.look("Mine.on_step")
    assert len(said) == 1 and said[0].startswith(f"Mine.on_step changed {named} of {what}. Workers train")


def test_a_copy_that_nobody_holds_is_forgotten():
    handed = HandedOut(print, None)
    for _ in range(50):
        handed.note(net())
    gc.collect()
    handed.note(net())
    assert len(handed._handed) <= 2


temperature = 1.0


def step(model, batch):
    return model(batch) * temperature


def test_a_global_that_the_runs_code_reads_is_told_and_looked_at_now_and_then(monkeypatch):
    said = []
    handed = HandedOut(said.append, None, CodeHere({"step": step}, {}, ()))
    handed.look("Mine.on_epoch")
    monkeypatch.setitem(globals(), "temperature", 0.5)
    handed._next_look = math.inf
    handed.look("Mine.on_step", is_often=True)
    assert said == []
    with pytest.warns(UserWarning, match="no effect on the run"):
        handed.look("Mine.on_epoch")
    place = f"{__name__}.temperature"
    assert said[0].startswith(
        f"Mine.on_epoch changed {place} from 1.0 to 0.5, which the run's code reads. Workers have"
    )
