from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.training.saving.plain_pickle import NotPlain, built

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
PLAIN = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
)


def found(content: Any) -> Any:
    return built(pickle.dumps(content, 2), {"collections OrderedDict": OrderedDict}.__getitem__, lambda said: said)


@given(PLAIN)
def test_it_builds_what_pickle_would(content: Any) -> None:
    assert found(content) == content and repr(found(content)) == repr(content)


def test_a_name_is_what_the_caller_says_and_notes_beside_a_dict_are_left_out() -> None:
    noted = OrderedDict(a=1)
    noted._metadata = {"version": 1}  # type: ignore[attr-defined]
    assert found(noted) == noted and not hasattr(found(noted), "_metadata")
    with pytest.raises(KeyError):
        found(print)


@pytest.mark.parametrize(
    "description", [b"\x80\x02K\x01K\x02.", b"\x80\x02K\x01K\x02b.", b"\x80\x02C\x01a.", b"\x80\x02."]
)
def test_what_plain_data_does_not_need_is_refused(description: bytes) -> None:
    with pytest.raises(NotPlain):
        built(description, str, str)
