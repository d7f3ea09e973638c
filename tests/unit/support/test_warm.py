"""What processes begin with that tests start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm

pytestmark = pytest.mark.skipif(
    bool(warm._all_cold()), reason="GUAVA_TEST_COLD starts each process by itself; Windows too"
)

TELLS = """
import sys
print(sys.argv[1:], sys.modules["__main__"].__file__ == sys.argv[0], "guava_nb.worker.worker_session" in sys.modules)
"""


@pytest.mark.parametrize(
    ("words", "has_ours"),
    [(["-m"], True), (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m"], False)],
    ids=["a script", "a script that torchrun starts"],
)
def test_scripts_begin_with_our_modules_and_what_others_start_with_none(
    tmp_path: Path, words: list[str], has_ours: bool
) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    command = [sys.executable, *words, "tests.support.script", str(tmp_path / "tells.py"), "a word"]
    environment = {**os.environ, "PYTHONPATH": str(warm.ROOT)}
    done = subprocess.run(command, env=environment, cwd=warm.ROOT, capture_output=True, text=True, timeout=110)
    assert done.stdout == f"['a word'] True {has_ours}\n", done.stderr
