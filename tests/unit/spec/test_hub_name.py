"""Names of weights on the hub are told from paths, and read."""

from __future__ import annotations

from pathlib import Path

import pytest

from guava_nb.errors import ConfigError
from guava_nb.spec.hub_name import is_on_hub, split_name


def test_names_are_told_from_paths_and_read() -> None:
    assert is_on_hub("hf:gpt2") and not is_on_hub("gpt2") and not is_on_hub(Path("folder") / "hf.pt")
    assert split_name("hf:gpt2") == ("gpt2", None)
    assert split_name("hf:me/net@v1") == ("me/net", "v1")
    assert split_name("hf:me\\net@") == ("me/net", None)
    for wrong in ("hf:", "hf:@main", "hf:/etc", "hf:../up"):
        with pytest.raises(ConfigError, match="names no repository"):
            split_name(wrong)
