"""What a worker says about its rows counts where it was asked, and has the form that was asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from guava_nb.data.rows import KEY_BYTES
from guava_nb.errors import RemoteProtocolError
from guava_nb.protocol.messages import CacheHeld, CacheSpec, FlatTensor, RowList, RowsWanted
from guava_nb.row_cache.writer import RowWriter

NOTHING = memoryview(b"")
DIGEST = bytes(KEY_BYTES)


class Asked(SimpleNamespace):
    """A writer of a run with a cache, its caches, and what it sent and told."""


@pytest.fixture
def asked() -> Any:
    sent: list[Any] = []
    told: list[str] = []
    caches: dict[int, Any] = {}
    workers = SimpleNamespace(send=lambda rank, message: sent.append((rank, message)), name="w{}".format)
    writer = RowWriter(SimpleNamespace(cache=CacheSpec("memory", 1000)), caches, told.append)  # type: ignore[arg-type]
    writer.attach(SimpleNamespace(cluster=workers, on=lambda record, handler: None), "run")  # type: ignore[arg-type]
    return Asked(writer=writer, caches=caches, sent=sent, told=told)


def held(count: int, digest: bytes = DIGEST) -> CacheHeld:
    return CacheHeld("run", count, digest, 1000)


def test_a_list_that_was_not_asked_for_changes_nothing(asked: Any) -> None:
    asked.writer._on_list(0, RowList("run", FlatTensor("uint8", 20)), memoryview(bytes(20)))
    assert asked.caches == {}
    asked.writer._on_held(0, held(0), NOTHING)
    asked.writer._on_list(0, RowList("run", FlatTensor("uint8", 20)), memoryview(bytes(20)))
    asked.writer._on_held(0, held(5), NOTHING)  # it has answered
    assert len(asked.caches[0]) == 0 and asked.sent == []


def test_a_list_that_is_none_is_a_violation_of_its_sender(asked: Any) -> None:
    asked.writer._on_held(0, held(1), NOTHING)
    assert len(asked.sent) == 1
    with pytest.raises(RemoteProtocolError, match="19 bytes"):
        asked.writer._on_list(0, RowList("run", FlatTensor("uint8", 19)), memoryview(bytes(19)))
    asked.writer._on_list(0, RowList("run", FlatTensor("uint8", 20)), memoryview(bytes(20)))
    assert len(asked.caches[0]) == 1


@pytest.mark.parametrize("message", [held(-1), held(1, b"short")])
def test_an_impossible_number_of_rows_is_a_violation_of_its_sender(asked: Any, message: CacheHeld) -> None:
    with pytest.raises(RemoteProtocolError):
        asked.writer._on_held(0, message, NOTHING)


def test_a_worker_of_a_run_without_a_cache_cannot_say_that_it_holds_rows(asked: Any) -> None:
    asked.writer._spec.cache = None
    asked.writer._on_held(0, held(3), NOTHING)
    assert asked.caches == {} and asked.sent == []


def test_reasons_without_end_are_not_told_without_end(asked: Any) -> None:
    for number in range(1000):
        asked.writer._on_wanted(0, RowsWanted(run_id="run", keys=b"", reason=f"reason {number}"), NOTHING)
    assert len(asked.told) == 32
