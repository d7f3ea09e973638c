"""What holds for all tests: properties are about results, not about how busy the machine is; and what must not skip."""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from guava_nb.spec.loading import loading_without_collections
from tests.support import covered, warm

# Threads that wait for each other on two cores take a third of the tests' processor time, and small tensors gain nothing by them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
warm.install()

# The same examples in every run; GUAVA_TEST_LUCK draws others, which is how a case that nobody thought of is found.
settings.register_profile("guava", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("luck", settings.get_profile("guava"), derandomize=False)
settings.load_profile("luck" if os.environ.get("GUAVA_TEST_LUCK") else "guava")

#: What even a machine that was made for these tests may lack.
_MAY_LACK = re.compile(
    r"CUDA|GPU|Windows|polars|pyarrow|transformers|peft|wandb|mlflow|no ::1 here|not permitted here|openmpi-bin|Slurm|slurm",
    re.IGNORECASE,
)


#: Files with long tests: one that came last would keep one process busy while the other has nothing left. Those that wait for
#: half of their time (two kernels, namespaces, cut links) stand between those that compute, so that they share the cores.
_FIRST = (
    "test_state_machine",
    "test_notebooks",
    "test_two_kernels",
    "test_browser",
    "test_group_modes",
    "test_namespaces",
    "test_parallel",
    "test_programs",
    "test_tunnel_faults",
    "test_guava_run",
    "test_explorer",
    "test_matrix",
    "test_export",
    "test_orchestrate",
    "test_pipeline_part",
    "test_slurm",
    "test_front_door",
    "test_background",
    "test_house",
    "test_forecast",
)
_UNIT = Path(__file__).parent / "unit"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole", action="store_true", help="run all cells of the tables that are covered by some of them"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only the whole tables have; begin with the longest files, end with unit tests, whose files are short."""
    cells = [(item, _cell(item)) for item in items if hasattr(item, "callspec")]
    for item, cell in cells:
        if covered.is_covered(*cell):
            item.add_marker(pytest.mark.whole)
    problems = covered.stale(cell for _, cell in cells) if not any("::" in word for word in config.args) else []
    if problems:
        raise pytest.UsageError("tests/support/covered.py: " + "; ".join(problems))
    if not config.getoption("--whole"):
        left_out = [item for item in items if item.get_closest_marker("whole")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("whole")]
    place = {name: number for number, name in enumerate(_FIRST)}
    items.sort(key=lambda item: (place.get(item.path.stem, len(place)), _UNIT in item.path.parents))


def _cell(item: pytest.Item) -> tuple[str, str, str]:
    """File, test and cell of a table, as `covered` names them."""
    return item.nodeid.partition("::")[0], item.originalname, item.callspec.id  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect no garbage while modules load: there is none, and looking for it takes a third of the time."""
    with loading_without_collections():
        return (yield)


#: Items of a run that trains for certain: torch loads this part of itself when the first optimizer is made.
_MANY_ITEMS = 1000
#: Modules that were loaded when what is loaded was last left out of collections; so many more are worth another time.
_left_out, _WORTH_IT = 0, 200


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what is loaded by now out of every later collection of garbage: with torch one takes a quarter of a second."""
    if len(session.items) > _MANY_ITEMS:
        with loading_without_collections():
            importlib.import_module("torch._dynamo")
    _leave_out_what_is_loaded()


def _leave_out_what_is_loaded() -> None:
    global _left_out
    if len(sys.modules) > _left_out + _WORTH_IT:
        gc.collect()
        gc.freeze()
        _left_out = len(sys.modules)


#: Threads that a file may leave behind: a pool of workers that later files use, and what libraries keep.
_MOST_THREADS_LEFT = 24
_ENDS_WITHIN_S = 10.0


@pytest.fixture(scope="module", autouse=True)
def _collections_stay_short() -> None:
    """A file may have loaded much, and each session that is closed collects garbage."""
    _leave_out_what_is_loaded()


@pytest.fixture(scope="module", autouse=True)
def _threads_end() -> Iterator[None]:
    """A file ends the threads that it began: hundreds that wait cost every later test, and are more than some machines allow."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + _ENDS_WITHIN_S
    while len(left := set(threading.enumerate()) - before) > _MOST_THREADS_LEFT and time.monotonic() < deadline:
        time.sleep(0.05)
    names = Counter(re.sub(r"\d+", "#", thread.name) for thread in left)
    assert len(left) <= _MOST_THREADS_LEFT, f"{len(left)} threads of this file still run: {names.most_common(6)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """With GUAVA_TEST_ALL set a test that skips for want of a program fails: its install step would be missed."""
    report = yield
    if report.skipped and os.environ.get("GUAVA_TEST_ALL") and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not _MAY_LACK.search(reason):
            report.outcome, report.longrepr = "failed", f"nothing may be skipped here, but this was: {reason}"
    return report
