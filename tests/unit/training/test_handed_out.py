import gc
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.spec.changed_code import CodeHere
from guava_nb.training.handed_out import HandedOut
from guava_nb.training.plan import Position


def net():
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))


def freeze(model):
    model[0].bias.requires_grad_(False)


def clamp(model):
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)


def undrop(model):
    model[1].p = 0.0


def clamp_data(model):
    model[0].weight.data.clamp_(-0.1, 0.1)


def swap(model):
    model[0] = nn.Linear(2, 2)


def look(model):
    model.eval()(torch.ones(1, 2)).sum().item()
    model.train()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (freeze, "requires_grad of 0.bias"),
        (clamp, "0.weight"),
        (clamp_data, "0.weight"),
        (swap, "0.weight"),
        (undrop, "1.p"),
        (look, None),
    ],
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


def test_a_copy_that_the_callback_lets_go_is_looked_at_too():
    said, handed = [], HandedOut(lambda sentence: said.append(sentence), None)
    with pytest.warns(UserWarning, match="no effect on the run"):
        handed.call("Mine.on_epoch", lambda: handed.note(net())[0].weight.data.mul_(0.5))
    assert len(said) == 1 and said[0].startswith("Mine.on_epoch changed 0.weight of the copy")


class Levels(Dataset):
    """Its samples go by a level; it counts its calls."""

    def __init__(self):
        self.level, self.calls, self.scale = 1, 0, torch.ones(2)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.calls += 1
        return torch.full((2,), float(self.level)) * self.scale


def raise_level(loader):
    loader.dataset.level += 1


def double_scale(loader):
    loader.dataset.scale *= 2


def weigh_anew(loader):
    loader.sampler.weights = torch.ones(12)


def larger_batches(loader):
    loader.batch_sampler.batch_size = 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (raise_level, "dataset.level"),
        (double_scale, "dataset.scale"),
        (weigh_anew, "sampler.weights"),
        (larger_batches, "batch_sampler.batch_size"),
        (len, None),
    ],
)
def test_what_a_callback_changes_in_the_loader_after_batches_were_read_ahead_is_told_once(change, named):
    loader = DataLoader(Levels(), 2, sampler=WeightedRandomSampler(torch.ones(12) / 2, 12))
    feed, said = LoaderFeed(loader), []
    handed = HandedOut(said.append, None, None, feed, SimpleNamespace(position=Position(0, 1)))
    batches = feed.epoch()
    for _ in range(3):
        next(batches)
    if named is None:
        handed.call("Mine.on_step", lambda: change(loader))
        assert said == []
        return
    with pytest.warns(UserWarning, match="read ahead"):
        handed.call("Mine.on_step", lambda: change(loader))
    handed.call("Mine.on_step", lambda: change(loader))
    assert len(said) == 1 and said[0].startswith(
        f"Mine.on_step changed {named} of the loader. Batches are read ahead: 2 were"
    )


def test_what_a_callback_changes_in_the_loader_when_nothing_is_read_ahead_is_in_time():
    loader, said = DataLoader(Levels(), 2), []
    feed = LoaderFeed(loader)
    assert len(list(feed.epoch())) == 6
    HandedOut(said.append, None, None, feed, SimpleNamespace(position=Position(0, 6))).call(
        "Mine.on_epoch", lambda: raise_level(loader)
    )
    assert said == []
