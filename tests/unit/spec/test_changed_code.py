import importlib
import sys

import pytest

from guava_nb.protocol.messages import Cell
from guava_nb.spec.cells import build_module, resolve
from guava_nb.spec.changed_code import CodeHere
from guava_nb.spec.own_facts import facts_of

CONFIG = """
import os, time
print("to standard output")
rate, started, process = 1.0, time.time(), os.getpid()
"""
PROGRAM = """
import own_config
def step(model, batch): return model(batch) * own_config.rate + own_config.started + own_config.process
"""


@pytest.fixture
def names(tmp_path, monkeypatch):
    (tmp_path / "own_config.py").write_text(CONFIG)
    (tmp_path / "own_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    yield {"step": "own_program:step"}
    for name in ("own_config", "own_program"):
        sys.modules.pop(name, None)


def facts(names, module=None):
    return facts_of({role: resolve(name, module) for role, name in names.items()})


def test_what_a_script_changed_is_told_and_what_every_process_has_its_own_of_is_not(names):
    theirs = facts(names) | {"own_config.started": "1.0", "own_config.process": "7"}
    assert CodeHere(facts(names), names, ()).problem(theirs) == ""
    sys.modules["own_config"].rate = 3.0
    problem = CodeHere(facts(names), names, ()).problem(theirs)
    assert problem.startswith("own_config.rate is 3.0 here and 1.0 there. Workers import modules as they lie on disk")
    other = {**theirs, "step": "step(model, batch)#" + theirs["step"].partition("#")[2][:-3] + "abc"}
    importlib.import_module("own_config").rate = 1.0
    assert "step has other code there than here: copy the module's file" in CodeHere(facts(names), names, ()).problem(
        other
    )


def test_equal_code_asks_no_process(names, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert CodeHere(facts(names), names, ()).problem(facts(names)) == ""


def test_shared_cells_are_built_once_more(names):
    cells = (Cell("a", "import own_config\nrate = 2.0\ndef step(model, batch): return rate * own_config.rate"),)
    module = build_module(cells)
    theirs = facts({"step": "step"}, module)
    module.rate = 5.0
    problem = CodeHere(facts({"step": "step"}, module), {"step": "step"}, cells).problem(theirs)
    assert problem.startswith("rate is 5.0 here and 2.0 there")
