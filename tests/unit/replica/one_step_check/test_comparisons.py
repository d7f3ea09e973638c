from __future__ import annotations

import torch
from torch.nn import functional

from guava_nb.replica.one_step_check.comparisons import Comparisons


def test_numbers_that_targets_are_compared_with_are_noted() -> None:
    found: set[int] = set()
    targets = torch.tensor([0, 2])
    with Comparisons(found):
        assert (targets != 2).tolist() == [True, False]
        assert not (torch.rand(3) > 5).any()  # no targets
        functional.cross_entropy(torch.rand(2, 3), targets, ignore_index=-1)
    assert found == {2, -1}
