import ast
import functools
import sys
import types

import pytest
import torch
from torch.nn import functional

from guava_nb.spec.own_facts import facts_of, is_alike, is_same_code, shown, unlike

TEXT = """
import functools, logging, os, time
from dataclasses import dataclass, field
from types import SimpleNamespace
import torch
from torch import nn
from torch.nn import functional as F

log = logging.getLogger(__name__)
STARTED = time.time()
SCALE, UNREAD = 2.0, 1
WIDTHS = [4, 8]
FOLDER, DEVICE = "/tmp/here", "cuda:0"
calls = 0
cache, names, done = {}, ["a"], set()
table = {"rate": 0.5, "other": 1}
activation = F.relu

@dataclass
class Options:
    depth: int = 3
    folder: str = "/tmp"
    extra: dict = field(default_factory=dict)

options, space = Options(), SimpleNamespace(alpha=0.1, beta=0.2)

class Base(nn.Module):
    slope = 1.5
    unread = 7
    def forward(self, x): return helper(x) * self.slope

class Net(Base):
    act = staticmethod(F.relu)
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(w, w) for w in WIDTHS)
        self.depth = options.depth
        self.seen = 0
    @property
    def rate(self): return table["rate"] * space.alpha
    def forward(self, x):
        global calls
        calls += 1
        self.seen += 1
        cache[calls] = x
        names.append("b")
        log.info("%s %s %s", STARTED, FOLDER, DEVICE)
        return activation(self.act(super().forward(x))) * SCALE * self.rate

def helper(x, times=2): return x * times

def step(model, batch):
    step.n = getattr(step, "n", 0) + 1
    return model(batch).sum()
"""


def made(**changes):
    module = types.ModuleType("guava_shared")
    module.__file__ = "<guava_shared>"
    exec(TEXT, module.__dict__)
    return module


@pytest.fixture
def module(monkeypatch):
    import sys

    one = made()
    monkeypatch.setitem(sys.modules, "guava_shared", one)
    return one


def facts(module):
    return facts_of({"model": module.Net, "step": functools.partial(module.step)})


def test_what_the_code_reads_is_listed_and_nothing_else(module):
    found = facts(module)
    values = {"SCALE", "Base.slope", "options.depth", "space.alpha", "table['rate']", "WIDTHS[0]"}
    assert values | {"helper", "model", "step"} <= set(found)
    noise = (
        "UNREAD",
        "unread",
        "calls",
        "cache",
        "names",
        "FOLDER",
        "DEVICE",
        "log",
        "beta",
        "other",
        "folder",
        "torch",
        "seen",
    )
    written = [place for place in found if place.startswith("~")]  # what the code itself writes: told where it differs
    assert written == ["~calls"]
    assert [place for place in found if place not in written and any(word in place for word in noise)] == []


@pytest.mark.parametrize(
    ("change", "place", "text"),
    [
        ("SCALE = 3.0", "SCALE", "3.0"),
        ("WIDTHS.append(9)", "len(WIDTHS)", "3"),
        ("WIDTHS[0] = 5", "WIDTHS[0]", "5"),
        ("options.depth = 4", "options.depth", "4"),
        ("space.alpha = 1", "space.alpha", "1"),
        ("table['rate'] = 0.25", "table['rate']", "0.25"),
        ("Base.slope = 2.5", "Base.slope", "2.5"),
        ("activation = F.gelu", "activation", "gelu"),
        ("Net.act = staticmethod(torch.tanh)", "Net.act", "tanh"),
        ("Net.forward = lambda self, x: x", "Net.forward", "<lambda>(self, x)"),
        ("def helper(x, times=2): return x + times", "helper", "helper(x, times)"),
        ("def other(model, batch): return 0\nstep = other", "step", "other(model, batch)"),
    ],
)  # fmt: skip
def test_a_change_is_seen_by_its_name(module, change, place, text):
    before = facts(module)
    exec(change, module.__dict__)
    after = facts(module)
    assert unlike(after, before) == [place]
    assert shown(after[place]).endswith(text) or text in ("gelu", "tanh")


@pytest.mark.parametrize(
    "change",
    [
        "calls = 9", "cache[1] = 2", "names.append('c')", "step.n = 4", "FOLDER = '/elsewhere'", "DEVICE = 'cpu'", "UNREAD = 2",
        "table['other'] = 2", "space.beta = 1", "Base.unread = 8", "log = logging.getLogger('x')", "done.add(1)",
        "options.folder = '/x'", "Net.seen = 3", "model = Net(); model.layers[0] = nn.Linear(4, 4)",
    ],
)  # fmt: skip
def test_counters_caches_paths_and_what_is_not_read_are_no_facts(module, change):
    before = facts(module)
    exec(change, module.__dict__)
    assert unlike(facts(module), before) == []


def test_code_of_another_python_is_compared_by_names_only():
    assert is_alike("f(x)#3.12:aa", "f(x)#3.13:bb") and not is_alike("f(x)#3.12:aa", "f(x)#3.12:bb")
    assert not is_alike("f(x)#3.12:aa", "g(x)#3.13:bb")


def test_the_same_class_or_function_is_told_from_another_of_its_name():
    one, other = made(), made()
    assert is_same_code(one.Net, other.Net) and is_same_code(one.step, other.step)
    assert (
        not is_same_code(one.Net, one.Base)
        and not is_same_code(one.step, one.helper)
        and not is_same_code(None, one.step)
    )


def test_installed_code_has_no_facts():
    assert facts_of({"model": torch.nn.Linear, "criterion": functional.cross_entropy, "step": None}) == {}


CELLS = """
import torch
from torch import nn
from torch.nn import functional as F

def block(width, deep=False):
    "A docstring."
    layers = [nn.Linear(width, width) for _ in range(3 if deep else 1)]
    if deep and width not in {1, 2, 3}:
        layers.insert(0, nn.LayerNorm(width))
    while len(layers) > 6:
        layers.pop()
    return nn.Sequential(*layers, nn.ReLU(inplace=True))

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = block(8, deep=True)
    def forward(self, x):
        try:
            return F.normalize(self.blocks(x).sum(dim=torch.zeros(()).long().item()), dim=0)
        except ValueError:
            return [one for one in x if torch.isfinite(one)]
"""


def test_a_cell_that_a_notebook_runs_statement_by_statement_is_the_code_of_a_module():
    # The compiler writes `nn.Linear(...)` in another way where it has seen the import of `nn`.
    whole, parts = types.ModuleType("guava_shared"), types.ModuleType("guava_shared")
    sys.modules["guava_shared"] = whole
    exec(compile(CELLS, "<whole>", "exec"), whole.__dict__)
    for one in ast.parse(CELLS).body:
        exec(compile(ast.Module([one], []), "<part>", "exec"), parts.__dict__)
    ours, theirs = facts_of({"model": whole.Whole}), facts_of({"model": parts.Whole})
    assert "block" in ours and "Whole.forward" in ours
    assert unlike(ours, theirs) == []
    exec(CELLS.replace("width not in {1, 2, 3}", "width not in {1, 2, 4}"), parts.__dict__)
    assert unlike(ours, facts_of({"model": parts.Whole})) == ["block"]
    exec(CELLS.replace("insert(0", "insert(1"), parts.__dict__)
    assert unlike(ours, facts_of({"model": parts.Whole})) == ["block"]
    exec(CELLS.replace("while len(layers) > 6", "while len(layers) < 6"), parts.__dict__)
    assert unlike(ours, facts_of({"model": parts.Whole})) == ["block"]
