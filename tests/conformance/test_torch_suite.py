"""A part of torch's own suite, chosen for breadth; `python -m tests.conformance.torch_suite` runs all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(280)
def test_the_fast_part_of_torchs_own_suite_passes(tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="torch's suite needs expecttest, which is part of the extra test")
    report = tmp_path / "report.json"
    words = [sys.executable, "-m", "tests.conformance.torch_suite", "--fast", "--report", str(report)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TEMP_DIR": str(tmp_path)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=270, check=False)
    assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    result = json.loads(report.read_text(encoding="utf-8"))
    assert result["failed"] == [], done.stderr[-8000:]
    assert result["passed"] == result["tests"] > 5
