import json

import pytest
import torch

import guava_nb
from guava_nb.spec.own_code import is_own


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
