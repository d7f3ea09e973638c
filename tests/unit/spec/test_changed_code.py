import importlib
import sys

import pytest

from guava_nb.protocol.messages import Cell
from guava_nb.spec.cells import build_module, resolve
from guava_nb.spec.changed_code import CodeHere
from guava_nb.spec.own_facts import HASH, facts_of

CONFIG = """
import os, time, torch
print("to standard output")
rate, started, process, weights = 1.0, time.time(), os.getpid(), torch.tensor([1.0, 2.0])
"""
PROGRAM = """
import own_config
count = 0
def step(model, batch):
    global count
    count += 1
    model.last = batch
    return model(batch) * own_config.rate + own_config.started + own_config.process + own_config.weights.sum()
"""


@pytest.fixture
def names(tmp_path, monkeypatch):
    (tmp_path / "own_config.py").write_text(CONFIG)
    (tmp_path / "own_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    yield {"step": "own_program:step"}
    for name in ("own_config", "own_program"):
        sys.modules.pop(name, None)


def roots(names, module=None):
    return {role: resolve(name, module) for role, name in names.items()}


def facts(names, module=None):
    return facts_of(roots(names, module))


def test_what_a_script_changed_is_told_and_what_every_process_has_its_own_of_is_not(names):
    theirs = facts(names) | {"own_config.started": "1.0", "own_config.process": "7"}
    assert CodeHere(roots(names), names, ()).problem(theirs) == ""
    sys.modules["own_config"].rate = 3.0
    problem = CodeHere(roots(names), names, ()).problem(theirs)
    assert problem.startswith("own_config.rate is 3.0 here and 1.0 there. Workers import modules as they lie on disk")
    other = {**theirs, "step": "step(model, batch)#" + theirs["step"].partition("#")[2][:-3] + "abc"}
    importlib.import_module("own_config").rate = 1.0
    assert "step has other code there than here: copy the module's file" in CodeHere(roots(names), names, ()).problem(
        other
    )


def test_what_is_drawn_at_import_is_told(names, tmp_path):
    (tmp_path / "own_config.py").write_text(
        "import torch\nclass Kept(torch.nn.Linear):\n    def get_extra_state(self): return {}\n"
        "    def set_extra_state(self, state): pass\nrate, teacher = torch.randn(2), Kept(2, 2)\n"
    )
    (tmp_path / "own_program.py").write_text(
        "import own_config\ndef step(m, b): return own_config.teacher(b) * own_config.rate"
    )
    theirs = facts(names)
    sys.modules["own_config"].rate = sys.modules["own_config"].rate + 1  # as another process would have drawn it
    sys.modules["own_config"].teacher = sys.modules["own_config"].Kept(2, 2)
    here = CodeHere(roots(names), names, ())
    assert here.problem(theirs) == ""
    told = here.begins_otherwise(theirs)
    assert "own_config.rate is Tensor" in told and "own_config.teacher is Kept with digest" in told
    assert "drawn at random then, or read from the machine" in told


def test_hashes_of_texts_are_told_with_a_hash_that_is_alike_everywhere(names, tmp_path):
    (tmp_path / "own_program.py").write_text("def step(m, b): return m(b) * (hash('w') % 50)")
    here = CodeHere(roots(names), names, ())
    assert here.begins_otherwise(facts(names)) == ""
    told = here.begins_otherwise(facts(names) | {HASH: "1"})  # as another process has it
    assert "zlib.crc32(text.encode())" in told and "PYTHONHASHSEED=0" in told and "drawn at random" not in told


def test_equal_code_asks_no_process(names, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert CodeHere(roots(names), names, ()).problem(facts(names)) == ""


def test_shared_cells_are_built_once_more(names):
    cells = (Cell("a", "import own_config\nrate = 2.0\ndef step(model, batch): return rate * own_config.rate"),)
    module = build_module(cells)
    theirs = facts({"step": "step"}, module)
    module.rate = 5.0
    problem = CodeHere(roots({"step": "step"}, module), {"step": "step"}, cells).problem(theirs)
    assert problem.startswith("rate is 5.0 here and 2.0 there")


def test_a_tensor_that_was_changed_is_told(names):
    theirs = facts(names)
    sys.modules["own_config"].weights[1] = 5.0
    problem = CodeHere(roots(names), names, ()).problem(theirs)
    assert "weights is Tensor torch.float32[2] [1.0, 5.0] here and Tensor torch.float32[2] [1.0, 2.0] there" in problem


def test_a_counter_that_the_code_itself_sets_is_no_problem_and_told(names):
    theirs = facts(names)
    code = CodeHere(roots(names), names, ())
    assert code.begins_otherwise(theirs) == ""
    sys.modules["own_program"].count = 40
    code = CodeHere(roots(names), names, ())
    assert code.problem(theirs) == ""
    assert code.begins_otherwise(theirs).startswith(
        "own_program.count is 40 here and 0 there. The run's code sets this"
    )


def test_what_changes_after_the_run_began_is_told_once(names):
    code = CodeHere(roots(names), names, ())
    assert code.changed() == ""
    sys.modules["own_config"].rate = 2.0
    sys.modules["own_program"].count = 3
    assert code.changed() == "own_program.count from 0 to 3; own_config.rate from 1.0 to 2.0"
    assert code.changed() == ""


def test_what_is_only_set_is_not_used(names):
    code = CodeHere(roots(names), names, ())
    assert code.loads("rate") and code.loads("count") and not code.loads("last")
