"""Two machines that cannot reach each other and one that both reach: gloo cannot start between them, guava trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.namespaces import islands, why_not
from tests.support.processes import eventually

pytestmark = pytest.mark.timeout(150)

PROGRAMS = ["-m", "tests.support.namespace_programs"]


@pytest.fixture(autouse=True)
def _permitted() -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)


def text(folder: Path) -> str:
    return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(folder.glob("*.log")))


def test_gloo_cannot_start_where_guava_trains(tmp_path: Path) -> None:
    with islands(2) as (hub, others):
        hub.start([*PROGRAMS, "store", str(tmp_path)], tmp_path / "store.log")
        port = eventually(lambda: (tmp_path / "port").exists() and (tmp_path / "port").read_text(), 40, "the store")
        ranks = [
            island.start(
                [*PROGRAMS, "gloo", island.hub, port, str(rank), island.interface], tmp_path / f"gloo{rank}.log"
            )
            for rank, island in enumerate(others)
        ]
        for rank in ranks:
            rank.wait(70)
        for rank in (0, 1):
            said = (tmp_path / f"gloo{rank}.log").read_text()
            assert "met at the store" in said, text(tmp_path)
            assert "gloo failed" in said, text(tmp_path)
            assert "gloo started" not in said, text(tmp_path)


def test_guava_trains_between_workers_that_only_reach_the_hub(tmp_path: Path) -> None:
    jobs = [("zero", {"zero_stage": 2}), ("pipeline", {"micro_batches": 2}), ("tensor", {"tp": 2})]
    with islands(2) as (hub, others):
        orchestrator = hub.start([*PROGRAMS, "orchestrate", str(tmp_path), json.dumps(jobs)], tmp_path / "hub.log")
        eventually(lambda: (tmp_path / "code.json").exists(), 40, f"a join code {text(tmp_path)}")
        for k, (island, code) in enumerate(zip(others, json.loads((tmp_path / "code.json").read_text()), strict=True)):
            words = ["-m", "guava_nb", "worker", code, "--device", "cpu", "--name", f"w{k + 1}"]
            island.start(words, tmp_path / f"worker{k}.log")
        orchestrator.wait(110)
        assert (tmp_path / "results.json").exists(), text(tmp_path)
        results = json.loads((tmp_path / "results.json").read_text())
    assert [result["mode"] for result in results] == ["zero", "pipeline", "tensor"]
    for result in results:
        assert result["gap"] <= 1e-9, result
        assert result["path"]["path"] == "relay", result
        assert "cannot reach w" in result["path"]["reason"], result
    told = [note for note in results[-1]["notes"] if "the group goes through the orchestrator" in note]
    assert len(told) == 1, "probed once, told once"
