import pytest
import torch

import guava_nb
from guava_nb.errors import ConfigError
from guava_nb.parallel.replicas.gather_batch import gather_batch, gathering, refusing


def test_without_a_run_it_returns_what_it_is_given() -> None:
    rows = torch.randn(3, 2, requires_grad=True)
    assert guava_nb.gather_batch is gather_batch and gather_batch(rows) is rows


def test_what_it_does_holds_inside_only_and_ends_with_an_error() -> None:
    rows = torch.ones(2, 2)
    with gathering(lambda tensor: tensor * 2):
        assert torch.equal(gather_batch(rows), rows * 2)
        with gathering(None):
            assert gather_batch(rows) is rows
        with pytest.raises(ZeroDivisionError), gathering(None):
            _ = 1 / 0
        assert torch.equal(gather_batch(rows), rows * 2)
    assert gather_batch(rows) is rows


def test_a_number_is_no_batch_and_a_refusal_says_why() -> None:
    with pytest.raises(ConfigError, match="samples on the first axis"):
        gather_batch(torch.tensor(1.0))
    with gathering(refusing("there is no group")), pytest.raises(ConfigError, match="gather_batch: there is no group"):
        gather_batch(torch.ones(1))
