"""Which cases every run has, and which `--thorough` alone."""

import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import pytest

MOST = 2  # cases of a test in every run
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
    "behaviour/layouts/test_experts.py": {
        "test_split_experts_of_transformers_train_as_plain_torch": 1
    },
    "behaviour/layouts/test_searched_layouts.py": {
        "test_a_searched_layout_trains_and_evaluates_as_plain_torch": 1
    },
    "behaviour/nets/test_loop_recipes.py": {"test_a_recipe_trains_as_a_plain_loop_does": 1},
    "behaviour/numbers/test_fp8.py": {"test_layouts_train_as_a_plain_loop_that_rounds_alike": 1},
    "behaviour/runs/test_shipped_recipes.py": {
        "test_a_recipe_has_the_plans_that_are_pinned": 6,
        "test_no_op_of_a_recipe_falls_back": 1,
    },
    "engine/actors/test_communicators.py": {
        "test_a_rank_of_a_shipped_recipe_has_few_communicators": 1
    },
    "engine/ops/experts/test_routed.py": {"test_every_row_holds_by_which_tokens_travel": 2},
    "engine/passes/stages/test_stage_costs.py": {
        "test_a_cut_is_no_slower_than_one_between_blocks": 1,
        "test_a_stage_is_taken_for_what_its_plan_takes": 1,
    },
    "engine/passes/test_recompute.py": {"test_a_whole_block_holds_no_more_and_gathers_no_more": 1},
    "launcher/bench/test_suite.py": {"test_both_sides_of_every_experiment_compose": 1},
    "launcher/commands/test_resume_states.py": {"test_all_goes_on_in_another_layout": 1},
    "launcher/data/test_buckets.py": {"test_a_resumed_run_is_one_that_never_stopped": 1},
    "launcher/data/test_streamed.py": {
        "test_a_run_reads_what_a_map_in_order_has_in_any_layout_and_resumed": 1
    },
    "launcher/model/test_deferred.py": {"test_what_cannot_be_recorded_is_told_and_made_whole": 2},
    "launcher/place/test_place.py": {"test_groups_of_the_command_line_are_saved": 1},
    "launcher/place/test_planner.py": {"test_a_candidate_is_asked_for_as_its_recipe_would_be": 1},
    "launcher/place/test_settle.py": {
        "test_hosts_of_a_platform_that_are_left_keep_its_endpoint": 1
    },
    "launcher/recipe/test_updates.py": {"test_updates_go_with_other_parts_of_a_loop": 1},
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
