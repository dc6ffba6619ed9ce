from pathlib import Path

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.bench.load_suite import load_suite
from flowrun.launcher.bench.suite import FLOWRUN, Suite, round_of
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe_errors import explain

SUITES = sorted(
    file.stem
    for file in (Path(__file__).resolve().parents[3] / "conf" / "suite").glob("*.yaml")
    if file.stem not in ("base", "foreseen", "paper_foreseen")  # foreseen/test_published.py
)


def suite(*arguments: str) -> Suite:
    found = load_suite(list(arguments))[0]
    assert isinstance(found, Suite)
    return found


@pytest.mark.parametrize("name", SUITES)
def test_both_sides_of_every_experiment_compose(name: str) -> None:
    given = suite(f"suite={name}", "suite.modes=[eager]")
    assert given.name == name and given.experiments
    sides = {(run.overrides, run.side == FLOWRUN): run.ranks for run in round_of(given)}
    for (overrides, ours), ranks in sides.items():
        recipe = load(list(overrides))
        own = {experiment.steps or given.steps for experiment in given.experiments.values()}
        assert recipe.train.steps in own and not recipe.eval.batches
        assert recipe.num_ranks == ranks or not ours or given.sweep, overrides


def test_a_round_is_flowrun_and_its_peers_in_turn() -> None:
    words = [str(run) for run in round_of(suite("suite.rows=[single,zero1]"))]
    peers = {"single": ["plain loop"], "zero1": ["DDP", "ZeroRedundancyOptimizer"]}
    assert words == [
        f"{row}: {side}"
        for row, names in peers.items()
        for side in ("flowrun", *(f"{n}, {way}" for n in names for way in ("as is", "pages kept")))
    ]


def test_other_layouts_of_flowrun_run_beside_it() -> None:
    given = suite("suite=searched", "suite.rows=[wide_mlp]")
    ours, by_hand, peer = round_of(given)
    assert [str(run) for run in (ours, by_hand)] == ["wide_mlp: flowrun", "wide_mlp: data parallel"]
    assert by_hand.peer is None and by_hand.overrides == (*ours.overrides, "parallel=manual")
    assert peer.peer is not None


def test_one_rank_runs_for_efficiency_where_it_was_not_asked_for() -> None:
    one, two, *_ = round_of(suite("suite.rows=[data]"))
    assert (str(one), str(two)) == ("single: flowrun", "data: flowrun")


def test_compiled_is_a_mode_of_both_sides() -> None:
    given = suite("suite.rows=[data]", "suite.modes=[compiled]")
    ours, theirs = [run for run in round_of(given) if run.experiment == "data"][:2]
    assert str(ours) == "data: flowrun, compiled" and ours.overrides[-1].endswith("inductor")
    assert str(theirs) == "data: DDP, as is, compiled"


def test_an_experiment_may_be_of_one_mode() -> None:
    given = suite("suite.rows=[single_compiled]", "suite.modes=[eager,compiled]")
    assert [run.mode for run in round_of(given)] == ["compiled"] * 3


def test_other_keys_are_of_both_sides() -> None:
    given = suite("suite.rows=[zero3]", "train.batch_size=4", "suite.rounds=2")
    assert given.rounds == 2
    assert all("train.batch_size=4" in run.overrides for run in round_of(given))


def test_a_setting_reaches_the_process() -> None:
    given = suite("suite.rows=[zero3]")
    environments = {run.setting: run.environment for run in round_of(given) if run.peer}
    assert environments["as is"] == {}
    assert environments["pages kept"] == {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}


ROWS = "suite.experiments"
# argument -> (where, if it is not the key; what is said)
WRONG = {
    "suite=peer": ("", "there is no suite 'peer'"),
    "suite.rows=[zero4]": ("", "no experiment 'zero4'"),
    "suite.modes=[fast]": ("", "no mode 'fast'"),
    "suite.warmup=12": ("suite.steps", "leave nothing to measure"),
    "suite.round=2": ("", "has no key 'round'"),
    f"{ROWS}.data.peers.DDP.kind=dpp": ("", "no kind 'dpp'"),
    f"{ROWS}.tensor.peers={{TP: {{kind: tensor, recompute: [blocks.*]}}}}": (
        f"{ROWS}.tensor.peers.TP.recompute",
        "kind tensor does not read 'recompute'",
    ),
    f"{ROWS}.copies.copies=0": ("", "measure nothing"),
    f"{ROWS}.data.steps=3": ("", "nothing is left"),
    f"{ROWS}.data.peer=1": ("", "has no key 'peer'"),
}


@pytest.mark.parametrize("argument", WRONG)
def test_what_is_wrong_with_a_suite_is_said(argument: str) -> None:
    where, text = WRONG[argument]
    with pytest.raises(RecipeError) as caught:
        suite(argument)
    assert caught.value.where == (where or argument.partition("=")[0])
    assert text in caught.value.problem


def test_a_mistake_in_a_suites_file_is_placed_there(tmp_path: Path) -> None:
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "mine.yaml").write_text("defaults: [base]\nname: mine\nround: 2\n")
    with pytest.raises(RecipeError) as caught:
        load_suite(["suite=mine"], str(tmp_path))
    assert explain(caught.value, ["suite=mine"]).startswith("suite mine  suite.round\n")


def test_a_suite_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "mine.yaml").write_text(
        "defaults: [base]\nname: mine\nrecipe: mlp_data_parallel\n"
        "experiments: {data: {peers: {DDP: {kind: ddp}}}}\n"
    )
    given, folder = load_suite(["suite=mine", "hydra.run.dir=here"], str(tmp_path))
    assert given.rows == ("data",) and folder == Path("here")
