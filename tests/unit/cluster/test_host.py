"""What workers that are started on this machine are told to take, without starting any."""

from __future__ import annotations

import gc
import os
import socket
import threading
import types
import weakref
from pathlib import Path
from typing import Any

import pytest

from guava_nb import Orchestrator
from guava_nb.cluster import host
from guava_nb.config.state_folder import write_private


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int | None]]:
    """Name, device and threads of each worker; on a machine of two GPUs and 16 cores."""
    made: list[tuple[str, str, int | None]] = []

    def launch(code: Any, device: str, name: str, threads: int | None, *rest: Any) -> Any:
        made.append((name, device, threads))
        return types.SimpleNamespace(alive=True, status=lambda: types.SimpleNamespace(device=device))

    monkeypatch.setattr(host, "launch", launch)
    monkeypatch.setattr(host, "expect_workers", lambda threads: made.append(("two or more", "anywhere", threads)))
    monkeypatch.setattr(host, "visible_gpus", lambda: ["cuda:0", "cuda:1"])
    monkeypatch.setattr(host, "allowed_cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return made


def session(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[Orchestrator, list[str]]:
    made, notices = Orchestrator(**settings), []
    made._listener = types.SimpleNamespace(host="127.0.0.1", join_code=lambda address: "a code")  # type: ignore[assignment]
    monkeypatch.setattr(made, "_open_cluster", lambda: types.SimpleNamespace(notice=notices.append))
    return made, notices


def test_workers_take_the_gpus_and_then_share_the_cores(monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> None:
    made, notices = session(monkeypatch)
    made.launch_workers(1)
    made.launch_workers(2)
    assert started[0] == ("local-1", "cuda:0", 15)
    assert started[1:] == [("two or more", "anywhere", 5), ("local-2", "cuda:1", 5), ("local-3", "cpu", 5)]
    assert notices[-1] == "local-2 takes cuda:1, 5 threads; local-3 takes the processor, 5 threads"


def test_what_a_person_sets_holds(monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> None:
    made, _ = session(monkeypatch, threads_per_worker=2)
    made.launch_workers(1, device="cpu")
    made.launch_workers(1, device="cuda:1", threads=3)
    assert [entry[1:] for entry in started] == [("cpu", 2), ("cuda:1", 3)]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    session(monkeypatch)[0].launch_workers(1, device="cpu")
    assert started[-1][2] == 4


def test_what_earlier_sessions_held_is_gone_when_a_later_one_closes() -> None:
    def closed() -> weakref.ref[Any]:
        with Orchestrator(master_ip="127.0.0.1", master_port=0) as made:
            return weakref.ref(made._cluster)

    gc.collect()
    gc.disable()
    try:
        first = closed()
        closed()
        assert first() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("listens", "dialled"), [("::", "::1"), ("", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("10.0.0.7", None)]
)
def test_own_workers_dial_an_address_that_is_listened_on(
    monkeypatch: pytest.MonkeyPatch, started: list[Any], listens: str, dialled: str | None
) -> None:
    made, _ = session(monkeypatch)
    asked: list[str | None] = []
    made._listener = types.SimpleNamespace(host=listens, join_code=asked.append)  # type: ignore[assignment]
    made.launch_workers(1, device="cpu")
    assert asked == [dialled]


def session_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("guava-")}


def test_a_session_that_is_dropped_closes_itself() -> None:
    before = session_threads()
    made = Orchestrator()
    made.open()
    gone = weakref.ref(made)
    with pytest.warns(ResourceWarning, match="was dropped without close"):
        del made
        gc.collect()
    for thread in session_threads() - before:
        thread.join(20)
    assert gone() is None
    assert session_threads() <= before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_closes_nothing_of_the_session_and_does_not_wait() -> None:
    with Orchestrator() as made:
        child = os.fork()
        if child == 0:
            made._close = os.abort  # type: ignore[method-assign]
            made.close()
            del made
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


def test_a_session_whose_port_another_program_has_goes_on_at_another_one(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    first = Orchestrator(session_file=str(path))
    code, session_id = first.open(), first._open_cluster().session_id
    saved = path.read_bytes()
    first.close()
    write_private(path, saved)  # as if its process had been killed
    with socket.create_server(("127.0.0.1", code.port)), Orchestrator(session_file=str(path)) as second:
        moved = second.open()
        assert second.goes_on and second.has_moved and moved.port != code.port
        assert (moved.secret, moved.fingerprint) == (code.secret, code.fingerprint)
        assert second._open_cluster().session_id == session_id
