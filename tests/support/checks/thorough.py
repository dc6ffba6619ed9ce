"""Which cases every run has, and which `--thorough` alone."""

import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import pytest

# File -> test with many cases of a kind -> one in N of them runs without `--thorough`.
ONE_IN: dict[str, dict[str, int]] = {
    "behaviour/layouts/test_context.py": {
        "test_divided_lengths_train_as_plain_torch": 8,
        "test_memory_falls_with_the_ranks": 2,
    },
    "behaviour/layouts/test_experts.py": {
        "test_experts_without_capacity_train_as_a_dense_computation_of_the_same_routes": 5,
        "test_split_experts_of_transformers_train_as_plain_torch": 4,
        "test_split_experts_train_as_plain_torch": 2,
    },
    "behaviour/layouts/test_foreseen_memory.py": {
        "test_foreseen_bytes_are_the_bytes_of_live_tensors": 2
    },
    "behaviour/layouts/test_head.py": {
        "test_chunks_of_rows_train_as_a_plain_loop": 3,
        "test_padded_classes_train_as_a_plain_loop": 3,
    },
    "behaviour/layouts/test_parity.py": {
        "test_evaluation_of_the_gpt_is_plain_torchs": 4,
        "test_every_actor_sends_what_the_plan_says": 3,
        "test_gpt_trains_as_plain_torch": 6,
        "test_pinned_activations_train_as_plain_torch": 2,
    },
    "behaviour/layouts/test_searched_layouts.py": {
        "test_a_searched_layout_trains_and_evaluates_as_plain_torch": 2
    },
    "behaviour/layouts/test_stages_anywhere.py": {
        "test_a_model_cut_anywhere_trains_and_evaluates_as_plain_torch": 3
    },
    "behaviour/layouts/test_stress.py": {
        "test_divided_lengths_agree_beside_every_other_axis": 3,
        "test_random_plans_in_random_order_end_with_the_same_numbers": 8,
    },
    "behaviour/nets/test_architectures.py": {"test_trains_as_plain_torch": 6},
    "behaviour/nets/test_compositions.py": {
        "test_a_model_trains_as_plain_torch": 9,
        "test_what_may_be_refused_trains_as_plain_torch_or_is": 3,
    },
    "behaviour/nets/test_custom_functions.py": {
        "test_a_function_of_ones_own_trains_as_plain_torch": 3
    },
    "behaviour/nets/test_loop_recipes.py": {"test_a_recipe_trains_as_a_plain_loop_does": 5},
    "behaviour/nets/test_paper_models_parity.py": {
        "test_a_model_of_the_paper_trains_as_plain_torch": 9
    },
    "behaviour/nets/test_tied_weights.py": {"test_tied_weights_train_as_in_plain_torch": 3},
    "behaviour/numbers/test_device.py": {"test_all_that_a_rank_makes_is_on_its_device": 3},
    "behaviour/numbers/test_fp8.py": {
        "test_a_step_in_fp32_by_the_kernel_is_that_of_fp64": 2,
        "test_layouts_train_as_a_plain_loop_that_rounds_alike": 6,
    },
    "behaviour/numbers/test_kept_narrow.py": {
        "test_losses_are_those_of_a_plain_loop_of_the_same_rounding": 3
    },
    "behaviour/numbers/test_loss_scale.py": {
        "test_training_recovers_from_an_overflow_as_torchs_grad_scaler_does": 3
    },
    "behaviour/numbers/test_nonfinite.py": {"test_a_planted_fault_ends_its_step_and_is_named": 3},
    "behaviour/numbers/test_optimizers.py": {"test_a_class_of_torch_updates_as_it_does_itself": 9},
    "behaviour/runs/test_bad_recipes.py": {
        "test_a_wrong_argument_is_one_located_error": 9,
        "test_a_wrong_file_is_one_located_error": 3,
    },
    "behaviour/runs/test_shipped_recipes.py": {
        "test_a_recipe_has_the_plans_that_are_pinned": 3,
        "test_no_op_of_a_recipe_falls_back": 8,
    },
    "behaviour/runs/test_shipped_searches.py": {
        "test_a_searched_layout_costs_no_more_than_an_inferred_one": 3
    },
    "behaviour/runs/test_transformers.py": {"test_the_first_loss_is_that_of_the_given_weights": 2},
    "engine/actors/test_communicators.py": {
        "test_a_rank_of_a_shipped_recipe_has_few_communicators": 2
    },
    "engine/capture/check/test_check.py": {
        "test_a_fault_of_the_captured_graph_is_found": 2,
        "test_a_module_that_is_captured_right_passes": 3,
    },
    "engine/capture/in_python/test_run_in_python.py": {
        "test_what_depends_on_python_is_refused": 9,
        "test_what_python_runs_is_what_the_module_computes": 3,
    },
    "engine/capture/rewrites/test_check_ranges.py": {"test_a_label_out_of_range_is_an_error": 3},
    "engine/capture/test_fold.py": {"test_blocks_captured_once_are_as_if_each_were": 2},
    "engine/capture/test_refusals.py": {"test_a_line_that_cannot_be_captured_is_named": 9},
    "engine/lowering/test_merge_chains.py": {
        "test_no_boxing_starts_later_and_no_step_takes_longer": 3
    },
    "engine/ops/experts/test_routed.py": {"test_every_row_holds_by_which_tokens_travel": 3},
    "engine/passes/search/test_search_oracle.py": {"test_toulbar2_agrees": 2},
    "engine/passes/stages/test_stage_costs.py": {
        "test_a_cut_is_no_slower_than_one_between_blocks": 2,
        "test_a_stage_is_taken_for_what_its_plan_takes": 2,
    },
    "engine/passes/test_count_step.py": {"test_so_it_is_in_every_layout": 3},
    "engine/passes/test_recompute.py": {
        "test_a_whole_block_holds_no_more_and_gathers_no_more": 4,
        "test_no_bit_changes": 3,
    },
    "engine/passes/update/test_choose_owners.py": {
        "test_each_matrix_is_made_orthogonal_once_among_all_ranks": 3,
        "test_muon_beside_adamw_is_as_a_plain_loop_has_it": 3,
    },
    "engine/passes/update/test_place_states.py": {
        "test_states_on_the_host_give_the_numbers_of_states_on_the_device": 2
    },
    "engine/rehearsal/test_period.py": {"test_the_rehearsal_is_that_of_the_whole_run": 2},
    "engine/rehearsal/test_rehearsal.py": {"test_live_versions_never_exceed_the_slots": 3},
    "launcher/bench/foreseen/test_published.py": {
        "test_every_row_composes_and_its_ranks_are_those_of_a_cluster": 2
    },
    "launcher/bench/test_suite.py": {"test_both_sides_of_every_experiment_compose": 6},
    "launcher/commands/start/test_init_trains.py": {
        "test_the_loss_of_what_a_stranger_wrote_falls": 3
    },
    "launcher/commands/test_evaluate.py": {
        "test_a_metric_of_all_samples_is_that_of_plain_torch": 2,
        "test_the_numbers_are_those_of_the_run": 2,
    },
    "launcher/commands/test_evaluate_text.py": {"test_the_numbers_are_those_of_the_run": 2},
    "launcher/commands/test_resume_states.py": {
        "test_all_goes_on_as_if_it_had_never_stopped": 2,
        "test_all_goes_on_in_another_layout": 2,
    },
    "launcher/commands/test_verify.py": {"test_every_layout_of_a_recipe_is_the_same": 2},
    "launcher/data/corpus/test_data_of_urls.py": {"test_samples_of_a_url_are_those_of_the_disk": 2},
    "launcher/data/test_buckets.py": {
        "test_a_resumed_run_is_one_that_never_stopped": 2,
        "test_steps_of_several_lengths_are_those_of_a_plain_loop": 3,
    },
    "launcher/data/test_streamed.py": {
        "test_a_run_reads_what_a_map_in_order_has_in_any_layout_and_resumed": 2
    },
    "launcher/job/test_plan_cache.py": {
        "test_what_only_the_captured_graph_shows_makes_another_plan": 2
    },
    "launcher/model/test_deferred.py": {
        "test_a_rank_never_holds_more_than_its_shards_and_a_weight": 2
    },
    "launcher/place/test_place.py": {"test_groups_of_the_command_line_are_saved": 2},
    "launcher/place/test_planner.py": {"test_a_candidate_is_asked_for_as_its_recipe_would_be": 2},
    "launcher/recipe/test_updates.py": {
        "test_an_update_that_cannot_be_is_refused_at_its_key": 3,
        "test_updates_go_with_other_parts_of_a_loop": 4,
        "test_updates_of_a_step_are_those_of_a_plain_loop": 4,
    },
    "launcher/recipe/test_value_ranges.py": {"test_a_value_that_cannot_be_is_named": 3},
    "launcher/report/test_notes.py": {"test_a_key_that_changes_nothing_is_noted": 3},
    "test_site.py": {"test_a_screen_is_what_the_command_prints": 3},
    "test_survey.py": {"test_it_trains_on_two_ranks_as_plain_torch_does": 6},
}


def few(cases: Iterable[Any], often: Any = None, but: Collection[Any] = ()) -> list[Any]:
    """Mark as thorough the cases that are not of `often` (None: all are), or that `but` names."""
    return [
        case
        if case not in but and (often is None or case in often)
        else pytest.param(case, marks=pytest.mark.thorough)
        for case in cases
    ]


def of_thorough(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that `--thorough` alone runs.

    The cases of a test of ONE_IN that run are the first by a digest of their names, so that they
    are of all kinds, and the same ones in every run.
    """
    thorough = {item for item in items if item.get_closest_marker("thorough")}
    cases: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        file, _, test = item.nodeid.removeprefix("tests/").partition("[")[0].rpartition("::")
        cases[file, test].append(item)
    for file in {file for file, _ in cases} & set(ONE_IN):
        for test, number in ONE_IN[file].items():
            if (file, test) not in cases:
                raise pytest.UsageError(f"{file} has no test {test!r} (support/checks/thorough.py)")
            kind = [item for item in cases[file, test] if item not in thorough]
            kind.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
            thorough.update(kind[-(-len(kind) // number) :])
    return thorough
