"""Shared cells: kept in order, checked before they leave, built into one module elsewhere."""

from __future__ import annotations

import builtins
import inspect
import linecache
import math
import pickle
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.errors import SourceError
from guava_nb.protocol.messages import Cell
from guava_nb.spec.cell_checks import cells_behind
from guava_nb.spec.cells import CellError, SourceLedger, build_module, digest, resolve

MODULE = "guava_shared_under_test"


@pytest.fixture(autouse=True)
def no_module_left() -> Iterator[None]:
    yield
    sys.modules.pop(MODULE, None)


def ledger_of(**texts: str) -> SourceLedger:
    ledger = SourceLedger()
    for name, text in texts.items():
        ledger.add(name, text)
    return ledger


def build(**texts: str) -> Any:
    return build_module(ledger_of(**texts).cells(), MODULE)


# -------------------------------------------------------------------------------------------------------------- ledger


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 5)), max_size=20))
def test_newest_text_per_name_in_order_of_first_appearance(adds: list[tuple[str, int]]) -> None:
    ledger = SourceLedger()
    for name, value in adds:
        before = dict(ledger_texts(ledger))
        assert ledger.add(name, f"{name} = {value}") == (before.get(name) != f"{name} = {value}")
    order: list[str] = []
    for name, _ in adds:
        if name not in order:
            order.append(name)
    newest = dict(adds)
    assert ledger.cells() == tuple(Cell(name, f"{name} = {newest[name]}") for name in order)
    assert ledger.digest() == digest(ledger.cells())


def ledger_texts(ledger: SourceLedger) -> list[tuple[str, str]]:
    return [(cell.name, cell.text) for cell in ledger.cells()]


def test_the_digest_tells_names_texts_and_order_apart() -> None:
    ledgers = [{"a": "x = 1", "b": ""}, {"b": "", "a": "x = 1"}, {"a": "x = 2", "b": ""}, {"a": "x = 1"}, {"ax": "1"}]
    assert len({ledger_of(**texts).digest() for texts in ledgers}) == len(ledgers)


def test_a_removed_cell_is_forgotten() -> None:
    ledger = ledger_of(a="x = 1", b="y = 2")
    ledger.remove("a")
    ledger.remove("never there")
    assert ledger_texts(ledger) == [("b", "y = 2")]


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[31m"])
def test_a_name_must_be_printable(name: str) -> None:
    with pytest.raises(SourceError, match="cannot be called"):
        SourceLedger().add(name, "x = 1")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("%matplotlib inline\nx = 1", 1),
        ("x = 1\n!pip install einops", 2),
        ("x = 1\n\n?print", 3),
        ("import torch\ntorch.nn.Linear??", 2),
        ("files = !ls", 1),
        ("t = %timeit -o f(x)", 1),
        ("%%time\nx = 1", 1),
        ("if True:\n    %load_ext autoreload\n", 2),
    ],
)
def test_notebook_syntax_is_refused_in_one_sentence(text: str, line: int) -> None:
    ledger = ledger_of(model="x = 0")
    with pytest.raises(SourceError) as caught:
        ledger.add("model", text)
    message = str(caught.value)
    assert f"cell 'model', line {line}: {text.splitlines()[line - 1].strip()!r} is notebook syntax" in message
    assert "move it into a cell without %%guava_share" in message
    assert ("%guava_pip installs on the workers" in message) == ("pip install" in text)
    assert "\n" not in message
    assert ledger_texts(ledger) == [("model", "x = 0")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef f(:\n  pass", "cell 'm', line 2: "),
        ("x = 1\nreturn 3", "cell 'm', line 2: 'return' outside function"),
        ("await thing()", "cell 'm', line 1: 'await' outside function"),
        ("x = '\0'", "cell 'm'"),
        ("x = (1,\n", "cell 'm', line 1: "),
    ],
)
def test_what_is_not_python_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(SourceError) as caught:
        SourceLedger().add("m", text)
    assert message in str(caught.value)


def test_python_that_only_looks_like_magic_is_fine() -> None:
    ledger_of(a='x = (7\n% 4)\ny = """\n!not a command\n%nor a magic\n"""\nz = "what?"')


# ----------------------------------------------------------------------------------------------------- undefined names


def test_an_undefined_name_is_told_with_cell_and_remedy() -> None:
    ledger = ledger_of(consts="width = 3", model="def net(x):\n    return x * scale * width\n")
    assert ledger.undefined_names() == (
        "name 'scale' is used in cell 'model' (line 2) but no %%guava_share cell defines it; "
        "put its definition into a %%guava_share cell (sharing another text under the same --name replaces a cell)",
    )
    cells, names = ledger.left_out()
    assert list(cells) == ["model"] and list(names) == ["net"] and "'scale' is used in cell 'model'" in names["net"]


def test_a_name_that_was_imported_here_is_told_with_its_line_and_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.SimpleNamespace(nn=torch.nn, math=math, DataLoader=torch.utils.data.DataLoader, scale=3, add=lambda: 3)
    monkeypatch.setitem(sys.modules, "__main__", main)
    (told,) = ledger_of(model="class Net(nn.Module):\n    layer = nn.ReLU\n").undefined_names()
    assert told == (
        "name 'nn' is used in cell 'model' (lines 1, 2) but no %%guava_share cell imports it; begin that cell with: "
        "import torch.nn as nn"
    )
    told = " ".join(ledger_of(model="x = math.pi, DataLoader, scale, add").undefined_names())
    assert "begin that cell with: import math" in told
    assert "begin that cell with: from torch.utils.data.dataloader import DataLoader" in told
    assert told.count("put its definition into") == 2  # what this notebook made itself


def test_a_cell_with_an_undefined_name_blocks_only_what_uses_it() -> None:
    ledger = ledger_of(
        a="import math\ndef good(x):\n    return math.sqrt(x)\n",
        b="import math\ndef half(x):\n    return x * scale\n",
        c="def quarter(x):\n    return half(half(x))\n",
        d="class Net:\n    act = good\n",
    )
    cells, names = ledger.left_out()
    assert sorted(cells) == ["b", "c"] and sorted(names) == ["half", "quarter"]
    assert cells["c"].startswith("cell 'c' uses 'half' of cell 'b', and name 'scale' is used in cell 'b' (line 3)")
    module = build_module([cell for cell in ledger.cells() if cell.name not in cells], MODULE, names)
    assert resolve("Net", module).act(4) == 2
    with pytest.raises(
        SourceError, match="'quarter' cannot be used: cell 'c' uses 'half' of cell 'b', and name 'scale'"
    ):
        resolve("quarter", module)


def test_where_two_cells_define_a_name_and_one_cannot_run_nobody_can_tell_which_is_meant() -> None:
    ledger = ledger_of(a="def loss(x):\n    return x\n", b="def loss(x):\n    return x * scale\n")
    with pytest.raises(SourceError, match="'scale' is used in cell 'b'"):
        ledger.left_out()


def test_a_definition_that_comes_too_late_is_told() -> None:
    ledger = ledger_of(model="y = scale * 2", consts="scale = 3")
    assert "before cell 'consts' defines it" in ledger.undefined_names()[0]
    assert "in the order in which they were first shared" in ledger.undefined_names()[0]
    assert "before that cell defines it" in ledger_of(a="y = x\nx = 1").undefined_names()[0]


FINE = {
    "later function": {"a": "def f():\n    return g()\n", "b": "def g():\n    return 1\n"},
    "star import": {"a": "from torch_that_is_not_loaded import *\nlayer = Linear(2, 3)"},
    "star import, loaded": {"a": "from collections import *\nc = Counter()"},
    "type checking": {
        "a": "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    from nowhere import Tensor\ndef f(x: Tensor) -> Tensor:\n    return x\n"
    },
    "lazy annotation": {"a": "from __future__ import annotations\ndef f(x: Tensor) -> Tensor:\n    y: Other = x\n"},
    "shape text in an annotation": {"a": "import typing as t\ndef f(x: t.Annotated[int, 'batch dim'], y: 'b c'): ..."},
    "name and file": {"a": "if __name__ == '__main__':\n    x = __file__\n"},
    "display": {"a": "def show(x):\n    display(x)\n"},
    "name error caught": {"a": "try:\n    device\nexcept NameError:\n    device = 'cpu'\n"},
    "class scope": {"a": "class A:\n    width: int = 3\n    where = __qualname__\n"},
    "match and walrus": {
        "a": "def f(x):\n    match x:\n        case [a, *b]:\n            return a if (c := b) else c\n"
    },
    "kernel looked for": {"a": "try:\n    get_ipython()\nexcept NameError:\n    pass\n"},
    "kernel imported": {"a": "from IPython import get_ipython\nshell = get_ipython()"},
    "decorator and global": {
        "a": "import functools\ndef f():\n    global g\n    g = 1\n@functools.cache\ndef h():\n    return g"
    },
    "unused and shadowed": {"a": "import os\ndef f(): pass\ndef f(): pass\nx = '%s' % (1, 2) if 0 else f''"},
}


@pytest.mark.parametrize("texts", FINE.values(), ids=FINE)
def test_no_false_alarm(texts: dict[str, str]) -> None:
    assert ledger_of(**texts).undefined_names() == ()


def test_a_star_import_of_a_loaded_module_hides_nothing_it_does_not_have() -> None:
    assert "'Linear'" in ledger_of(a="from collections import *\nx = Linear(2)").undefined_names()[0]


def test_an_annotation_that_is_evaluated_counts() -> None:
    assert "'Tensor'" in ledger_of(a="def f(x: Tensor): ...").undefined_names()[0]
    both = ledger_of(a="from __future__ import annotations\n", b="def f(x: Tensor): ...")
    assert "cell 'b' (line 1)" in both.undefined_names()[0]


@pytest.mark.parametrize("in_kernel", [False, True])
def test_names_of_the_kernel_are_told_as_such(in_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_kernel:
        monkeypatch.setattr("builtins.get_ipython", lambda: None, raising=False)
    sentence = ledger_of(a="shell = get_ipython()").undefined_names()[0]
    assert "exists only in a notebook's kernel" in sentence


def test_imports_are_listed_once_and_optional_ones_left_out() -> None:
    ledger = ledger_of(
        a="from __future__ import annotations\nimport torch.nn as nn, numpy\nfrom torch.nn import *\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import mypy\n"
        "try:\n    import apex\nexcept ImportError:\n    apex = None\n",
        b="def f():\n    with open('x'):\n        import einops\n    for _ in ():\n        import numpy\n"
        "class A:\n    def g(self):\n        from PIL import Image\ntry:\n    import yaml\nfinally:\n    import json\n",
    )
    assert ledger.imports() == ("torch", "numpy", "typing", "einops", "PIL", "yaml", "json")


# ---------------------------------------------------------------------------------------------------------- the module


def test_cells_share_one_namespace_and_future_lines_work_in_each() -> None:
    module = build(
        a="scale = 3",
        b="from __future__ import annotations\ndef f(x: Nowhere) -> Nowhere:\n    return x * scale\n",
        c="def g(x: int): ...",
    )
    assert module.f(2) == 6
    assert module.f.__annotations__["x"] == "Nowhere"
    assert module.g.__annotations__["x"] is int
    assert sys.modules[MODULE] is module


def test_a_changed_cell_leaves_nothing_of_its_old_text() -> None:
    ledger = ledger_of(a="old = 1\nclass Net: kept = 1", b="x = 2")
    first = build_module(ledger.cells(), MODULE)
    ledger.add("a", "class Net: pass")
    second = build_module(ledger.cells(), MODULE)
    assert second is not first
    assert not hasattr(second, "old")
    assert not hasattr(second.Net, "kept")
    assert second.x == 2
    assert sys.modules[MODULE] is second


def test_main_blocks_do_not_run_and_dataclasses_and_pickles_find_their_module() -> None:
    module = build(
        a="from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int = 1\n"
        "ran = False\nif __name__ == '__main__':\n    ran = True\n"
    )
    assert module.ran is False
    assert pickle.loads(pickle.dumps(module.P(3))) == module.P(3)


MODEL = """import math


class Net:
    '''A model.'''

    class Inner:
        depth = 2

    def forward(self, x):
        return math.sqrt(x)
"""


def test_source_of_classes_and_functions_can_be_read_back() -> None:
    module = build(first="a = 1\nb = 2\n\ndef helper(x):\n    return x\n", model=MODEL, last="class Last: pass")
    assert inspect.getsource(module.Net) == MODEL[MODEL.index("class Net") :]
    assert inspect.getsource(module.Net.Inner) == "    class Inner:\n        depth = 2\n"
    assert inspect.getsource(module.Net.forward).strip().startswith("def forward")
    assert inspect.getsource(module.helper) == "def helper(x):\n    return x\n"
    assert inspect.getsource(module.Last) == "class Last: pass\n"
    linecache.checkcache()
    assert inspect.getsource(module.Last) == "class Last: pass\n"


def test_a_class_that_keeps_its_own_line_is_moved_to_its_place_in_the_module_once() -> None:
    # Python 3.13 writes __firstlineno__ into a class; here the cells do it, so that every version runs this.
    module = build(
        a="x = 1\nclass A:\n    __firstlineno__ = 2", b="class B:\n    __firstlineno__ = 1\nC = A", c="D = A"
    )
    assert module.A.__firstlineno__ == 2
    assert module.B.__firstlineno__ == 4


def test_a_traceback_shows_the_cell_its_line_and_the_text() -> None:
    module = build(first="a = 1\n", model=MODEL)
    with pytest.raises(ValueError, match="math domain|nonnegative") as caught:
        module.Net().forward(-1)
    text = "".join(traceback.format_exception(caught.type, caught.value, caught.tb))
    assert "File \"<cell 'model'>\", line 11, in forward\n    return math.sqrt(x)" in text


def test_a_cell_that_raises_is_named_with_its_line_and_the_old_module_stays() -> None:
    good = build(a="x = 1")
    with pytest.raises(CellError, match=r"cell 'b', line 2: ZeroDivisionError: division by zero") as caught:
        build(a="x = 1", b="def f():\n    return 1 / 0\nf()\n")
    assert (caught.value.cell, caught.value.line, caught.value.missing_module) == ("b", 2, "")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert sys.modules[MODULE] is good


@pytest.mark.parametrize("statement", ["import sys; sys.exit(3)", "raise SystemExit"])
def test_a_cell_cannot_end_the_process(statement: str) -> None:
    with pytest.raises(CellError, match="SystemExit"):
        build(a=statement)
    assert MODULE not in sys.modules


def test_a_missing_module_is_told_by_the_machine_that_lacks_it() -> None:
    with pytest.raises(CellError, match=r"guava_nowhere.*; it is not installed on this machine$") as caught:
        build(a="x = 1\nfrom guava_nowhere.layers import Thing")
    assert (caught.value.missing_module, caught.value.line) == ("guava_nowhere", 2)


def test_display_writes_where_there_is_no_notebook(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(builtins, "display", raising=False)  # a shell of another test in this process leaves it there
    module = build(a="def show(x):\n    display(x, x, clear=True)\n")
    module.show("y")
    assert capsys.readouterr().out == "'y'\n'y'\n"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["x = 1", "x = 1\r\ny = 2\r\n", "", "\x0c\n# \u2028 ä\n", "s = '''\n\n'''"]), max_size=6)
)
def test_lines_are_counted_as_python_counts_them(texts: list[str]) -> None:
    cells = tuple(Cell(f"c{index}", text) for index, text in enumerate(texts))
    module = build_module((*cells, Cell("last", "\ndef f():\n    return 1\nclass A:\n    pass\n")), MODULE)
    assert inspect.getsource(module.f) == "def f():\n    return 1\n"
    assert inspect.getsource(module.A) == "class A:\n    pass\n"
    ledger = SourceLedger()
    for cell in (*cells, Cell("last", "\n\nz = nowhere")):
        ledger.add(cell.name, cell.text)
    assert [sentence for sentence in ledger.undefined_names() if "cell 'last' (line 3)" in sentence]


# ------------------------------------------------------------------------------------------------------------- resolve


def test_names_are_found_in_cells_and_in_packages() -> None:
    module = build(a="class Net:\n    @classmethod\n    def small(cls): ...\n")
    assert resolve("Net", module) is module.Net
    assert resolve("Net.small", module) == module.Net.small
    assert resolve("collections:OrderedDict.fromkeys", None).__name__ == "fromkeys"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nett", "did you mean 'Net'?"),
        ("Quux", "not in the shared cells; define it in a %%guava_share cell"),
        ("Net.smal", "did you mean 'small'?"),
        ("collections:OrderedDikt", "did you mean 'OrderedDict'?"),
        ("guava_nowhere:Net", "'guava_nowhere' is not installed on this machine"),
        ("Net(\n  (first): Linear(1, 2)\n)", "'Net(' is not a name: give one from the shared cells (the class"),
        (":x", "cannot be imported"),
        ("collections:", "not in module 'collections'"),
        ("", "not in the shared cells"),
        ("Net.__class__", "not in the shared cells"),
    ],
)
def test_a_wrong_name_is_told_with_near_ones(name: str, message: str) -> None:
    module = build(a="class Net:\n    small = 1\n")
    with pytest.raises(SourceError) as caught:
        resolve(name, module)
    assert message in str(caught.value)


def test_with_nothing_shared_the_remedy_is_told() -> None:
    with pytest.raises(SourceError, match="nothing is shared yet"):
        resolve("Net", None)


def test_the_cells_behind_a_name_are_those_that_define_it_and_what_it_uses() -> None:
    cells = [
        Cell("imports", "import torch\nfrom torch import nn"),
        Cell("block", "class Block(nn.Module):\n    pass"),
        Cell("net", "class Net(nn.Module):\n    def __init__(self):\n        self.block = Block()"),
        Cell("metric", "def right(outputs):\n    return torch.ones(1)"),
    ]
    assert cells_behind("Net.small", cells) == {"imports", "block", "net"}
    assert cells_behind("right", cells) == {"imports", "metric"}
    assert cells_behind("package.module:Net", cells) == set()
