"""What holds for all tests: properties are about results, not about how busy the machine is; and what must not skip."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("guava", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("guava")

#: What even a machine that was made for these tests may lack.
_MAY_LACK = re.compile(r"CUDA|GPU|Windows|no ::1 here|not permitted here", re.IGNORECASE)


#: What takes long and has a faster sibling that stays: run with GUAVA_TEST_SLOW set. The rest keeps within 20 minutes on two
#: cores.
_SLOW = (
    "test_torch_suite.py",
    "test_it_runs[02_",
    "test_it_runs[03_",
    "test_it_runs[04_",
    "test_an_interrupt_in_a_long_step_costs_nothing[",
    "test_the_cpu_side_listens_and_a_killed_gpu_side_is_replaced",
    "test_gloo_cannot_start_where_guava_trains",
    "test_guava_trains_between_workers_that_only_reach_the_hub",
    "test_a_kernel_killed_on_either_side_leaves_nothing_behind",
    "test_a_killed_orchestrator_goes_on_without_predicting_anything_again",
    "test_the_scripts_that_accelerate_ships[",
    "test_an_accelerate_script_trains_as_in_one_process",
    "test_under_torchrun_no_code_is_needed",
    "test_check_finds_no_difference_to_plain_pytorch[3-",
    "test_cloudflared_faults.py",
    "test_it_runs[05_",
    "test_a_budget_is_not_passed_and_the_run_goes_on_from_its_checkpoint[0.5-2",
    "test_a_budget_is_not_passed_and_the_run_goes_on_from_its_checkpoint[0.5-1-o",
    "test_a_rank_that_nobody_can_replace_is_told_and_the_next_call_works_with_another",
    "test_a_rank_killed_in_mid_prediction_is_replaced_by_another[",
    "test_equal_to_plain_pytorch[zero 3 of 3-guava",
    "test_an_agent_that_dies_comes_back_at_another_address[",
    "test_two_workers_train_through_it",
    "test_an_agent_that_dies_comes_back_at_another_address[ngrok-tls]",
    "test_functions_of_the_user_run_on_the_worker_and_change_no_result[pipeline-3",
    "test_two_gpu_sides_with_models_of_their_own_begin_with_the_first_one_s",
    "test_inference_as_a_service_in_the_order_of_the_file",
    "test_every_mode_gives_what_plain_pytorch_gives[hybrid-4",
    "test_every_mode_gives_what_plain_pytorch_gives[zero-3",
    "test_a_worker_killed_in_the_middle_changes_nothing[validation]",
    "test_a_killed_worker_s_successor_proves_what_is_on_its_disk",
    "test_a_program_of_ones_own_asks_for_the_backend_by_name",
    "test_a_rank_that_does_not_come_is_named",
    "test_an_interrupt_ends_it_and_the_others",
    "test_nothing_is_left_after_close_in_the_middle_of_a_run",
    "test_three_workers_have_the_losses_of_plain_pytorch[64",
    "test_a_state_goes_on_in_any_other_mode[",
    "test_dropout_repeats_from_its_seed[hybrid",
    "test_equal_to_plain_pytorch[hybrid zero 3-gloo",
    "test_equal_to_plain_pytorch[hybrid zero 1-gloo",
    "test_equal_to_plain_pytorch[zero 3 of 3-gloo",
    "test_equal_to_plain_pytorch[pipeline of tensors-gloo",
    "test_equal_to_plain_pytorch[zero 3-gloo",
    "test_equal_to_plain_pytorch[zero 2-gloo",
    "test_equal_to_plain_pytorch[tensor-gloo",
    "test_equal_to_plain_pytorch[hybrid-gloo",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the slow ones out, unless they are asked for: all of them, or by name."""
    if os.environ.get("GUAVA_TEST_SLOW") or any("::" in word or word.endswith(".py") for word in config.args):
        return
    slow = [item for item in items if any(mark in item.nodeid for mark in _SLOW)]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in set(slow)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """With GUAVA_TEST_ALL set a test that skips for want of a program fails: its install step would be missed."""
    report = yield
    if report.skipped and os.environ.get("GUAVA_TEST_ALL") and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not _MAY_LACK.search(reason):
            report.outcome, report.longrepr = "failed", f"nothing may be skipped here, but this was: {reason}"
    return report
