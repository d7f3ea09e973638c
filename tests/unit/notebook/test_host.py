from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from IPython.core.error import UsageError

from guava_nb.notebook.display import choose_ui
from guava_nb.notebook.host import Host, colab_rule, detect_host
from guava_nb.notebook.shared_cells import cell_name
from guava_nb.tunnels.host import current_host

ColabShell = type("Shell", (), {"__module__": "google.colab._shell"})
ColabChild = type("OtherShell", (ColabShell,), {"__module__": "somewhere"})
OutStream = type("OutStream", (), {"__module__": "ipykernel.iostream"})
COLAB_MARKS = {"COLAB_RELEASE_TAG": "release-colab"}


@pytest.mark.parametrize(
    ("shell", "environ", "paths", "host"),
    [
        (object(), {}, (), Host.LOCAL),
        (ColabShell(), COLAB_MARKS, (), Host.COLAB),
        (ColabChild(), {}, (), Host.COLAB),
        (object(), COLAB_MARKS, (), Host.LOCAL),  # an image built from Colab's, run elsewhere
        (ColabShell(), {"KAGGLE_KERNEL_RUN_TYPE": "Interactive", **COLAB_MARKS}, (), Host.KAGGLE),
        (object(), COLAB_MARKS, ("/kaggle/working",), Host.KAGGLE),
        (object(), {"BINDER_SERVICE_HOST": "10.0.0.1"}, (), Host.BINDER),
        (object(), {"BINDER_LAUNCH_HOST": "https://mybinder.org/"}, (), Host.BINDER),
        (object(), {"BINDER_REPO_URL": "https://github.com/x/y"}, (), Host.BINDER),
    ],
)
def test_host(shell: object, environ: dict[str, str], paths: tuple[str, ...], host: Host) -> None:
    assert detect_host(shell, environ, lambda path: path in paths) is host


def test_the_host_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE", "BINDER_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=ColabShell))
    assert current_host() is Host.COLAB
    monkeypatch.delitem(sys.modules, "IPython")
    assert current_host() is Host.LOCAL


def test_the_rule_is_told_in_colab_only() -> None:
    assert [bool(colab_rule(host)) for host in (Host.COLAB, Host.KAGGLE, Host.LOCAL, Host.BINDER)] == [True] + [
        False
    ] * 3


@pytest.mark.parametrize(
    ("in_kernel", "environ", "ui"),
    [
        (True, {}, "html"),
        (True, {"CI": "true"}, "text"),
        (True, {"GUAVA_UI": "html", "CI": "true"}, "html"),
        (True, {"GUAVA_UI": " NONE "}, "none"),
        (True, {"GUAVA_UI": ""}, "html"),
        (False, {}, "text"),
        (False, {"GUAVA_UI": "widget"}, "widget"),
    ],
)
def test_ui(in_kernel: bool, environ: dict[str, str], ui: str) -> None:
    shell = SimpleNamespace(kernel=object()) if in_kernel else SimpleNamespace()
    assert choose_ui(shell, environ, OutStream()) == ui


def test_ui_in_a_kernel_whose_output_goes_elsewhere_is_text() -> None:
    assert choose_ui(SimpleNamespace(kernel=object()), {}, object()) == "text"


def test_a_wrong_ui_is_told() -> None:
    with pytest.raises(UsageError, match="did you mean widget"):
        choose_ui(object(), {"GUAVA_UI": "widgets"})


@pytest.mark.parametrize(
    ("given", "parent", "text", "name"),
    [
        ("model", {"metadata": {"cellId": "abc"}}, "x = 1", "model"),
        (None, {"metadata": {"cellId": "abc"}}, "x = 1", "abc"),
        (None, {}, "import torch\n@wrap\nclass Net: pass\ndef f(): pass", "Net"),
        (None, {}, "scale = 3", "scale"),
        (None, {}, "print(1)", "cell-"),
        (None, {}, "!pip install x", "cell-"),
    ],
)
def test_cell_name(given: str | None, parent: dict[str, object], text: str, name: str) -> None:
    found = cell_name(given, SimpleNamespace(parent_header=parent), text)
    assert found.startswith(name)
    assert found == cell_name(given, SimpleNamespace(parent_header=parent), text)
