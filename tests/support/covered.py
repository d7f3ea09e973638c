"""Which cells of the tests' tables other cells cover: they carry the marker `whole` and run with `--whole` only.

By file and test: expressions that match whole ids of cells. What is left meets each value of each axis, and each pair of
values where a pair has a path of its own; the reason stands beside it where that is not plain. A cell that is new runs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

__all__ = ["COVERED", "is_covered", "stale"]

COVERED: dict[str, dict[str, tuple[str, ...]]] = {
    "tests/integration/test_launch_ssh.py": {
        "test_workers_come_back_through_a_port_and_are_ended_and_nothing_else": (
            "end_with_the_session-relay,relay-2", "end_by_a_later_process-relay,relay-2", "end_by_a_later_process-relay",
        ),
    },
    "tests/integration/test_ngrok_tunnel.py": {
        # At the start or at the tunnel, about the authtoken or not; unit/tunnels/test_ngrok_errors.py reads every sentence.
        "test_every_code_comes_out_as_its_sentence": (r"(?!(107|108|302|8013)$)\d+",),
    },
    # A leave by SIGTERM is also tried in faults/test_ending_processes.py.
    "tests/integration/test_first_process.py": {
        "test_sigterm_ends_it_with_a_leave_and_tells_the_job_that_it_was_asked": ("has_joined",),
    },
    "tests/integration/test_orchestrate.py": {
        "test_rank_0_orchestrates_the_others": ("torchrun-a_failure", "torchrun-a_killed_worker"),
    },
    "tests/notebooks/test_notebooks.py": {
        # What integration/test_predictions.py compares (05), and trainings in one mode after another, which parity/
        # (test_local.py for 09, test_fine_tuning.py for 10),
        # integration/test_group_modes.py, test_programs_in_cells.py (11) and test_two_kernels.py (12) compare step by step;
        # that cells, lines and words of all notebooks are understood, and that they ran, is tried in every run.
        "test_it_runs": (
            "02_pipeline_parallel|03_tensor_parallel|04_zero_and_hybrid", "05_stream_validate_predict", "09_home_links",
            "10_fine_tuning|11_own_loops|12_the_morning_after",
        ),
    },
    "tests/integration/test_export.py": {
        # Two or four processes of torchrun each; the paths of data mode and of pipelines stay, and unit/export reads all texts.
        "test_a_program_gives_the_losses_of_its_run": ("data.*", "zero.*", "tensor", "pipeline-.*", "hybrid.*"),
        "test_a_program_goes_on_from_a_checkpoint_of_the_run_and_of_its_own": ("zero.*", "tensor", "pipeline"),
    },
    "tests/integration/test_group_modes.py": {
        # zero 1 within the hybrid of stages, which is that of the plain hybrid too; zero 2 where a rank is lost.
        "test_a_mode_equals_plain_pytorch": (
            r"zero-2-\{'zero_stage':[12]\}", r"pipeline-2-\{'pipeline_schedule':'gpipe'\}", r"hybrid-4-\{'dp':2,'pp':2\}",
        ),
        "test_an_error_while_a_step_is_applied_leaves_a_whole_state": (
            r"zero-\{'zero_stage': 1\}-(all-optimizer|one-schedule)", r"zero-\{'zero_stage': 3\}-one-(optimizer|schedule)",
            r"pipeline-\{\}-(all|one)-optimizer", r"tensor-\{\}-(all|one)-optimizer", r"data-.*-one-schedule",
        ),
        "test_a_loss_that_gathers_equals_plain_pytorch": ("zero-settings1",),
        "test_tokens_count_once_however_a_batch_is_shared": ("tensor",),
        "test_models_and_batches_of_other_layouts_in_memory": ("data-settings0-None", "zero-settings2-None"),
        "test_a_lost_rank_ends_the_step_and_another_takes_its_place": ("tensor-settings2",),
        "test_a_rank_that_leaves_hands_over_first_and_no_step_is_done_twice": ("pipeline-settings1",),
        "test_an_interrupt_in_a_long_step_costs_nothing": ("data",),
        "test_a_failed_run_leaves_workers_that_validate": ("tensor",),
        "test_errors_of_user_code_and_nan_end_the_run_and_workers_stay": ("tensor",),
        "test_dropout_repeats_from_the_seed": ("pipeline",),
    },
    "tests/integration/test_programs_in_cells.py": {
        # Whole replicas are in no process group, so a program leaves them alone.
        "test_a_run_goes_on_after_a_program": ("data",),
    },
    "tests/parity/test_programs.py": {
        # Combinations of what the others have one by one; some stay.
        "test_a_program_is_right_or_says_why_not": (r"met: (?!(validated|compares|three batches)).*",),
    },
    "tests/parity/test_generation.py": {"test_tokens_do_not_depend_on_the_number_of_workers": ("2",)},
    "tests/integration/test_predictions.py": {
        "test_every_mode_gives_what_plain_pytorch_gives": (r"zero-2-\{'zero_stage':1\}", r"hybrid-4-\{'dp':2,'pp':2\}"),
        "test_a_rank_killed_in_mid_prediction_is_replaced_by_another": ("pipeline-settings0",),
        "test_an_error_or_an_interrupt_in_mid_pass_costs_no_worker": ("tensor",),
    },
    "tests/integration/test_demo.py": {
        "test_check_finds_no_difference_to_plain_pytorch": ("1-words0",),
        "test_three_workers_have_the_losses_of_plain_pytorch": ("64-None-fp(64|32)", "65-None-fp32"),
    },
    "tests/integration/test_batch_forms.py": {
        "test_it_equals_plain_pytorch": ("pipeline-.*-frames_and_table", "zero-.*-fields_and_labels"),
    },
    "tests/integration/test_link_breaks.py": {
        "test_a_cut_connection_resumes": ("tls-control-fin|tls-bulk-rst|plain-control-rst|plain-bulk-fin",),
        "test_bulk_cut_in_the_middle_of_a_message": ("150000-up|2000000-down|7654321-up",),
    },
    "tests/faults/test_coming_back.py": {
        "test_a_script_that_ends_without_close_lets_its_workers_go": (r"raise SystemExit\(3\)-3",),
    },
    "tests/faults/test_commit_errors.py": {
        # Every cause on all workers; where it happens on one worker or at the orchestrator, one before, midway and after.
        "test_an_error_on_one_worker_leaves_the_step_of_the_others": ("optimizer before", "pre hook", "post hook", "torch's own"),
        "test_an_error_at_the_orchestrators_own_optimizer": ("optimizer before", "optimizer after", "pre hook", "torch's own"),
        "test_an_error_between_steps": ("on_epoch-2", "loader-2", "on_step-1", "metric-1"),
    },
    "tests/faults/test_matrix.py": {
        # Each phase, fault and mode is left, which the file proves, and a worker that ends before, in and after the sum.
        "test_a_fault_comes_to_what_was_written_down": (
            r"data \| (join \| SIGKILL|validation \| SIGKILL)",
            r"site \| (bucket half sent \| SIGKILL|commit \| SIGTERM)", r"direct \| optimizer \| exception",
            r"zero 1 \| bucket half sent \| cut in mid-frame", r"zero 3 \| (leave \| SIGTERM)",
            r"tensor \| forward \| SIGKILL", r"hybrid \| backward \| exception",
            r"pipeline \| (waiting for the sum \| reset at a random byte|backward \| hostile)",
            r"lone \| (forward \| deadlock|backward \| hostile)", r"local \| optimizer \| (exception|context death)",
            r"zero 2 \| (forward \| deadlock|backward \| context death)",
        ),
    },
    "tests/parity/test_parallel.py": {
        # What is left of a mode here meets every mode in test_equal_to_plain_pytorch or under the relay's groups inside machines.
        "test_equal_to_plain_pytorch": ("zero 3 of 3-guava", "hybrid zero 1-(guava|gloo)", "pipeline of tensors-guava"),
        "test_groups_inside_machines_under_the_relay": ("hybrid-machines0", "hybrid zero 3-machines1"),
        "test_synced_batch_norms_see_the_whole_batch": ("(data|zero 2|zero 3|zero 3 of 3)-guava",),
        "test_complex_parameters_are_spread_with_both_parts": ("(data|zero 2)-guava",),
        "test_losses_in_single_precision": ("data", "hybrid"),
        "test_computing_activations_again_changes_nothing": ("data", "hybrid"),
        "test_dropout_repeats_from_its_seed": ("data", "hybrid zero 3"),
        "test_modules_under_several_names": ("hybrid", "pipeline"),
        "test_layers_that_only_one_replica_uses": ("zero 1", "zero 2"),
        # Each model with three replicas or with two, each stage of ZeRO with two of them.
        "test_blocks_that_not_every_replica_uses": (
            "experts-zero 2", "(raw experts|turning|frozen)-zero 3 of 3", "(exiting|towers)-zero 3",
        ),
        "test_batch_statistics_stay_equal": ("zero 1", "zero 2"),
        "test_an_error_before_the_first_forward_comes_out": ("zero 1", "zero 2"),
        "test_a_state_goes_on_in_any_other_mode": ("one group",),
    },
    "tests/parity/test_pipeline_part.py": {
        "test_odd_batches_with_ignored_labels": ("layers-gpipe", "nested-(1f1b|interleaved)", "inplace-(gpipe|interleaved)"),
        "test_four_ranks_a_traced_transformer_with_a_tied_weight": ("gpipe",),
        "test_torchs_own_transformers_are_cut_between_their_layers": ("torch encoder",),
        "test_tied_embedding_and_head": ("gpipe",),
        "test_several_tensors_between_stages_and_nested_inputs": ("gpipe",),
        "test_frozen_layers": ("gpipe",),
    },
    "tests/parity/test_forecast.py": {
        "test_a_run_takes_what_was_forecast": ("2-orchestrator", "3-workers"),
        "test_a_run_with_short_gradients_takes_what_was_forecast": ("(bf16|int8)-workers",),
        "test_a_run_with_a_cache_takes_what_was_forecast": ("1-False", "2-True", "3-False"),
        "test_a_budget_is_not_passed_and_the_run_goes_on_from_its_checkpoint": (
            "0.5-1-workers", "0.5-2-orchestrator", "0.8-1-orchestrator", "0.8-2-workers",
        ),
    },
    "tests/parity/test_gather_batch.py": {
        # Each loss in each stage of ZeRO and on each number of replicas.
        "test_equal_to_plain_pytorch": (
            "[01]-2-(nt_xent|dice_sum|clip_loss)", "[01]-3-(info_nce|dice|barlow_twins)",
            "3-2-(info_nce|dice|barlow_twins)", "3-3-(nt_xent|dice_sum|clip_loss)",
        ),
    },
    "tests/parity/test_schedules.py": {
        "test_torchs_schedules_tick_once_a_step": (
            "(CosineAnnealingWarmRestarts|CyclicLR|PolynomialLR)-.*-workers",
            "(CosineAnnealingLR|MultiStepLR|ConstantLR)-.*-orchestrator",
        ),
        "test_a_plateau_follows_what_it_names": (
            "(accuracy-max-validation-None|accuracy-max-epoch-None|None-min-epoch-None)-(1-workers|2-orchestrator)",
            "(accuracy-max-validation-3|loss-min-validation-None|worst-min-validation-2)-(1-orchestrator|2-workers)",
        ),
    },
    "tests/parity/test_batch_reading.py": {
        "test_a_batch_of_any_form_equals_plain_pytorch": (
            "(a list of targets|joined boxes with split_fn|padded, with lengths|time first, as long as the batch|hidden states"
            "|dataclass|constant anchors)-2",
            "(a list of two targets|joined boxes on one worker|time first, found by itself|time first, from a list|namedtuple"
            "|BatchEncoding|anchors, accumulated)-3",
        ),
    },
    "tests/parity/test_precision.py": {
        "test_mixed_dtypes_equal_plain_pytorch": (
            "(fp64|bf16)-.*-(1-orchestrator|2-workers|3-orchestrator)", "fp32-.*-(1-workers|2-orchestrator|3-workers)",
        ),
    },
    "tests/parity/test_callbacks.py": {
        "test_a_callback_saves_the_step_that_it_was_called_for": ("(1|3)-orchestrator", "2-workers"),
    },
    "tests/parity/test_saved_and_resumed.py": {"test_a_resumed_run_is_the_undisturbed_one": ("fp32-2", "bf16-0")},
    "tests/parity/test_carried.py": {
        "test_wrapped_models_are_saved_under_the_plain_model_s_names": (
            "(compiled|parallel_inside)-orchestrator", "compiled_inside-workers",
        ),
        "test_what_the_forward_moves_is_that_of_one_process": ("(1|3)-workers", "2-orchestrator"),
        "test_what_a_hook_of_the_optimizer_moves_stays_moved": ("1-orchestrator", "2-workers"),
        "test_weights_stay_while_the_model_has_the_same_parameters": (
            "1-_(metric|again|mode|activation)", "2-_(loss|comment|arguments)",
        ),
    },
    "tests/parity/test_first_step_check.py": {
        "test_a_loss_that_couples_samples_is_found": ("dice-fp(32|64)", "barlow_twins-(fp64|bf16)"),
        "test_nothing_is_alarmed_where_samples_are_apart": (
            "(Planted-None|Language-None)-fp32", "Planted-counted-fp64", "(Planted-in_place|Vision-None)-bf16",
        ),
        # A part that is ignored, and a coefficient: tests/unit/training/step_check has every trait that makes a batch new.
        "test_what_begins_later_is_found_and_halts_a_strict_run_with_its_steps_kept": ("(weighing|masking)-.*",),
        "test_a_checked_run_is_the_run_that_it_was": ("2-orchestrator", "3-workers"),
    },
    "tests/parity/test_replica.py": {
        "test_twenty_steps_are_ten_and_ten_more_after_a_resume": (
            "(SGD|Adagrad)-(fp32|fp16)-True", "(SGD|Adagrad)-bf16-False", "(AdamW|RMSprop)-(fp32|fp16)-False",
            "(AdamW|RMSprop)-bf16-True",
        ),
        "test_any_shares_equal_the_whole_batch": (
            "optimizer0-(alone|unequal|all but one empty)-fp32", "optimizer0-(even|one empty)-fp64",
            "optimizer1-(alone|unequal|all but one empty)-fp64", "optimizer1-(even|one empty)-fp32",
        ),
    },
    "tests/unit/data/test_loader_feed.py": {
        "test_batches_and_random_numbers_are_those_of_the_plain_loop": (
            "(shuffled by a generator|own batch sampler), two processes", "(sampler that draws early|stream), two that persist",
        ),
        "test_order_survives_with_loader_processes": ("own batch sampler",),
    },
    "tests/unit/sync/test_explorer.py": {
        # Each exchange and site walks one step with nothing lost, and is drawn from once or twice; a loss and a failure of
        # the user's code are walked where exchanges differ. All of them: python -m tests.support.explorer --covering
        "test_no_interleaving_breaks_an_invariant": (
            "star, optimizer at orchestrator: one step, (one lost|the user's code fails)",
            "star, optimizer at orchestrator: 3 workers, 3 steps(, failures)?",
            "star, optimizer at workers: 3 workers, 3 steps, stops",
            "group, optimizer at workers: (one step, the user's code fails|3 workers, 3 steps, (stops|failures))",
            "parts, optimizer at workers: (one step, one lost|3 workers, 3 steps)",
        ),
    },
}  # fmt: skip


def is_covered(file: str, test: str, cell: str) -> bool:
    """Whether a cell runs with --whole only; `file` counts from the repository's root."""
    return any(re.fullmatch(expression, cell) for expression in COVERED.get(file, {}).get(test, ()))


def stale(cells: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return what is wrong with `COVERED`, given all cells of files: what matches none, and tests of which none is left."""
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for file, test, cell in cells:
        found[file, test].append(cell)
    files = {file for file, _ in found}
    problems = []
    for file, tests in COVERED.items():
        for test, expressions in tests.items() if file in files else ():
            here = found[file, test]
            problems += [
                f"{file}::{test} has no cell {expression!r}"
                for expression in expressions
                if not any(re.fullmatch(expression, cell) for cell in here)
            ]
            if here and all(is_covered(file, test, cell) for cell in here):
                problems.append(f"{file}::{test} has no cell left that runs without --whole")
    return problems
