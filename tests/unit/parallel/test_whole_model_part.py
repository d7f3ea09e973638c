"""What torch refuses of a model of which each worker holds a part is said in words of the user's code."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import FSDPModule

from guava_nb.parallel.whole_model_part import _unlike_whole


def test_torch_still_refuses_copies_in_these_words() -> None:
    refuse = FSDPModule.__new__.__globals__["_unimplemented_deepcopy"]
    with pytest.raises(AssertionError) as caught:
        refuse()
    assert "the step copies the model" in _unlike_whole(caught.value)


def test_a_gradient_of_a_gradient_is_named_and_nothing_else() -> None:
    assert "a gradient of a gradient" in _unlike_whole(RuntimeError("setStorage: out of bounds for storage of size 0"))
    assert _unlike_whole(RuntimeError("shapes do not fit")) == _unlike_whole(AssertionError()) == ""
