"""torch's own suite as a class, with guava declared wherever gloo is.

Loading is what `tests.conformance.torch_suite` describes; it happens on import, once: each test's processes are forked.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
import tempfile
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

SUITE = "torch.testing._internal.distributed.distributed_test"
_BACKEND = os.environ.setdefault("BACKEND", "guava")
os.environ.setdefault("WORLD_SIZE", "2")
if "TEMP_DIR" not in os.environ:
    os.environ["TEMP_DIR"] = tempfile.mkdtemp(prefix="guava-torch-suite-")
os.environ.setdefault("INIT_METHOD", f"file://{os.environ['TEMP_DIR']}/shared_init_file")

#: What the module says of gloo by name, and the same said of guava, too.
_DECLARATIONS = {
    'BACKEND != "gloo"': 'BACKEND not in ("gloo", "guava")',
    'BACKEND == "gloo"': 'BACKEND in ("gloo", "guava")',
    'require_backend_is_available({"gloo"})': 'require_backend_is_available({"gloo", "guava"})',
}


def _monitored_barrier(
    group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    import torch.distributed as dist

    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    (group or dist.distributed_c10d._get_default_group()).monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)


def _load() -> types.ModuleType:
    """The suite's module, with guava declared."""
    if _BACKEND == "guava":
        import torch.distributed as dist
        from torch.testing._internal.common_distributed import DistTestCases

        import guava_nb.backend  # noqa: F401 - registers the backend

        for backends in DistTestCases.backend_feature.values():
            if "gloo" in backends:
                backends.add("guava")
        DistTestCases.backend_feature["plugin"].add("guava")
        dist.monitored_barrier = _monitored_barrier  # type: ignore[assignment]
    spec = importlib.util.find_spec(SUITE)
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")
    for of_gloo, of_both in _DECLARATIONS.items():
        text = text.replace(of_gloo, of_both)
    module = types.ModuleType(SUITE)
    module.__file__ = spec.origin
    sys.modules[SUITE] = module
    exec(compile(text, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


_suite = _load()


class TestProcessGroup(_suite.TestDistBackend, _suite.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
    """The suite; each test runs in `WORLD_SIZE` processes of its own."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(
            multiprocessing.get_context("fork").Process
        )  # this process has loaded all, and has no threads
