"""An error of the background process, raised in the notebook as if it had happened here."""

from __future__ import annotations

import builtins
from typing import Any

from IPython.core.error import UsageError

from guava_nb import errors
from guava_nb.errors import GuavaError
from guava_nb.notebook.panel.blocking import Interrupted

__all__ = ["BackgroundError", "told_error"]


class BackgroundError(GuavaError):
    """User code in the background session raised an error of a class that this kernel does not know.

    Attributes:
        type_name: name of the class there.
    """

    type_name = ""


def told_error(told: dict[str, Any]) -> BaseException:
    """Make the error that was told: of the same class where that is Python's own or this package's, else a `BackgroundError`.

    Args:
        told: `module`, `name`, `text` and the `lines` that show it.
    """
    name, text, lines = told["name"], told["text"], told["lines"]
    if name == UsageError.__name__:
        return UsageError(text)
    if name == Interrupted.__name__:
        return Interrupted(text)
    homes = {"builtins": builtins, errors.__name__: errors}
    found = getattr(homes.get(told["module"]), name, None)
    kind = found if isinstance(found, type) and issubclass(found, BaseException) else BackgroundError
    error: BaseException = kind.__new__(kind)
    BaseException.__init__(error, text)
    if kind is BackgroundError:
        vars(error)["type_name"] = name
    vars(error)["_render_traceback_"] = lambda: lines  # IPython calls this instead of printing a traceback
    return error
