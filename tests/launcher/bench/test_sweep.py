import io
from pathlib import Path

import pytest
from rich.console import Console

from flowrun.engine.errors import RecipeError
from flowrun.launcher.bench.bench import bench
from flowrun.launcher.bench.load_suite import load_suite
from flowrun.launcher.bench.suite import FLOWRUN, Suite, Sweep, round_of
from flowrun.launcher.bench.sweep import candidates, expand_sweep
from flowrun.launcher.recipe.compose import load


def suite_of(*words: str) -> Suite:
    suite, _ = load_suite(["suite=auto", "suite.steps=3", "suite.warmup=1", *words])
    assert isinstance(suite, Suite)
    return suite


def test_the_modest_set_has_every_grid_and_no_more_stages_than_micro_batches() -> None:
    recipe = load(["recipe=gpt_bench", "train.batch_size=16"])
    found = list(candidates(recipe, 4, Sweep((4,), (1, 4), (0, 2))))
    assert len(found) == len(set(found))
    assert len({each.branch.grid for each in found}) == 6
    assert all(each.branch.stages <= each.branch.micro_batches for each in found)
    assert {each.zero for each in found} == {0, 2}


@pytest.mark.thorough
def test_the_pick_runs_beside_all_others_of_its_ranks() -> None:
    words = ("suite.rows=[mlp]", "suite.experiments.mlp={recipe: mlp_hybrid}")
    sweep = suite_of(*words, "suite.sweep.ranks=[2]", "suite.sweep.micro_batches=[1]")
    suite = expand_sweep(sweep)
    runs = list(round_of(suite))
    assert (suite.rows, {run.experiment for run in runs}) == (("mlp_2",), {"mlp_2"})
    assert runs[0].side == FLOWRUN and len({run.side for run in runs}) == len(runs) > 2
    assert all(load(list(run.overrides)).num_ranks == 2 for run in runs)


def test_a_wrong_recipe_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    wrong = suite_of("suite.experiments.wide_deep.recipe=wide_and_deep")
    with pytest.raises(RecipeError, match="wide_and_deep"):
        bench(wrong, tmp_path / "out", Console(file=io.StringIO()))
    assert not (tmp_path / "out").exists()
