"""Errors as a person sees them."""

from __future__ import annotations

from guava_nb.errors import ConfigError, RemoteError
from guava_nb.render import error_text
from guava_nb.render.html import lines_html


def test_errors() -> None:
    assert error_text(ConfigError("bad\nport")) == "ConfigError: bad port"
    remote = RemoteError("w0", "ValueError", "no <net>", "Traceback:\n  line 3\nValueError: no <net>")
    assert error_text(remote).splitlines()[0] == "RemoteError: worker w0 raised ValueError: no <net>"
    assert error_text(remote).splitlines()[2:4] == ["Traceback on w0:", "Traceback:"]
    assert "no &lt;net&gt;" in lines_html(error_text(remote).splitlines())
