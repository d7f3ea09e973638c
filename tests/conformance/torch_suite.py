"""torch's own suite for process groups, with BACKEND=guava.

    python -m tests.conformance.torch_suite [--backend gloo] [--fast] [--report FILE] [NAME ...]

Runs `torch.testing._internal.distributed.distributed_test` as it ships in torch's wheel. That module decides by the
backend's name what a backend can do; here "guava" is declared wherever "gloo" is: in `DistTestCases.backend_feature`, and
in the module's own conditions on the name, which are rewritten in its text while it is loaded (`tests.support.torch_suite`).
`dist.monitored_barrier` refuses every backend but gloo by name; it is asked as the group's method here.

Prints the counts and what failed; the exit status is 0 when everything that ran passed. Without names the whole suite
runs, a minute and a half on two cores; `--fast` is the part that the default test run takes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import unittest
from pathlib import Path
from typing import Any

#: Chosen for breadth: one test of every kind that takes a few seconds.
FAST = (
    "test_all_reduce_coalesced_sum",
    "test_all_gather_object_default_pg",
    "test_barrier_timeout_global",
    "test_scatter_object_list",
    "test_gather",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
    "test_DistributedDataParallelCPU",
)


class _Result(unittest.TextTestResult):
    """Keeps the names of what passed, too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.passed: list[str] = []

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self.passed.append(test._testMethodName)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--backend", default="guava", choices=["guava", "gloo"])
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--report", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    os.environ["BACKEND"] = arguments.backend  # read while the suite is loaded, here and in every process of a test
    from tests.support import torch_suite as module

    names = arguments.names or (FAST if arguments.fast else None)
    found = unittest.defaultTestLoader.getTestCaseNames(module.TestProcessGroup)
    suite = unittest.TestSuite(module.TestProcessGroup(name) for name in (names or found))
    result = unittest.TextTestRunner(resultclass=_Result, verbosity=2).run(suite)
    assert isinstance(result, _Result)
    failed = sorted({test._testMethodName for test, _ in [*result.failures, *result.errors]})
    report = {
        "backend": arguments.backend,
        "tests": result.testsRun,
        "passed": len(result.passed),
        "skipped": len(result.skipped),
        "failed": failed,
    }
    if arguments.report:
        arguments.report.write_text(json.dumps({**report, "names": result.passed}))
    print(json.dumps(report))
    return 0 if not failed else 1


if __name__ == "__main__":
    sys.exit(main())
