"""Choosing modes one after the other, without a session."""

from __future__ import annotations

from guava_nb import Orchestrator


def test_a_mode_s_settings_do_not_linger_and_the_configuration_s_do() -> None:
    orchestrator = Orchestrator(path="relay", micro_batches=6)
    orchestrator.set_mode("pipeline", micro_batches=2, pipeline_split="3")
    assert (orchestrator.config.micro_batches, orchestrator.config.pipeline_split) == (2, "3")
    assert orchestrator.config.path == "relay"
    orchestrator.set_mode("zero", path="direct")
    assert orchestrator.config.path == "direct"
    orchestrator.set_mode("pipeline")
    assert (orchestrator.config.micro_batches, orchestrator.config.pipeline_split) == (6, "")
    assert orchestrator.config.path == "relay"
