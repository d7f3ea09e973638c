"""Bytes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.config import DistributedConfig
from guava_nb.config.units import parse_bytes, show_bytes
from guava_nb.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("900MB", 900_000_000), ("900 mb", 900_000_000), ("1.5GB", 1_500_000_000), (".5 kB", 500), ("1b", 1),
        ("64KiB", 64 << 10), ("2 GiB", 2 << 30), ("1TB", 10**12), (" 3MiB ", 3 << 20),
    ],
)  # fmt: skip
def test_sizes_have_units(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("900", "900MB, 900GB"), ("1.5", "has no unit"), ("900 Mbit", "'Mbit' is no unit"), ("", "900MB"), ("MB", "900MB"),
        ("-1MB", "900MB"), ("1e3MB", "900MB"), ("0MB", "less than one byte"), ("nan GB", "900MB"), ("1 2MB", "900MB"),
    ],
)  # fmt: skip
def test_what_is_no_size_is_refused_with_an_example(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_bytes(text)


@given(st.integers(1, 10**17))
def test_what_is_shown_reads_back_as_about_the_same(nbytes: int) -> None:
    assert parse_bytes(show_bytes(nbytes)) == pytest.approx(nbytes, rel=0.06, abs=0.5)


def test_a_budget_in_the_environment_has_a_unit() -> None:
    assert DistributedConfig.load(environ={"GUAVA_BUDGET_BYTES": "900MB"}).budget_bytes == 900_000_000
    assert DistributedConfig.load(environ={"GUAVA_BUDGET_BYTES": "0"}).budget_bytes == 0
    assert DistributedConfig(budget_bytes=5).budget_bytes == 5
    with pytest.raises(ConfigError, match="GUAVA_BUDGET_BYTES.*has no unit"):
        DistributedConfig.load(environ={"GUAVA_BUDGET_BYTES": "900"})
    with pytest.raises(ConfigError, match="at least 0"):
        DistributedConfig(budget_bytes=-1)
