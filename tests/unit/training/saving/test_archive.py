from __future__ import annotations

import collections
import io
import pickle
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from guava_nb.training.saving import archive
from guava_nb.training.saving.archive import ArchiveError

SHARED = torch.randn(4, 3)
CONTENT: dict[str, Any] = {
    "floats": SHARED, "tied": SHARED, "part": SHARED[1:, ::2], "half": torch.ones(3, dtype=torch.bfloat16),
    "empty": torch.empty(0, 5), "eight": torch.ones(3).to(torch.float8_e4m3fn), "whole": torch.ones(4, dtype=torch.uint16),
    "yes": torch.ones(2, dtype=torch.bool), "complex": torch.ones(2, dtype=torch.complex64), "scalar": torch.tensor(3),
    "plain": [1, 2.5, None, True, 2**70, "text", b"\xff\x00", (), (1,), {"a": 3 + 4j}],
    "linear": torch.nn.Linear(2, 2).state_dict(), "parameter": torch.nn.Parameter(torch.ones(2)),
}  # fmt: skip


def saved(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


WHOLE = saved(CONTENT)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        bits = (
            one.detach().contiguous().reshape(-1).view(torch.uint8),
            other.contiguous().reshape(-1).view(torch.uint8),
        )
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "it.pt"


def test_it_gives_what_torch_wrote(path: Path) -> None:
    path.write_bytes(WHOLE)
    found = archive.load(path)
    assert same(CONTENT, found)
    assert found["floats"].data_ptr() == found["tied"].data_ptr()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, len(WHOLE) - 1), bits=st.integers(1, 255), cut=st.booleans())
def test_with_any_byte_changed_or_cut_it_is_refused_or_gives_the_same(
    path: Path, at: int, bits: int, cut: bool
) -> None:
    path.write_bytes(WHOLE[:at] if cut else WHOLE[:at] + bytes([WHOLE[at] ^ bits]) + WHOLE[at + 1 :])
    try:
        found = archive.load(path)
    except ArchiveError:
        return
    assert same(CONTENT, found) and not cut


def changed(path: Path, compression: int = zipfile.ZIP_STORED, **records: bytes) -> None:
    """Write an archive with right checksums whose records are others."""
    with zipfile.ZipFile(io.BytesIO(saved(torch.zeros(3)))) as old, zipfile.ZipFile(path, "w", compression) as new:
        for name in old.namelist():
            key = name.partition("/")[2].replace("/", "_").replace(".pkl", "")
            new.writestr(name, records.get(key, old.read(name)))


def tensor(numel: int, size: tuple[int, ...], stride: tuple[int, ...], times: int = 1) -> bytes:
    """The pickle of tensors over the 12 bytes of record data/0."""

    class Storage:
        pass

    class Pickler(pickle._Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", numel) if isinstance(value, Storage) else None

    class Made:
        def __init__(self, number: int) -> None:
            self.number = number

        def __reduce__(self) -> Any:
            hooks: collections.OrderedDict[str, int] = collections.OrderedDict()
            return torch._utils._rebuild_tensor_v2, (
                storage,
                0,
                size,
                (*stride[:-1], stride[-1] + self.number),
                False,
                hooks,
            )

    file, storage = io.BytesIO(), Storage()
    Pickler(file, 2).dump([Made(number) for number in range(times)])
    return file.getvalue()


#: Lists of nine times the list before, forty of them: 9 ** 40 in all.
LAUGHS = b"\x80\x02(]q\x00" + b"".join(b"](" + b"h%c" % n * 9 + b"eq%c" % (n + 1) for n in range(40)) + b"t."
HOSTILE = {
    "larger than its record": (tensor(10**12, (10**12,), (1,)), "does not fit what is stored of it: record size"),
    "a shape without memory": (tensor(3, (10**12,), (1,)), "does not fit what is stored of it"),
    "a shape that repeats": (tensor(3, (10**12,), (0,)), "larger than what is stored"),
    "a negative stride": (tensor(3, (3,), (-1,)), "does not fit what is stored of it"),
    "many in the same memory": (tensor(9999, (9999, 1), (1, 7), 200), "tensors are larger than"),
    "a list in itself": (b"\x80\x02]q\x00h\x00a.", "its content contains itself, or has more parts"),
    "a billion laughs": (LAUGHS, "its content contains itself, or has more parts"),
    "a place far out": (b"\x80\x02]r\xff\xff\xff\xff.", ""),
    "code": (pickle.dumps(print, 2), "only tensors and plain data"),
    "new instructions": (pickle.dumps([b"x" * 300], 5), "only tensors and plain data"),
    "an end too early": (b"\x80\x02](K", ""),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_what_asks_for_more_than_it_holds_is_refused_in_little_memory(path: Path, what: str) -> None:
    description, said = HOSTILE[what]
    changed(path, data=description, **{"data_0": bytes(4 * 9999)} if what == "many in the same memory" else {})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        found = archive.load(path)
    except ArchiveError as error:
        assert said in str(error)
    else:
        assert not said and found == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_what_is_compressed_is_refused_before_it_is_unpacked(path: Path) -> None:
    changed(path, zipfile.ZIP_DEFLATED, data_0=b"\0" * 10**7)
    with pytest.raises(ArchiveError, match="compressed"):
        archive.load(path)


def test_another_byte_order_and_a_tail_are_refused(path: Path) -> None:
    changed(path, byteorder=b"big")
    with pytest.raises(ArchiveError, match="another byte order"):
        archive.load(path)
    path.write_bytes(WHOLE + b"more")
    with pytest.raises(ArchiveError):
        archive.load(path)
