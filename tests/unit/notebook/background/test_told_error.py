"""An error of the background process is raised here by its class, and shown by the lines that were made there."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError

from guava_nb import errors
from guava_nb.notebook.background.told_error import BackgroundError, told_error
from guava_nb.notebook.panel.blocking import Interrupted


@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [
        ("builtins", "ZeroDivisionError", ZeroDivisionError),
        ("guava_nb.errors", "RemoteError", errors.RemoteError),
        ("guava_nb.errors", "WorkerLost", errors.WorkerLost),
        ("IPython.core.error", "UsageError", UsageError),
        ("guava_nb.notebook.panel.blocking", "Interrupted", Interrupted),
        ("__main__", "Mine", BackgroundError),
        ("builtins", "Unheard", BackgroundError),
        ("builtins", "print", BackgroundError),
    ],
)
def test_the_class_and_the_text_are_those_of_there(module: str, name: str, kind: type[BaseException]) -> None:
    error = told_error({"module": module, "name": name, "text": "what happened", "lines": ["a", "b"]})
    assert type(error) is kind and str(error) == "what happened"
    if kind not in (UsageError, Interrupted):
        assert error._render_traceback_() == ["a", "b"]
