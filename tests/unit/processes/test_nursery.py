"""Processes of a nursery are like spawned ones: pipes, numbers, exit statuses, sessions, and an end that is seen."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import psutil
import pytest

from guava_nb.processes.nursery import ForkedProcess, Nursery, begin_nursery, close_unused, find_nursery
from tests.support.processes import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forked on Linux only; this is Windows or macOS")

PROGRAM = """
import os, random, sys
from guava_nb.processes.nursery import serve
sys.stderr = open(os.devnull, "w")
serve(["json", "no_such_module", "numpy"])
import gc, numpy, signal
assert gc.isenabled() and gc.get_freeze_count() and signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
for line in sys.stdin:
    word = line.strip()
    if word == "tell":
        mine = (os.getpid(), os.getsid(0), os.getppid(), random.random(), numpy.random.rand())
        print(*mine, len(os.listdir("/proc/self/fd")), flush=True)
    else:
        os._exit(int(word))
"""


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MARK_OF_THIS_TEST": "1"}
    begin_nursery([sys.executable, "-c", PROGRAM], environment)
    made = find_nursery(environment)
    assert made is not None and find_nursery(dict(os.environ)) is None
    begin_nursery([sys.executable, "-c", "raise SystemExit"], environment)
    assert find_nursery(environment) is made
    yield made
    made.close()
    assert find_nursery(environment) is None


def asked(process: ForkedProcess) -> list[str]:
    process.stdin.write("tell\n")
    process.stdin.flush()
    return process.stdout.readline().split()


def ended(process: ForkedProcess) -> int:
    status = process.wait()
    process.stdin.close()
    process.stdout.close()
    return status


def test_each_has_its_own_pipes_session_and_random_numbers_and_tells_its_exit_status(nursery: Nursery) -> None:
    first, second = ForkedProcess(nursery), ForkedProcess(nursery)
    told = [asked(first), asked(second)]
    for process, (pid, session, parent, *_) in zip((first, second), told, strict=True):
        assert int(pid) == int(session) == process.pid
        assert int(parent) == nursery._process.pid
    assert told[0][3] != told[1][3] and told[0][4] != told[1][4]
    assert told[0][5] == told[1][5]  # the second one has no descriptor of the first one
    assert first.poll() is None and second.poll() is None
    first.stdin.write("7\n")
    first.stdin.flush()
    assert ended(first) == first.poll() == 7
    second.kill()
    assert ended(second) == second.poll() == -signal.SIGKILL
    second.kill()  # of what has ended
    for process in (first, second):  # a session keeps the handles of all that it ever started
        with pytest.raises(OSError):
            os.fstat(process._status)
    assert nursery._process.poll() is not None  # with the last of its processes


def test_a_process_outlives_its_nursery_and_its_end_is_seen(nursery: Nursery) -> None:
    process = ForkedProcess(nursery)
    pid = process.pid
    nursery._process.kill()
    nursery._process.wait()
    assert process.poll() is None and int(asked(process)[0]) == pid
    with pytest.raises(OSError):
        ForkedProcess(nursery)
    os.kill(pid, signal.SIGKILL)
    assert ended(process) == process.poll() == -signal.SIGKILL


def test_a_nursery_that_never_comes_up_is_an_end_too() -> None:
    nursery = Nursery([sys.executable, "-c", "raise SystemExit(1)"], dict(os.environ))
    process = ForkedProcess(nursery)
    assert ended(process) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        process.kill()


def test_it_ends_with_the_process_that_started_it() -> None:
    code = (
        "import os, sys\n"
        "from guava_nb.processes.nursery import ForkedProcess, Nursery\n"
        f"nursery = Nursery([sys.executable, '-c', {PROGRAM!r}], dict(os.environ))\n"
        "process = ForkedProcess(nursery)\n"
        "print(nursery._process.pid, process.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    with psutil.Popen([sys.executable, "-c", code], stdout=-1, text=True) as starter:
        pids = [int(word) for word in starter.stdout.readline().split()]
    eventually(lambda: not any(map(runs, pids)), 20, "both have ended: the process reads the end of its input")


def test_only_those_that_no_process_was_asked_of_are_closed_as_unused(nursery: Nursery) -> None:
    unused = {**os.environ, "MARK_OF_THIS_TEST": "2"}
    begin_nursery([sys.executable, "-c", PROGRAM], unused)
    process = ForkedProcess(nursery)
    close_unused()
    assert find_nursery(unused) is None
    assert int(asked(process)[0]) == process.pid
    process.stdin.write("0\n")
    process.stdin.flush()
    assert ended(process) == 0


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # whose new parent need not look for it
    except psutil.NoSuchProcess:
        return False
