"""The session's methods over worker loops in memory: values, errors by worker, interrupts, losses, newcomers, a busy session."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.job import Job
from guava_nb.cluster.user_code import code_on_workers
from guava_nb.cluster.user_code.code_on_workers import CodeOnWorkers
from guava_nb.errors import ClusterError, ConfigError, RemoteError, SourceError, WorkerLost
from guava_nb.protocol.messages import CodeRan, CodeValues, InterruptCode, Message, RunCode
from tests.support.direct import DirectCluster, DirectWorker


class Session(CodeOnWorkers):
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def _open_cluster(self) -> Cluster:
        return self._cluster


Hook = Callable[[DirectWorker, Message], None]


@contextlib.contextmanager
def session(*hooks: Hook | None) -> Iterator[tuple[Session, DirectCluster]]:
    cluster = DirectCluster()
    try:
        for index, hook in enumerate(hooks):
            more = () if hook is None else (hook,)
            DirectWorker(cluster, f"w{index}", *more).start()
        cluster.wait_for(len(hooks), 20)
        yield Session(cluster), cluster
    finally:
        cluster.close()


def test_values_go_there_and_back_by_worker() -> None:
    with session(None, None) as (made, _):
        assert made.run_code("x = rank + 1\nx") == {"w0": 1, "w1": 2}
        assert made.push({"t": torch.arange(3.0)}, ["w1"]) == ["w1"]
        assert made.run_code("(t * 2).tolist()", ["w1"]) == {"w1": [0.0, 2.0, 4.0]}
        assert {worker: found["x"] for worker, found in made.pull("x").items()} == {"w0": 1, "w1": 2}
        with pytest.raises(ConfigError, match="worker w0: no cell and no %guava_push has defined 't' here"):
            made.pull("t")
        with pytest.raises(ConfigError, match="no worker that is connected is called 'w7'; there are: w0, w1"):
            made.run_code("1", ["w7"])
        with pytest.raises(SourceError, match="a cell without %%guava_px"):
            made.run_code("!ls")
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError, match=r"^t: 4\.0 kB; at most 1\.0 kB"):
            patch.setattr(code_on_workers, "_MOST_BYTES", 1000)
            made.push({"t": torch.zeros(1000)})
        with pytest.raises(ConfigError, match="is no name"):
            made.push({"a b": 1})
        with pytest.raises(ConfigError, match="options of pip are not taken"):
            made.install("--upgrade")


def test_errors_are_told_by_worker_and_equal_ones_together() -> None:
    with session(None, None, None) as (made, _):
        with pytest.raises(RemoteError) as caught:
            made.run_code("if rank < 2:\n    1 / 0\nelse:\n    {}['k']")
        assert str(caught.value) == "worker w0, w1 raised ZeroDivisionError: division by zero; w2: KeyError: 'k'"
        assert (
            caught.value.remote_traceback.count("<cell 'px'>") == 2 and "guava_nb" not in caught.value.remote_traceback
        )
        assert made.run_code("worker") == {"w0": "w0", "w1": "w1", "w2": "w2"}


def test_unlike_errors_of_many_workers_are_told_of_the_first_ones() -> None:
    with session(*[None] * 6) as (made, _):
        with pytest.raises(RemoteError) as caught:
            made.run_code("raise ValueError(f'{rank} ' + 'x' * 5000)")
        text = str(caught.value)
        assert text.startswith("worker w0 raised ValueError: 0 x") and "; w3: ValueError: 3 x" in text
        assert text.endswith("; others on w4, w5: run it there alone (--on NAME) to see them")
        assert len(text) < 7000 and caught.value.remote_traceback.count("Traceback on ") == 3


def test_one_interrupt_stops_the_cells_and_the_workers_stay() -> None:
    running = threading.Barrier(3)
    told: list[str] = []
    with session(None, None) as (made, cluster):
        made.run_code("import threading")
        threading.Thread(target=lambda: (running.wait(20), signal.raise_signal(signal.SIGINT)), daemon=True).start()
        import builtins

        builtins.guava_test_barrier = running  # type: ignore[attr-defined]  # these workers are threads of this process
        with pytest.raises(KeyboardInterrupt):
            made.run_code(
                "guava_test_barrier.wait(20)\nwhile True: pass", on_output=lambda worker, lines: told.extend(lines)
            )
        assert told[0].startswith("Interrupting w0, w1; they stay in the session")
        assert made.run_code("rank") == {"w0": 0, "w1": 1}
        assert len(cluster.roster.ready()) == 2


def test_a_worker_that_is_lost_meanwhile_is_named() -> None:
    def dies(worker: DirectWorker, message: Message) -> None:
        if isinstance(message, CodeRan):
            worker.die()

    with session(None, dies) as (made, _), pytest.raises(WorkerLost, match=r"how it ended is not known: w1 \("):
        made.run_code("rank")


def test_files_travel_to_newcomers_before_anything_else(tmp_path: Path) -> None:
    path = tmp_path / "guava_test_helper.py"
    path.write_text("A = 1\n")
    with session(None) as (made, cluster):
        assert made.send_files(path) == {"w0": "1 new file"}
        path.write_text("A = 22\n")
        assert made.send_files(path) == {"w0": "changed: guava_test_helper.py"}
        DirectWorker(cluster, "late").start()
        cluster.wait_for(2, 20)
        assert made.run_code("import guava_test_helper\nguava_test_helper.A", ["late"]) == {"late": 22}
        assert [len(order.files) for order in cluster.greetings] == [1]  # type: ignore[attr-defined]


def test_a_session_that_trains_refuses_and_one_without_workers_says_what_to_do() -> None:
    with session(None) as (made, cluster), Job(cluster).attached(), pytest.raises(ClusterError, match="in progress"):
        made.run_code("1")
    with session() as (made, _), pytest.raises(ClusterError, match="no worker is here"):
        made.run_code("1")


def _lying(change: Callable[[Message], Message]) -> Hook:
    """A worker that sends something else beside or before the true answer."""

    def hook(worker: DirectWorker, message: Message) -> None:
        if isinstance(message, CodeRan | CodeValues) and not getattr(worker, "lied", False):
            worker.lied = True  # type: ignore[attr-defined]
            worker._send(change(message), ())

    return hook


def test_an_answer_to_nothing_changes_nothing_and_a_false_announcement_ends_the_session() -> None:
    other = _lying(lambda message: CodeRan(request_id=1, type_name="ValueError", text="of another request"))
    with session(other) as (made, _):
        assert made.run_code("7") == {"w0": 7}

    def huge(message: Message) -> Message:
        return CodeRan(request_id=message.request_id, nbytes=1 << 50)  # type: ignore[attr-defined]

    with session(None, _lying(huge)) as (made, cluster):
        with pytest.raises(WorkerLost, match="w1"):
            made.run_code("7")
        assert cluster.expelled == {1}

    damaged = _lying(
        lambda message: msgspec.structs.replace(
            message, values=msgspec.structs.replace(message.values, structure=b"\xc1")
        )
    )  # type: ignore[attr-defined]  # noqa: E501
    with session(damaged) as (made, cluster):
        with pytest.raises(WorkerLost, match="values that cannot be read"):
            made.run_code("7")
        assert cluster.expelled == {0}


def test_lines_come_before_the_answer_and_in_their_order() -> None:
    from guava_nb.protocol.messages import Log

    def prints(worker: DirectWorker, message: Message) -> None:
        if isinstance(message, CodeRan):
            for number in range(50):
                worker._send(Log("stdout", (f"line {number}",)), ())

    told: list[str] = []

    def take(worker: str, lines: Sequence[str]) -> None:
        assert worker == "w0"
        told.extend(lines)

    with session(prints) as (made, _):
        made.run_code("1", on_output=take)
    assert told == [f"line {number}" for number in range(50)]


def test_the_orders_are_what_was_asked() -> None:
    sent: list[Message] = []
    with session(None) as (made, cluster):
        send = cluster.send
        cluster.send = lambda rank, message, buffers=(): (sent.append(message), send(rank, message, buffers))[1]  # type: ignore[method-assign,misc,assignment]
        made.run_code("1", cell="px 3")
    [order] = sent
    assert isinstance(order, RunCode) and (order.cell, order.text, order.rank) == ("px 3", "1", 0)
    assert not any(isinstance(message, InterruptCode) for message in sent)
