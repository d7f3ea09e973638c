"""What a view says of progress."""

from __future__ import annotations

from guava_nb.render import (
    Progress,
    View,
    to_html,
)


def test_progress_never_leaves_the_bar() -> None:
    assert Progress(3, None).fraction is None
    assert Progress(0, 0).fraction is None
    assert Progress(12, 10).fraction == 1.0
    assert "?" in to_html(View("x", progress=Progress(3, None)))
