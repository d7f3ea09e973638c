"""Join codes are taken out of text."""

from __future__ import annotations

from guava_nb.errors import ConfigError
from guava_nb.render import (
    Table,
    View,
    error_text,
    redact,
    to_html,
    to_text,
)

CODE = "guava1:c2VjcmV0LXNlY3JldC1zZWNyZXQ"


def test_secrets_are_taken_out_everywhere() -> None:
    made = View(CODE, CODE, None, (Table((CODE,), ((CODE,),), CODE),), (CODE,))
    for text in (to_text(made), to_html(made, [CODE]), redact(f"a '{CODE}' b"), error_text(ConfigError(CODE))):
        assert CODE.split(":")[1] not in text
    assert redact(f"a '{CODE}' b") == "a 'guava1:<hidden>' b"
    assert redact("guava1: is how a code begins") == "guava1: is how a code begins"
