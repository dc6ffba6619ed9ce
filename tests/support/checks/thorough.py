"""Which cases every run has, and which `--thorough` alone."""

import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import pytest

MOST = 3  # cases of a test in every run
# Files and folders of quick cases: all of them run, but for those of HOW_MANY.
EVERY = (
    "engine/boxing/",
    "engine/ir/",
    "engine/lowering/",
    "engine/ops/",
    "engine/runtime/kernels/",
    "engine/runtime/transport/",
    "fuzz/",
    "launcher/model/test_deferred",
    "launcher/platforms/",
    "launcher/store/",
    "launcher/supervise/",
    "launcher/terminal/",
    "launcher/text/",
    "launcher/urls/",
    "models/",
    "test_docs",
    "test_papers",
    "test_prose",
    "test_site",
    "test_size",
    "test_tree",
    "testing/",
)
# Tests of which every run has fewer cases, or more: file -> test -> how many.
HOW_MANY: dict[str, dict[str, int]] = {
    "behaviour/layouts/test_communication.py": {
        "test_all_reduces_of_small_messages_are_exchanged": 2
    },
    "behaviour/layouts/test_context.py": {
        "test_divided_lengths_train_as_plain_torch": 2,
        "test_memory_falls_with_the_ranks": 2,
    },
    "behaviour/layouts/test_experts.py": {
        "test_experts_without_capacity_train_as_a_dense_computation_of_the_same_routes": 2,
        "test_split_experts_of_transformers_train_as_plain_torch": 1,
        "test_split_experts_train_as_plain_torch": 2,
    },
    "behaviour/layouts/test_head.py": {"test_chunks_of_rows_train_as_a_plain_loop": 2},
    "behaviour/layouts/test_searched_layouts.py": {
        "test_a_searched_layout_trains_and_evaluates_as_plain_torch": 1
    },
    "behaviour/nets/test_architectures.py": {"test_trains_as_plain_torch": 2},
    "behaviour/nets/test_compositions.py": {"test_a_model_trains_as_plain_torch": 2},
    "behaviour/nets/test_loop_recipes.py": {"test_a_recipe_trains_as_a_plain_loop_does": 1},
    "behaviour/nets/test_paper_models_parity.py": {
        "test_a_model_of_the_paper_trains_as_plain_torch": 2
    },
    "behaviour/numbers/test_device.py": {"test_all_that_a_rank_makes_is_on_its_device": 2},
    "behaviour/numbers/test_fp8.py": {"test_layouts_train_as_a_plain_loop_that_rounds_alike": 1},
    "behaviour/numbers/test_nonfinite.py": {"test_a_planted_fault_ends_its_step_and_is_named": 2},
    "behaviour/runs/test_shipped_recipes.py": {
        "test_a_recipe_has_the_plans_that_are_pinned": 6,
        "test_no_op_of_a_recipe_falls_back": 1,
        "test_the_weights_of_a_recipe_can_be_sharded": 2,
    },
    "behaviour/runs/test_transformers.py": {"test_the_first_loss_is_that_of_the_given_weights": 2},
    "engine/actors/test_communicators.py": {
        "test_a_rank_of_a_shipped_recipe_has_few_communicators": 1
    },
    "engine/capture/test_fold.py": {"test_blocks_captured_once_are_as_if_each_were": 2},
    "engine/ops/experts/test_routed.py": {"test_every_row_holds_by_which_tokens_travel": 2},
    "engine/passes/search/test_search_oracle.py": {"test_toulbar2_agrees": 2},
    "engine/passes/stages/test_stage_costs.py": {
        "test_a_cut_is_no_slower_than_one_between_blocks": 1,
        "test_a_stage_is_taken_for_what_its_plan_takes": 1,
    },
    "engine/passes/test_recompute.py": {"test_a_whole_block_holds_no_more_and_gathers_no_more": 1},
    "engine/passes/update/test_choose_owners.py": {
        "test_each_matrix_is_made_orthogonal_once_among_all_ranks": 2,
        "test_muon_beside_adamw_is_as_a_plain_loop_has_it": 2,
    },
    "engine/passes/update/test_place_states.py": {
        "test_states_on_the_host_give_the_numbers_of_states_on_the_device": 2
    },
    "launcher/bench/test_suite.py": {"test_both_sides_of_every_experiment_compose": 1},
    "launcher/commands/test_evaluate.py": {
        "test_a_metric_of_all_samples_is_that_of_plain_torch": 2,
        "test_the_numbers_are_those_of_the_run": 2,
    },
    "launcher/commands/test_resume_states.py": {
        "test_all_goes_on_as_if_it_had_never_stopped": 2,
        "test_all_goes_on_in_another_layout": 1,
    },
    "launcher/commands/test_verify.py": {"test_every_layout_of_a_recipe_is_the_same": 2},
    "launcher/data/test_buckets.py": {
        "test_a_resumed_run_is_one_that_never_stopped": 1,
        "test_steps_of_several_lengths_are_those_of_a_plain_loop": 2,
    },
    "launcher/data/test_streamed.py": {
        "test_a_run_reads_what_a_map_in_order_has_in_any_layout_and_resumed": 1
    },
    "launcher/job/test_plan_cache.py": {
        "test_what_only_the_captured_graph_shows_makes_another_plan": 2
    },
    "launcher/model/test_deferred.py": {"test_what_cannot_be_recorded_is_told_and_made_whole": 2},
    "launcher/page/test_plan_page.py": {"test_the_json_is_as_its_schema_says": 2},
    "launcher/place/test_place.py": {"test_groups_of_the_command_line_are_saved": 1},
    "launcher/place/test_planner.py": {"test_a_candidate_is_asked_for_as_its_recipe_would_be": 1},
    "launcher/place/test_settle.py": {
        "test_hosts_of_a_platform_that_are_left_keep_its_endpoint": 1
    },
    "launcher/ranks/test_snapshots.py": {
        "test_a_snapshot_is_what_all_ranks_hold_after_its_step": 2
    },
    "launcher/recipe/test_updates.py": {
        "test_updates_go_with_other_parts_of_a_loop": 1,
        "test_updates_of_a_step_are_those_of_a_plain_loop": 2,
    },
    "test_docs.py": {"test_a_command_composes": 30, "test_a_piece_of_yaml_composes": 20},
    "test_survey.py": {"test_it_trains_on_two_ranks_as_plain_torch_does": 1},
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

    The cases of a test that run are the first by a digest of their names: the same ones in every
    run.
    """
    thorough = {item for item in items if item.get_closest_marker("thorough")}
    cases: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        file, _, test = item.nodeid.removeprefix("tests/").partition("[")[0].rpartition("::")
        cases[file, test].append(item)
    for file in {file for file, _ in cases} & set(HOW_MANY):
        for test in HOW_MANY[file]:
            if (file, test) not in cases:
                raise pytest.UsageError(f"{file} has no test {test!r} (support/checks/thorough.py)")
    for (file, test), of_test in cases.items():
        most = HOW_MANY.get(file, {}).get(test, None if file.startswith(EVERY) else MOST)
        if most is not None:
            kind = [item for item in of_test if item not in thorough]
            kind.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
            thorough.update(kind[most:])
    return thorough
