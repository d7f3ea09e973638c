"""Anything that may stand in a batch comes back the same; anything else is refused with its place."""

from __future__ import annotations

import collections
import enum
import math
import sys
import types
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.data import node_kinds
from guava_nb.data.codec import DTYPES, class_resolver, imported_class, pack, tensor_bytes, tensor_from, unpack
from guava_nb.errors import ConfigError, GuavaError, RemoteProtocolError
from guava_nb.protocol.messages import TensorSpec, Tree

COMMON = settings(max_examples=80, deadline=None)


pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Sample:
    image: Any
    label: Any = 3
    seen: list[Any] = field(default_factory=list)


@dataclass
class Picky:
    value: int

    def __post_init__(self) -> None:
        raise AssertionError("the receiver must not run a class's code")


class Color(enum.Enum):
    RED = 1


class WordNumber(int):
    pass


def travel(value: Any, resolve: Any = imported_class) -> Any:
    tree, buffers = pack(value)
    payload = b"".join(buffers)
    for spec in tree.tensors:
        assert spec.offset % 16 == 0 or spec.nbytes == 0
        assert spec.offset + spec.nbytes <= len(payload)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(tree), type=Tree)
    return unpack(again, bytearray(payload), resolve)


def raw(tensor: torch.Tensor) -> bytes:
    """The oracle: bytes by a way that shares no code with the one under test."""
    flat = torch.empty(tensor.shape, dtype=tensor.dtype)
    flat.copy_(tensor.detach())
    return bytes(flat.untyped_storage().tolist())


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert raw(one) == raw(other)
    elif isinstance(one, np.ndarray) and one.dtype != object:
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(one, np.ndarray):
        assert one.shape == other.shape
        assert_same(one.ravel().tolist(), other.ravel().tolist())
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    elif isinstance(one, dict):
        assert_same(list(one.keys()), list(other.keys()))
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, float):
        assert repr(one) == repr(other)
    else:
        assert one == other


# ------------------------------------------------------------------------------------------------------------- tensors

SHAPES = [(), (0,), (1,), (1, 0, 2), (3,), (2, 3), (2, 3, 4, 5)]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    noise = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return noise.view(dtype).view(shape) if math.prod(shape) else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(DTYPES[name], shape, seed=7)
    tree, buffers = pack(tensor)
    assert sum(view.nbytes for view in buffers) == tensor.numel() * tensor.dtype.itemsize
    assert_same(travel(tensor), tensor)


@COMMON
@given(
    name=st.sampled_from(sorted(set(DTYPES) - {"complex32", "float4_e2m1fn_x2"})),
    sizes=st.lists(st.integers(0, 4), max_size=4),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_any_view_of_a_tensor_travels_as_its_values(name: str, sizes: list[int], seed: int, data: Any) -> None:
    tensor = random_tensor(DTYPES[name], tuple(sizes), seed)
    tensor = tensor.permute(data.draw(st.permutations(range(len(sizes)))))
    if sizes and tensor.shape[0] > 1:
        tensor = tensor[1 :: data.draw(st.integers(1, 2))]
    if data.draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
    assert_same(travel(tensor), tensor)


def test_channels_last_conjugated_negated_and_differentiable_tensors_travel_as_values() -> None:
    image = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    complex_values = torch.randn(3, 2, dtype=torch.complex64)
    negated = complex_values.conj().imag
    assert negated.is_neg()
    back = travel([image, complex_values, complex_values.conj(), negated, torch.ones(2, requires_grad=True) * 2])
    assert torch.equal(back[0], image)
    assert torch.equal(back[1], complex_values)
    assert torch.equal(back[2], complex_values.conj().resolve_conj())
    assert torch.equal(back[3], negated.resolve_neg())
    assert torch.equal(back[4], torch.full((2,), 2.0))
    assert not back[4].requires_grad


def test_extreme_labels_survive() -> None:
    labels = torch.tensor([-(2**63), 2**63 - 1, -100, 2**40])
    assert_same(travel(labels), labels)


def test_the_same_tensor_is_sent_once_and_is_one_again() -> None:
    weight = torch.randn(8, 8)
    tree, buffers = pack({"embed": weight, "head": weight, "view": weight[:], "other": weight.t(), "row": weight[0]})
    assert len(tree.tensors) == 3
    back = unpack(tree, b"".join(buffers))
    assert back["embed"] is back["head"] is back["view"]
    assert torch.equal(back["other"], weight.t())
    assert torch.equal(back["row"], weight[0])


def test_empty_tensors_are_not_mistaken_for_each_other() -> None:
    back = travel([torch.empty(0), torch.empty(0, 3), torch.empty(0, dtype=torch.int64)])
    assert [tuple(tensor.shape) for tensor in back] == [(0,), (0, 3), (0,)]
    assert back[2].dtype is torch.int64


def test_a_contiguous_tensor_is_not_copied_on_either_side() -> None:
    tensor = torch.zeros(1000)
    _, buffers = pack(tensor)
    tensor[0] = 5.0
    assert np.frombuffer(buffers[0], np.float32)[0] == 5.0
    payload = bytearray(4000)
    received = unpack(pack(tensor)[0], payload)
    received[1] = 7.0
    assert np.frombuffer(payload, np.float32)[1] == 7.0


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_a_read_only_or_misaligned_payload_gives_a_tensor_that_can_be_written_to(name: str) -> None:
    tensor = random_tensor(DTYPES[name], (5,), seed=3)
    content = bytes(tensor_bytes(tensor))
    for view in (content, memoryview(bytearray(b"x" + content))[1:]):
        made = tensor_from(name, (5,), view)
        assert raw(made) == content
        assert made.data_ptr() % made.element_size() == 0
        made.view(torch.uint8)[0] = 1


# -------------------------------------------------------------------------------------------------------- plain values

numpy_dtypes = st.sampled_from(["?", "u1", "<i8", ">i4", "<f2", "<f4", ">f8", "<c16", "<M8[ns]", "<m8[s]", "<U3", "S4"])
arrays = st.builds(
    lambda dtype, shape, fill: np.full(shape, fill).astype(dtype),
    numpy_dtypes,
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 9),
)
small_tensors = st.builds(
    random_tensor,
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16]),
    st.sampled_from(SHAPES[:6]),
    st.integers(0, 9),
)
keys = st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(0, 3), st.text()))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.text(st.characters(codec=None, categories=["Cs", "Lu"]), max_size=3),
    st.binary(),
    st.binary(min_size=5000, max_size=5001),
    st.builds(bytearray, st.binary(max_size=9)),
    st.builds(slice, st.none() | st.integers(), st.integers(), st.none() | st.integers()),
    st.builds(lambda sizes: torch.Size(sizes), st.lists(st.integers(0, 9), max_size=3)),
    st.sampled_from([torch.bfloat16, torch.qint8, torch.device("cuda:1"), torch.device("cpu")]),
    st.frozensets(st.integers(), max_size=3),
    st.sets(st.text(), max_size=3),
    arrays,
    arrays.filter(lambda array: array.size > 0).map(lambda array: array.ravel()[0]),
    small_tensors,
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict),
        st.builds(Point, inner, inner),
        st.builds(Sample, inner, inner, st.lists(inner, max_size=2)),
    ),
    max_leaves=12,
)


@COMMON
@given(values)
def test_any_nesting_comes_back_the_same(value: Any) -> None:
    back = travel(value)
    if isinstance(value, Sample):
        assert isinstance(back, Sample)
        value, back = vars(value), vars(back)
    assert_same_through_classes(value, back)


def assert_same_through_classes(one: Any, other: Any) -> None:
    if isinstance(one, Sample):
        assert type(other) is Sample
        assert_same_through_classes(vars(one), vars(other))
    elif isinstance(one, (list, tuple)) and not isinstance(one, torch.Size):
        assert type(one) is type(other)
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same_through_classes(mine, theirs)
    elif isinstance(one, dict):
        assert type(one) is type(other)
        assert_same(list(one), list(other))
        assert_same_through_classes(list(one.values()), list(other.values()))
    else:
        assert_same(one, other)


def test_ragged_lists_arrays_of_objects_and_packed_sequences() -> None:
    batch = {
        "x": torch.randn(2, 3),
        "meta": [{"id": "a", "words": [1, 2, 3]}, {"id": "b", "words": []}],
        "flag": True,
        "n": None,
        "names": np.array(["ä", None, [1, 2]], dtype=object),
        "lengths": [torch.zeros(5), torch.zeros(13), torch.zeros(328)],
        "nan": float("nan"),
    }
    back = travel(batch)
    assert list(back) == list(batch)
    assert back["meta"] == batch["meta"]
    assert back["names"].tolist() == ["ä", None, [1, 2]]
    assert [tensor.shape[0] for tensor in back["lengths"]] == [5, 13, 328]
    assert math.isnan(back["nan"])
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert_same(travel(packed), packed)


def test_a_batch_of_many_small_objects_does_not_fill_the_record() -> None:
    words = [f"word {number}" for number in range(100_000)]
    tree, buffers = pack(words)
    assert len(tree.structure) < 100
    assert unpack(tree, b"".join(buffers)) == words


def test_numpy_arrays_can_be_written_to_and_keep_byte_order() -> None:
    array = np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3))
    back = travel(array)
    assert_same(back, np.ascontiguousarray(array))
    back[0, 0] = 1


# ------------------------------------------------------------------------------------------------------------- classes


def test_without_resolve_classes_become_plain_containers() -> None:
    assert travel(Point(1, Sample(2)), resolve=None) == (1, {"image": 2, "label": 3, "seen": []})


def test_no_code_of_a_class_runs_at_the_receiver() -> None:
    made = object.__new__(Picky)
    made.value = 4
    assert travel(made).value == 4


def test_a_class_of_the_notebook_is_found_in_the_shared_module() -> None:
    shared = types.ModuleType("guava_shared")
    exec("from typing import NamedTuple\nclass Pair(NamedTuple):\n    a: int\n    b: int\n", shared.__dict__)
    there = collections.namedtuple("Pair", "a b", module="__main__")
    back = travel(there(1, 2), class_resolver(shared))
    assert type(back) is shared.Pair
    assert back == (1, 2)
    assert type(travel(Point(1, 2), class_resolver(shared))) is Point


def test_an_unknown_or_changed_class_is_said_so() -> None:
    nowhere = collections.namedtuple("Nowhere", "a", module="__main__")
    with pytest.raises(ConfigError, match=r"Nowhere of module __main__.*%%guava_share"):
        travel(nowhere(1), class_resolver(types.ModuleType("guava_shared")))
    other = collections.namedtuple("Point", "x y z", module=__name__)
    sys.modules.setdefault(__name__, sys.modules[Point.__module__])
    with pytest.raises(ConfigError, match=r"fields \['x', 'y', 'z'\] at the sender"):
        travel(other(1, 2, 3))


@pytest.mark.parametrize("name", ["subprocess:Popen", "os:system", "builtins:dict", "nowhere:X", "x", "", "enum:Enum"])
def test_only_dataclasses_and_namedtuples_can_be_named(name: str) -> None:
    import subprocess  # noqa: F401  it must be imported to be refused for its kind

    tree = Tree(msgspec.msgpack.encode([node_kinds.DATACLASS, name, ["args"], "ls"]))
    with pytest.raises(ConfigError):
        unpack(tree, b"", imported_class)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("value", "place", "advice"),
    [
        ({"meta": [0, 1, 2, object()]}, "batch['meta'][3] is a object", "collate_fn"),
        (Sample(image=Color.RED), "batch.image is a", "send its .value"),
        ([torch.ones(2).to_sparse()], "batch[0] is a torch.Tensor", "make it dense"),
        ([torch.ones(2, device="meta")], "batch[0]", "make it dense"),
        ({"f": print}, "batch['f']", "%%guava_share"),
        ([types.MappingProxyType({"a": 1})], "batch[0]", "dict(value)"),
        ((1, (WordNumber(3),)), "batch[1][0]", "plain value"),
        ([np.ma.masked_array([1])], "batch[0]", "numpy.asarray"),
        ([np.zeros(2, dtype=[("a", "i4")])], "batch[0]", "plain arrays"),
        ([torch.Generator()], "batch[0]", "seed"),
        ({torch.ones(1): 1}, "batch is a torch.Tensor", "as a key"),
        ([torch.max(torch.ones(2, 2), 0)], "batch[0] is a torch.return_types.max", "tuple(value)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_travel_is_named_with_its_place(value: Any, place: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pack(value)
    assert place in str(caught.value)
    assert advice in str(caught.value)


def test_a_list_inside_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="contains itself"):
        pack(loop)


# ------------------------------------------------------------------------------------------------------- hostile bytes

junk = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 30) | st.floats() | st.text(max_size=5) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=20,
)
tagged = st.recursive(
    junk, lambda inner: st.builds(lambda tag, rest: [tag, *rest], st.integers(0, 22), st.lists(inner, max_size=4))
)
specs = st.builds(
    TensorSpec,
    st.sampled_from(["float32", "uint8", "bfloat16", "qint8", "object", ""]),
    st.lists(st.integers(-2, 2**62), max_size=3).map(tuple) | st.just((2,)),
    st.integers(-4, 2**63 - 1) | st.just(0),
    st.integers(-4, 2**63 - 1) | st.just(8),
)


@settings(max_examples=150, deadline=None)
@given(tagged.map(msgspec.msgpack.encode) | st.binary(max_size=40), st.lists(specs, max_size=3).map(tuple))
def test_any_bytes_give_a_value_or_an_error_of_ours(structure: bytes, tensors: tuple[TensorSpec, ...]) -> None:
    for resolve in (None, imported_class):
        try:
            unpack(Tree(structure, tensors), bytearray(32), resolve)
        except GuavaError as error:
            assert str(error)


def test_a_deep_structure_is_an_error_not_a_crash() -> None:
    with pytest.raises(RemoteProtocolError):
        unpack(Tree(b"\x92\x01" * 500_000 + b"\xc0"), b"")


@pytest.mark.parametrize("node", [[node_kinds.ARRAY, 0, "|u1"], [node_kinds.OBJECT_ARRAY]], ids=["bytes", "objects"])
def test_a_shape_of_a_million_axes_is_refused_at_once(node: list[Any]) -> None:
    node = [*node, [2**62] * 200_000]
    with pytest.raises(RemoteProtocolError, match="axes"):
        unpack(Tree(msgspec.msgpack.encode(node), (TensorSpec("uint8", (1,), 0, 1),)), b"x")
    with pytest.raises(RemoteProtocolError):
        tensor_from("float32", (2**62,) * 200_000, b"x")


@COMMON
@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.data(), st.booleans())
def test_a_tensor_keeps_the_order_of_its_axes_in_memory(sizes: list[int], data: Any, is_cut: bool) -> None:
    """Of any number of axes, cut too; as torch's own `clone` keeps it."""
    order = data.draw(st.permutations(range(len(sizes))))
    value = torch.arange(math.prod(sizes)).reshape(sizes).permute(order)
    value = value[: value.shape[0] - 1] if is_cut and value.shape[0] > 1 else value
    came = travel({"a": value, "b": [value]})
    assert torch.equal(came["a"], value)
    if value.numel():
        assert came["a"] is came["b"][0]
        long, kept = [axis for axis in range(value.ndim) if value.shape[axis] > 1], value.clone()
        assert [came["a"].stride(axis) for axis in long] == [kept.stride(axis) for axis in long]


@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [
        ((4, 3, 5, 6), torch.channels_last),
        ((1, 3, 5, 6), torch.channels_last),
        ((2, 3, 4, 5, 6), torch.channels_last_3d),
    ],
)
def test_channels_last_stays_channels_last(shape: tuple[int, ...], memory_format: torch.memory_format) -> None:
    value = torch.randn(shape).to(memory_format=memory_format)
    came = travel(value)
    assert came.stride() == value.stride()
    assert came.is_contiguous(memory_format=memory_format)
    assert torch.equal(came, value)
    assert travel(value[:0]).stride() == value[:0].stride()


def test_no_order_of_axes_of_a_stranger_gives_anything_but_an_error() -> None:
    tree, buffers = pack(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    for order in ([0, 1], [0, 0, 1, 2], [0, 1, 2, 9], [-1, 0, 1, 2], ["a", 1, 2, 3], []):
        strange = Tree(msgspec.msgpack.encode([node_kinds.PERMUTED_TENSOR, 0, *order]), tree.tensors)
        with pytest.raises(RemoteProtocolError):
            unpack(strange, bytearray(b"".join(buffers)), imported_class)
