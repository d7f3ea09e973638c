from __future__ import annotations

import gc

import pytest

from guava_nb.spec.loading import loading_without_collections


def test_collections_are_off_in_the_block_and_then_as_before() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError), loading_without_collections():
        assert not gc.isenabled()
        raise ImportError("it is not here")
    assert gc.isenabled()
    gc.disable()
    try:
        with loading_without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
