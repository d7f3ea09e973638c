"""A batch is read once: right, or refused with the way out; and what is told is what is cut."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from guava_nb.data.batch_reading import BatchReading
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.data.reading_words import Given
from guava_nb.data.split import RowSplitter, share_ranges
from guava_nb.errors import ConfigError
from guava_nb.nested import axes_at, children, cut_parts, marks_of, sliced
from guava_nb.parallel.pipeline.microbatches import cut_rows, micro_batch_sizes
from guava_nb.replica.preprocess import cut

COMMON = settings(max_examples=60, deadline=None)


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Item:
    image: Any
    label: Any


def detection(boxes: int) -> dict[str, Any]:
    return {
        "img": torch.rand(8, 3, 4, 5),
        "bboxes": torch.rand(boxes, 4),
        "batch_idx": torch.randint(0, 8, (boxes,)).sort()[0],
    }


def graphs(nodes: int, edges: int) -> dict[str, Any]:
    return {
        "x": torch.rand(nodes, 3),
        "edge_index": torch.randint(0, nodes, (2, edges)),
        "batch": torch.randint(0, 8, (nodes,)).sort()[0],
        "y": torch.rand(8),
    }


def read(*batches: Any, drawn: int | None = 8, given: str = "", **how: Any) -> BatchReading:
    reading = BatchReading(given, **how)
    for batch in batches:
        reading.read(batch, drawn)
    return reading


def twice(make: Callable[..., Any], *args: Any) -> list[Any]:
    return [make(*args), make(*args)]


# ---------------------------------------------------------------------------------------------------------- right


class Encoding(UserDict[str, Any]):
    """As the collate functions of Hugging Face return."""


X, Y = torch.rand(8, 5), torch.rand(8)
ANCHORS = torch.rand(9, 4)


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ((X, Y), "cut: inputs [8, 5], targets [8]"),
        ({"x": X, "y": Y, "scale": 2.0, "note": "text", "none": None}, "cut: x [8, 5], y [8]"),
        (Encoding(input_ids=X, labels=Y), "cut: input_ids [8, 5], labels [8]"),
        (Pair(X, {"y": Y}), "cut: a [8, 5], b.y [8]"),
        (Item(X, Y), "cut: image [8, 5], label [8]"),
        (X, "cut: batch [8, 5]"),
        ((X, [{"boxes": torch.rand(k, 4)} for k in range(8)]), "cut: inputs [8, 5]; one per sample: targets [8]"),
        (((X, torch.full((8,), 5)), Y), "cut: inputs.0 [8, 5], inputs.1 [8], targets [8]"),
        ({"x": X, "anchors": ANCHORS}, "cut: x [8, 5]; whole to every worker: anchors [9, 4]"),
        ({"x": X, "names": ("cat", "dog", "cow", "hen")}, "cut: x [8, 5]; whole to every worker: names [4]"),
        ({"x": X, "size": (640, 480)}, "cut: x [8, 5]"),
        ((X, torch.zeros(1)), "cut: inputs [8, 5]"),
        ([f"text {k}" for k in range(8)], "one per sample: batch [8]"),
    ],
)
def test_a_plain_batch_is_read_and_told(batch: Any, told: str) -> None:
    reading = read(batch, batch)
    assert (reading.problem, reading.text) == ("", told)
    assert read(batch, batch, given=told).text == told


def test_smaller_batches_and_optional_parts_are_fine() -> None:
    reading = read({"x": X, "y": Y}, {"x": X}, {"x": X[:3], "y": Y[:3], "z": torch.rand(3)}, {"x": X[:1], "y": None})
    assert not reading.problem
    parts = RowSplitter(reading=reading).split({"x": X[:3], "y": Y[:3], "z": Y[:3]}, [(0, 2), (2, 3)], 3)
    assert [len(parts[1][key]) for key in "xyz"] == [1, 1, 1]


# ---------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("batches", "sentence"),
    [
        ([detection(37), detection(29)], r"bboxes \[37, 4\] has not one entry per sample.*in another batch it is \[29, 4\]"),
        ([detection(8), detection(29)], r"bboxes \[8, 4\] was read as having one entry per sample.*it is \[29, 4\]"),
        ([graphs(37, 90), graphs(33, 81)], r"x \[37, 3\] has not one entry per sample.*list with one entry per sample"),
        ([graphs(48, 96), graphs(48, 96)], r"x \[48, 3\].*its values change from batch to batch"),
        ([detection(37)], r"bboxes \[37, 4\] would travel whole to every worker, and with a single batch nothing shows"),
        (twice(lambda: (torch.rand(12, 8, 5), Y)), r"If its samples are on axis 1.*cut on axis 1: inputs \[12, 8, 5\]"),
        (twice(lambda: (X, (torch.zeros(2, 8, 6), Y))), r"targets\.0 \[2, 8, 6\] has as many entries on axis 1 as the batch"),
        (twice(lambda: (torch.rand(8, 8, 5), Y)), r"inputs \[8, 8, 5\] has the 8 samples of the batch on two axes"),
        (twice(lambda: (torch.zeros(8, 8, dtype=torch.int64), Y)), r"the 8 samples of the batch on two axes.*axis 1"),
        (twice(lambda: (torch.rand(16, 5), torch.rand(16))), r"8 samples were drawn and the batch has 16 entries"),
        (twice(lambda: torch.rand(12, 8, 5)), r'put the batch axis first.*batch="cut on axis 1: batch \[12, 8, 5\]"'),
        ([{"x": X, "captions": ["a"] * 40}, {"x": X, "captions": ["b"] * 40}], r"captions \[40\].*its values change"),
        ([{"x": X, "ids": list(range(37))}, {"x": X, "ids": list(range(29))}], r"ids \[37\].*another batch it is \[29\]"),
        ([{"x": X}, {"x": X, "extra": torch.rand(3, 3)}], r"extra \[3, 3\].*it is not so in every batch"),
        (twice(lambda: {"x": X, "batch_idx": torch.arange(8)}), r"batch_idx \[8\] holds numbers from 0 to 7"),
        (twice(lambda: torch.nn.utils.rnn.pack_sequence([torch.ones(k) for k in (9, 4)])), "PackedSequence"),
        (twice(object), "which cannot travel to a worker"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_refers_to_the_whole_batch_or_may_be_read_twice_is_refused(batches: list[Any], sentence: str) -> None:
    reading = read(*batches)
    with pytest.raises(ConfigError, match=sentence):
        RowSplitter(reading=reading).split(batches[0], [(0, 4), (4, 8)], 8)
    # Nothing is refused where nothing is cut: one worker gets the very batch.
    assert RowSplitter(reading=reading).split(batches[0], [(0, 8)], 8)[0] is batches[0]


def test_two_samples_of_two_targets_with_two_boxes_each_are_refused() -> None:
    """The list was cut inside each target, and not between them."""
    batch = (torch.rand(2, 3, 8, 8), [{"boxes": torch.rand(2, 4)}, {"boxes": torch.rand(2, 4)}])
    asked = read(batch, batch, drawn=2)
    assert "targets is a list of 2 elements in a batch of 2 samples" in asked.problem
    given = read(batch, batch, drawn=2, given="one per sample: targets")
    assert not given.problem
    parts = RowSplitter(reading=given).split(batch, [(0, 1), (1, 2)], 2)
    assert parts[1][1] == [batch[1][1]] and parts[1][0].shape == (1, 3, 8, 8)


def test_hidden_states_of_two_samples_are_no_samples() -> None:
    states, frames = (torch.zeros(1, 2, 6), torch.zeros(1, 2, 6)), torch.rand(2, 5, 3)
    assert "inputs is a tuple of 2 elements" in read(((frames, states), torch.rand(2)), drawn=2).problem
    assert "states is a tuple of 2 elements" in read({"x": frames, "states": states}, drawn=2).problem
    words = "cut: inputs.0, targets; cut on axis 1: inputs.1.0, inputs.1.1"
    assert not read(((frames, states), torch.rand(2)), drawn=2, given=words).problem


def test_targets_of_unlike_kinds_are_one_per_sample_or_asked_for() -> None:
    """Code in public gives `torch.tensor([])` where an image has no object."""
    none, images = torch.tensor([]), torch.rand(2, 3, 4, 5)
    assert read((images, [none, torch.rand(3, 4)]), drawn=2).text.endswith("one per sample: targets [2]")
    assert "targets is a list of 2 elements" in read((images, [none, torch.rand(2, 4)]), drawn=2).problem


def test_class_labels_that_happen_to_count_are_no_positions() -> None:
    labels = torch.arange(8)
    assert not read({"x": X, "label": labels}, {"x": X, "label": labels}).problem
    assert not read((X, labels), (X, labels)).problem
    assert not read({"x": X, "idx": labels}, {"x": X, "idx": labels + 8}).problem


def test_without_drawn_samples_parts_that_disagree_are_refused_with_the_guess() -> None:
    batches = twice(lambda: (torch.rand(12, 8, 5), torch.rand(8)))
    problem = read(*batches, drawn=None).problem
    assert "That a batch has 12 samples was taken from its first tensor" in problem
    reading = BatchReading("cut on axis 1: inputs; cut: targets")
    assert [reading.read(batch, None) for batch in batches] == [8, 8] and not reading.problem
    half = RowSplitter(reading=reading).split(batches[0], [(0, 3), (3, 8)], 8)[1]
    assert torch.equal(half[0], batches[0][0][:, 3:]) and torch.equal(half[1], batches[0][1][3:])


def test_what_a_user_says_is_checked() -> None:
    with pytest.raises(ConfigError, match="names 'foo', which this batch does not have; it has: .*inputs, targets"):
        read((X, Y), given="cut: foo")
    with pytest.raises(ConfigError, match="their numbers differ: inputs has 8, targets has 5"):
        read((X, Y[:5]), given="cut: inputs, targets")
    with pytest.raises(ConfigError, match=r"targets is cut on axis 1; it has the shape \[8\]"):
        read((X, Y), given="cut on axis 1: targets")
    assert not read(*twice(detection, 37), given="whole: bboxes, batch_idx").problem


def test_nothing_is_a_sentence_of_its_own() -> None:
    with pytest.raises(ConfigError, match="returned None instead of a batch: end it with a return"):
        read(None)


# ------------------------------------------------------------------------------- what a loader knows beside the batch


class Samples(Dataset[Any]):
    """Boxes: two each of the first samples; frames in time."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.rand(3, 6, 6), {"boxes": torch.rand(2, 4)}, torch.rand(4, 5)


def as_lists(samples: list[Any]) -> Any:
    return [image for image, _, _ in samples], [target for _, target, _ in samples]


def time_first(samples: list[Any]) -> Any:
    return torch.stack([frames for _, _, frames in samples], dim=1), torch.zeros(len(samples))


def batch_first(samples: list[Any]) -> Any:
    return torch.stack([frames for _, _, frames in samples]), torch.zeros(len(samples))


def nothing(samples: list[Any]) -> None:
    torch.stack([frames for _, _, frames in samples])


@pytest.mark.parametrize(
    ("collate", "batch_size", "told"),
    [
        (as_lists, 2, "one per sample: inputs [2], targets [2]"),
        (time_first, 4, "cut: targets [4]; cut on axis 1: inputs [4, 4, 5]"),
        (time_first, 6, "cut: targets [6]; cut on axis 1: inputs [4, 6, 5]"),
        (batch_first, 4, "cut: inputs [4, 4, 5], targets [4]"),
    ],
)
def test_a_batch_of_other_size_shows_what_grows_with_the_samples(collate: Any, batch_size: int, told: str) -> None:
    torch.manual_seed(3)
    plain = list(DataLoader(Samples(), batch_size=batch_size, collate_fn=collate))
    after = torch.get_rng_state()
    torch.manual_seed(3)
    feed = LoaderFeed(DataLoader(Samples(), batch_size=batch_size, collate_fn=collate))
    batches = list(feed.epoch())
    assert (feed.reading.problem, feed.reading.text) == ("", told)
    assert torch.equal(torch.get_rng_state(), after), "nothing was drawn that the plain loop does not draw"
    assert torch.equal(batches[-1].batch[0][0], plain[-1][0][0])


def test_torchs_own_collate_function_leaves_no_doubt() -> None:
    class Square(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return {
                "tokens": torch.zeros(4, dtype=torch.int64),
                "frames": torch.zeros(4, 5),
                "two": [1, 2],
                "batch_idx": index % 4,
            }

    feed = LoaderFeed(DataLoader(Square(), batch_size=4))
    list(feed.epoch())
    assert not feed.reading.problem
    assert feed.reading.text == "cut: tokens [4, 4], frames [4, 4, 5], two.0 [4], two.1 [4], batch_idx [4]"


def test_streams_know_what_was_drawn_and_lists_do_not() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([(torch.rand(5, 3), k) for k in range(12)])

    def frames_first(samples: list[Any]) -> Any:
        return torch.stack([frames for frames, _ in samples], 1), torch.tensor([label for _, label in samples])

    feed = LoaderFeed(DataLoader(Stream(), batch_size=4, collate_fn=frames_first))
    assert [one.rows for one in feed.epoch()] == [4, 4, 4]
    assert "inputs [5, 4, 3]" in feed.reading.problem and "cut on axis 1: inputs" in feed.reading.problem
    lists = LoaderFeed([(torch.rand(5, 4, 3), torch.rand(4))] * 2, batch="cut on axis 1: inputs; cut: targets")
    assert [one.rows for one in lists.epoch()] == [4, 4] and not lists.reading.problem


def test_a_collate_function_without_return_is_told() -> None:
    with pytest.raises(ConfigError, match="returned None instead of a batch"):
        list(LoaderFeed(DataLoader(Samples(), batch_size=4, collate_fn=nothing)).epoch())


# -------------------------------------------------------------------------------------- what is told is what is cut

ROWS = 7  # a prime above all other lengths here


@st.composite
def leaves(draw: st.DrawFn) -> tuple[Any, str]:
    """A part, and how it has to be read."""
    kind = draw(st.sampled_from(["cut", "axis 1", "list", "whole", "scalar"]))
    inner = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
    made = {
        "cut": torch.rand(ROWS, *inner),
        "axis 1": torch.rand(3, ROWS, *inner),
        "list": [torch.rand(k + 1, 3) for k in range(ROWS)],
        "whole": torch.rand(5, *inner),
        "scalar": draw(st.sampled_from([3, "text", None, torch.tensor(2.0), (640, 480)])),
    }
    return made[kind], kind


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, str]:
    """A nested batch, and the words for how it is read."""
    parts = {
        "first": (np.arange(ROWS * 2.0).reshape(ROWS, 2), "cut"),
        **draw(st.dictionaries(st.sampled_from("abcde"), leaves())),
    }
    words = {"cut": "cut", "axis 1": "cut on axis 1", "list": "one per sample", "whole": "whole"}
    form = draw(st.sampled_from(["dict", "encoding", "pair", "item", "named"]))
    prefix = {"dict": "", "encoding": "", "pair": "inputs.", "item": "image.", "named": "a."}[form]
    text = "; ".join(f"{words[kind]}: {prefix}{name}" for name, (_, kind) in parts.items() if kind in words)
    values = {name: value for name, (value, _) in parts.items()}
    rest = torch.rand(ROWS)
    forms = {
        "pair": (values, rest),
        "item": Item(values, rest),
        "named": Pair(values, rest),
        "encoding": Encoding(values),
    }
    return forms.get(form, values), text


def joined(parts: list[Any], axes: dict[Any, int], path: tuple[Any, ...] = ()) -> Any:
    """Shares put together again by what the reading says alone."""
    if path in axes:
        if isinstance(parts[0], torch.Tensor):
            return torch.cat(parts, axes[path])
        return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else sum(parts, type(parts[0])())
    inside = children(parts[0])
    if inside is None:
        assert all(part is parts[0] for part in parts)
        return parts[0]
    columns = zip(*(children(part) or [] for part in parts), strict=True)
    return {column[0][0]: joined([value for _, value in column], axes, (*path, column[0][0])) for column in columns}


def assert_same(one: Any, other: Any) -> None:
    inside = children(other)
    if isinstance(other, torch.Tensor | np.ndarray):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    elif inside is None:
        assert one == other
    else:
        mine = dict(children(one) or ())
        for key, value in inside:
            assert_same(mine[key], value)


@COMMON
@given(batches(), st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), st.integers(2, 4))
def test_shares_pieces_and_micro_batches_follow_what_is_told(
    drawn: tuple[Any, str], weights: list[int], count: int
) -> None:
    batch, words = drawn
    reading = read(batch, batch, drawn=ROWS, given=words)
    assert not reading.problem
    assert Given(words).names.items() <= Given(reading.text).names.items()
    splitter, ranges = RowSplitter(reading=reading), share_ranges(ROWS, weights)
    axes = axes_at(batch, splitter.marks(batch, ROWS))
    assert_same(joined(splitter.split(batch, ranges, ROWS), axes) if len(ranges) > 1 else batch, batch)
    pieces = cut(batch, splitter.marks(batch, ROWS), ROWS, count)
    assert sum(rows for _, rows in pieces) == ROWS
    assert_same(joined([piece for piece, _ in pieces], axes), batch)
    sizes = micro_batch_sizes(ROWS, count)
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        halves = {half: {path[1:]: axis for path, axis in axes.items() if path[0] == half} for half in (0, 1)}
        for half, value in enumerate(batch):
            parts = cut_rows(value, ROWS, sizes, lambda path, part: axes.get(path), half)
            assert_same(joined(parts, halves[half]), value)


@COMMON
@given(batches())
def test_a_share_of_a_share_is_cut_in_the_same_way(drawn: tuple[Any, str]) -> None:
    """What a worker cuts further, by the marks that came with its share, is what the orchestrator would have cut."""
    batch, words = drawn
    splitter = RowSplitter(reading=read(batch, batch, drawn=ROWS, given=words))
    share, expected = splitter.split(batch, [(2, ROWS), (2, 4)], ROWS)
    marks = marks_of(share, splitter.reading.axes(ROWS - 2))
    again = cut_parts(share, lambda path, part: axes_at(share, marks).get(path), lambda p, a: [sliced(p, a, 0, 2)], 1)[
        0
    ]
    assert_same(_plain(again), expected)


def _plain(value: Any) -> Any:
    inside = children(value)
    return value if inside is None else {key: _plain(child) for key, child in inside}


@pytest.mark.parametrize(
    ("parts", "drawn", "found"),
    [
        (((5, 8), (5, 8)), None, 'cut on axis 1: inputs [5, 8], targets [5, 8]"'),
        (((5, 8), (5, 8)), 5, ""), (((5, 8), (5,)), None, ""),
        (((5, 8), (5, 3)), None, ""), (((5, 1), (5, 1)), None, ""), (((5, 8, 2), (5, 8)), None, "8 of them"),
    ],
)  # fmt: skip
def test_a_batch_whose_samples_may_be_on_axis_1_says_how_to_have_it_so(
    parts: tuple[tuple[int, ...], ...], drawn: int | None, found: str
) -> None:
    reading, batch = BatchReading(), tuple(torch.zeros(shape) for shape in parts)
    reading.read(batch, drawn)
    said = reading.on_second_axis(batch)
    assert found in said and bool(said) == bool(found)
