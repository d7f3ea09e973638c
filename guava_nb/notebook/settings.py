"""`%config Guava`: what a person may set for a notebook, listed with help and checked by traitlets."""

from __future__ import annotations

from typing import Any

from traitlets import Bool, Enum, Float, Int
from traitlets.config import Configurable

from guava_nb.render import SMOOTHING

__all__ = ["UI_NAMES", "Guava", "add_settings", "remove_settings", "settings_of"]

UI_NAMES = ("widget", "html", "text", "none")


class Guava(Configurable):
    """How the magics of guava_nb show things in this notebook."""

    ui = Enum(
        ("auto", *UI_NAMES),
        "auto",
        help="how panels are drawn; auto: what GUAVA_UI says, else html in a notebook and text elsewhere",
    ).tag(config=True)
    picture = Bool(True, help="draw the charts of a run").tag(config=True)
    smoothing = Float(
        SMOOTHING, min=0.0, max=0.99, help="how much noisy lines of charts are smoothed: 0 not at all, 0.99 most"
    ).tag(config=True)
    log_lines = Int(50, min=1, help="lines that %guava_log shows").tag(config=True)


def add_settings(shell: Any) -> Guava:
    """Make them known to `%config`; those of the profile's configuration file hold from the start."""
    settings = Guava(parent=shell)
    shell.configurables.append(settings)
    return settings


def remove_settings(shell: Any) -> None:
    """Take them away again."""
    shell.configurables[:] = [one for one in shell.configurables if not isinstance(one, Guava)]


def settings_of(shell: object) -> Guava:
    """The settings of a shell; the defaults where the extension is not loaded."""
    found = (one for one in getattr(shell, "configurables", ()) if isinstance(one, Guava))
    return next(found, None) or Guava()
