"""What is told of how a batch is read can be given back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.data.reading_words import Given, told
from guava_nb.errors import ConfigError

NAMES = st.text("abcxyz_ 0", min_size=1, max_size=6).map(str.strip).filter(bool)


@given(st.dictionaries(NAMES, st.tuples(st.sampled_from([None, 0, 1, 2]), st.booleans()), min_size=1, max_size=9))
def test_what_is_told_is_read_again(parts: dict[str, tuple[int | None, bool]]) -> None:
    axes = {(name,): axis for name, (axis, _) in parts.items()}
    lists = {(name,) for name, (axis, is_list) in parts.items() if axis == 0 and is_list}
    text = told({(name,): (name, "[8, 3]") for name in parts}, axes, lists)
    assert Given(text).names == {name: -1 if axis is None else axis for name, (axis, _) in parts.items()}
    assert Given(text.replace(" [8, 3]", "")).names == Given(text).names


def test_the_kinds_stand_in_one_order_and_many_parts_are_counted() -> None:
    shapes = {(0,): ("inputs", "[12, 8, 5]"), (1, "y"): ("targets.y", "[8]"), (1, "a"): ("targets.a", "[9, 4]")}
    text = told(shapes, {(0,): 1, (1, "y"): 0, (1, "a"): None}, set())
    assert text == "cut: targets.y [8]; cut on axis 1: inputs [12, 8, 5]; whole to every worker: targets.a [9, 4]"
    many = told({(k,): (f"p{k}", "[8]") for k in range(40)}, {(k,): 0 for k in range(40)}, set())
    assert many.endswith("p11 [8], 28 more") and len(Given(many).names) == 12


def test_a_name_stands_for_all_that_is_in_it_and_the_nearer_one_counts() -> None:
    words = Given("cut: inputs; whole: inputs.mask")
    assert [words.axis(name) for name in ("inputs", "inputs.x.y", "inputs.mask", "targets")] == [0, 0, -1, None]
    assert words.missing(["inputs", "inputs.x"]) == "inputs.mask"


def test_names_of_paths() -> None:
    assert Given.name((), False) == "batch"
    assert Given.name((0, "box"), True) == "inputs.box" and Given.name((1,), True) == "targets"
    assert Given.name((0, "a,b;c.d[e]"), False) == "0.a_b_c_d_e_"


@pytest.mark.parametrize("text", ["image, label", "cut image", "split: x", "cut on axis x: a", "cut: a; nonsense"])
def test_other_words_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="say it like 'cut: image, label"):
        Given(text)
