import functools
import json

import pytest
import torch

import guava_nb
from guava_nb.spec.own_code import is_own, users_function


@pytest.mark.parametrize(
    ("names", "own"),
    [
        (globals(), True),
        ({"__name__": "guava_shared", "__file__": "<guava_shared>"}, True),
        ({"__name__": "__main__"}, True),
        (vars(json), False),
        (vars(torch), False),
        (vars(guava_nb), False),
        ({"__name__": "builtins"}, False),
        ({}, False),
    ],
)
def test_installed_code_is_not_the_users(names, own):
    assert is_own(names) == own


@torch.no_grad()
def decorated():
    return is_own


@functools.lru_cache(maxsize=2)
def cached(a):
    return a


def test_what_installed_code_wraps_around_a_function_is_taken_off():
    """MoCo's published code gathers in a method under `torch.no_grad`."""
    assert users_function(decorated).__code__.co_names == ("is_own",)
    assert users_function(functools.partial(cached, 1)).__code__.co_varnames == ("a",)
    assert users_function(test_installed_code_is_not_the_users) is test_installed_code_is_not_the_users
    assert users_function(3) == 3
