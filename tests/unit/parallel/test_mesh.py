"""Which axes of a mesh stay within machines."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.config.mesh import Mesh
from guava_nb.parallel.mesh import AXES, axes_inside


@pytest.mark.parametrize(
    ("sizes", "machines", "inside"),
    [
        ((2, 1, 2), (0, 0, 1, 1), ("tp",)),
        ((2, 1, 2), (0, 1, 0, 1), ("dp",)),  # the ranks that share layers sit on unlike machines
        ((1, 2, 2), (0, 0, 1, 1), ("tp",)),
        ((2, 2, 2), (0, 0, 0, 0, 1, 1, 1, 1), ("pp", "tp")),
        ((4, 1, 1), (0, 0, 1, 1), ()),
        ((2, 1, 2), (0, 0, 0, 1), ()),  # one machine has three, the other one
        ((2, 1, 2), (0, 0, 0, 0), ()),  # one machine: the whole group is alike
        ((2, 1, 2), (), ()),
    ],
)
def test_examples(sizes: tuple[int, int, int], machines: tuple[int, ...], inside: tuple[str, ...]) -> None:
    assert axes_inside(Mesh(*sizes), machines) == inside


@given(st.tuples(*[st.integers(1, 3)] * 3), st.data())
def test_an_axis_is_inside_when_no_two_neighbours_along_it_are_on_unlike_machines(
    sizes: tuple[int, int, int], data: st.DataObject
) -> None:
    count = sizes[0] * sizes[1] * sizes[2]
    machines = data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    inside = axes_inside(Mesh(*sizes), machines)
    if len(set(machines)) == 1:
        assert inside == ()
        return

    def machine(place: tuple[int, ...]) -> int:
        return machines[(place[0] * sizes[1] + place[1]) * sizes[2] + place[2]]

    for dim, axis in enumerate(AXES):
        leaves = False
        for place in itertools.product(*map(range, sizes)):
            along = {machine((*place[:dim], other, *place[dim + 1 :])) for other in range(sizes[dim])}
            leaves = leaves or len(along) > 1
        assert (axis in inside) == (sizes[dim] > 1 and not leaves)
