from __future__ import annotations

import gc
import importlib
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from guava_nb.spec.loading import half_loaded, half_loaded_text, loading_without_collections


def test_collections_are_off_in_the_block_and_then_as_before() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError), loading_without_collections():
        assert not gc.isenabled()
        raise ImportError("it is not here")
    assert gc.isenabled()
    gc.disable()
    try:
        with loading_without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.fixture
def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a package that is interrupted while it loads, like torch when somebody presses Ctrl-C."""
    package = tmp_path / "loads_long"
    package.mkdir()
    (package / "__init__.py").write_text("from loads_long import inner\nwhole = True\n")
    (package / "inner.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "loads_long"
    for name in ("loads_long", "loads_long.inner"):
        sys.modules.pop(name, None)


def test_an_interrupt_leaves_no_module_half_loaded(interrupted: str) -> None:
    with pytest.raises(KeyboardInterrupt), loading_without_collections():
        importlib.import_module(interrupted)
    assert sys.modules[interrupted].whole and sys.modules[f"{interrupted}.inner"].whole
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and gc.isenabled()


def test_an_interrupt_goes_to_whoever_takes_interrupts(interrupted: str) -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with loading_without_collections():
            importlib.import_module(interrupted)
        assert seen == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with loading_without_collections():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_public_names_load_so(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(name: str) -> object:
        signal.raise_signal(signal.SIGINT)
        loaded.append(name)
        return sys

    package = sys.modules["guava_nb"]
    monkeypatch.setattr(package, "importlib", SimpleNamespace(import_module=load))
    monkeypatch.setattr(package, "_HOMES", {"path": "somewhere"})
    with pytest.raises(KeyboardInterrupt):
        package.path  # noqa: B018
    assert loaded == ["somewhere"]


def test_a_library_whose_inner_modules_are_left_without_it_is_half_loaded() -> None:
    assert half_loaded({"torch", "torch.nn", "torch.nn.functional", "sympy", "sympy.core"}) == ""
    assert half_loaded({"torch._C", "torch.nn", "re"}) == "torch"
    assert half_loaded({"torch", "torch.nn", "sympy.core"}) == "sympy"
    assert half_loaded({"torch", "torch._dynamo.utils"}) == "torch"
    assert half_loaded({"mine.inner"}) == "", "pure Python loads again"
    assert half_loaded_text() == ""
