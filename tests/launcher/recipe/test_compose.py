import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.placement import Placement
from flowrun.engine.ir.sbp import B, S
from flowrun.engine.strategy import Pin
from flowrun.launcher.recipe.compose import load, spell
from flowrun.launcher.recipe.hydra_source import describe, recipe_names

SHIPPED = sorted(recipe_names())


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_composes_and_says_what_it_shows(name: str) -> None:
    assert load([f"recipe={name}"]).name == name
    assert describe(recipe_names()[name]).endswith(".")


def test_a_group_takes_the_place_of_what_a_resolved_recipe_says(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    before = load(["recipe=gpt_dp", "launch.threads=2", "optim.lr=0.5"])
    file.write_text(before.to_yaml())
    assert load([f"recipe={file}"]) == before
    found = load([f"recipe={file}", "launch=virtual", "optim=sgd", "optim.momentum=0.5"])
    assert found == replace(
        before,
        launch=replace(before.launch, name="virtual", threads=1),
        optim=load(["recipe=gpt_dp", "optim=sgd", "optim.momentum=0.5"]).optim,
    )


def test_a_number_in_base_60_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "hosts.yaml"
    text = "defaults: [/model: mlp, /data: digits]\nlaunch: {name: %s, time_limit: 90}\n"
    file.write_text(text % '"1:2"')
    assert load([f"recipe={file}", "launch.name=local"]).name == "hosts"
    file.write_text(text % "1:2")
    with pytest.raises(RecipeError, match=r"hosts\.yaml:2: 1:2 is a number in base 60"):
        load([f"recipe={file}"])


@pytest.mark.parametrize("frames", [1_000, 10_000])
def test_keys_in_keys_are_refused_however_deep_pythons_stack_is(
    frames: int, tmp_path: Path
) -> None:
    file = tmp_path / "deep.yaml"
    file.write_text("train: " + "{a: " * 60 + "1" + "}" * 60)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(frames)
    try:
        with pytest.raises(RecipeError, match=r"deep\.yaml:1: its keys are nested too deeply"):
            load([f"recipe={file}"])
    finally:
        sys.setrecursionlimit(before)


def test_a_recipe_of_ones_own_has_the_last_word(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("defaults: [/model: mlp, /data: digits]\noptim: {lr: 0.5}\n")
    optim = load([f"recipe={file}", "optim=sgd"]).optim
    assert (optim.name, optim.lr) == ("sgd", 0.5)


BASE = "defaults: [/model: mlp, /data: digits]\n"


@pytest.mark.parametrize(
    ("text", "words", "choice"),
    [
        (BASE, ["optim.name=sgd"], "optim=sgd"),
        (BASE, ["optim=lion", "++optim.name=sgd"], "optim=sgd"),
        (BASE, ["hardware.name=h100"], "hardware=h100"),
        (BASE + "optim: {name: sgd}", [], "optim=sgd"),
        (BASE + "optim: {name: lion}", ["optim=sgd"], "optim=sgd"),
        (BASE.replace("]", ", /optim: lamb]") + "optim: {name: sgd}", [], "optim=sgd"),
        ("defaults: [gpt_tp]\noptim: {name: sgd}", [], "optim=sgd"),
        ("defaults: [gpt_tp, override /optim: lamb]\noptim: {name: sgd}", [], "optim=sgd"),
        (BASE + "hardware: {name: h100}", [], "hardware=h100"),
        (BASE + "launch: {name: slurm}", ["launch=virtual"], "launch=virtual"),
    ],
)
def test_the_name_of_a_section_chooses_as_its_group_does(
    text: str, words: list[str], choice: str, tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text(text)
    section = choice.partition("=")[0]
    chosen = load(["model=mlp", "data=digits", choice])
    for file in (tmp_path / "own.yaml", tmp_path / "resolved.yaml"):
        found = load([f"recipe={file}", *words])
        assert getattr(found, section) == getattr(chosen, section)
        (tmp_path / "resolved.yaml").write_text(found.to_yaml())


def test_stages_take_consecutive_ranks() -> None:
    recipe = load(["recipe=gpt_hybrid", "placement.axes.data=2"])
    axes = (("data", 2), ("tensor", 2))
    assert recipe.placements == (Placement(axes, (0, 1, 2, 3)), Placement(axes, (4, 5, 6, 7)))


def test_stages_may_have_unlike_grids() -> None:
    stages = "[{modules: [embed], ranks: [0, 1]}, {modules: ['*'], ranks: [2, 3, 4, 5]}]"
    recipe = load(["recipe=gpt_dp", "placement.axes.data=4", f"placement.stages={stages}"])
    assert [placement.shape for placement in recipe.placements] == [(2,), (4,)]
    assert recipe.stage_modules == (("embed",), ("*",))


@pytest.mark.parametrize("recipe", ["gpt_dp", "gpt_tp"])
def test_pins_are_kept_for_their_check_though_their_axis_has_one_rank(recipe: str) -> None:
    assert Pin("head.weight", "variable", "tensor", S(0)) in load([f"recipe={recipe}"]).pins


PINS = {
    "sbp.head.weight.tensor=B": ("head.weight", "variable", B),
    "sbp.head.out.tensor=S(2)": ("head", "out", S(2)),
    "sbp.blocks.*.attn.qkv.weight.tensor=S1": ("blocks.*.attn.qkv.weight", "variable", S(1)),
    "sbp.w*={wte: {tensor: S(0)}}": ("w*.wte", "variable", S(0)),
    "sbp.blocks.*.mlp.fc2={tensor: B}": ("blocks.*.mlp.fc2", "variable", B),
    "sbp.blocks.*.mlp.in.tensor=B": ("blocks.*.mlp", "in", B),
    "sbp={norm: {out: {tensor: S1}}}": ("norm", "out", S(1)),
}


@pytest.mark.parametrize("override", PINS)
def test_a_pin_on_the_command_line_replaces_that_of_the_file(override: str) -> None:
    pattern, where, sbp = PINS[override]
    pins = [pin for pin in load(["recipe=gpt_tp", override]).pins if pin.pattern == pattern]
    assert [pin for pin in pins if pin.where == where] == [Pin(pattern, where, "tensor", sbp)]


def test_two_patterns_on_the_command_line_become_one_argument() -> None:
    expected = ["++sbp={a.*: {tensor: S1}, b.*: {out: {data: B}}}"]
    assert spell(["sbp.a.*.tensor=S(1)", "sbp.b.*.out.data=B"]) == expected


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        ("model.depth=2", "++model.depth=2"),
        ("model=mlp", "model=mlp"),
        ("placement.axes.data=2", "++placement.axes.data=2"),
        ("train.steps=3", "train.steps=3"),
        ("sbp.a.*.tensor=S(0),B", "++sbp={a.*: {tensor: S0}},{a.*: {tensor: B}}"),
    ],
)
def test_keys_that_a_recipe_may_invent_need_no_plus(given: str, spelled: str) -> None:
    assert spell([given]) == [spelled]


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ("adapters.modules=q_proj", "'adapters.modules=[q_proj]'"),
        ("log=tensorboard", "'log=[tensorboard]'"),
        ("log=null", "'log=[]'"),
        ("log={name: wandb}", "'log=[…]'"),
    ],
)
def test_a_value_where_a_list_stands_is_shown_as_a_list(given: str, instead: str) -> None:
    with pytest.raises(RecipeError, match="a list stands here") as caught:
        load(["recipe=gpt_dp", given])
    assert caught.value.instead == f"Write {instead}."


def test_a_recipe_is_frozen_and_picklable() -> None:
    recipe = load(["recipe=mlp_hybrid"])
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    with pytest.raises(FrozenInstanceError):
        recipe.train.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize("words", [["optim=sgd"], ["hardware=h100", "++hardware.name=own"]])
def test_its_yaml_composes_to_the_same_recipe(words: list[str], workplace: Path) -> None:
    recipe = load(["recipe=gpt_hybrid", "model.depth=2", *words])
    (workplace / "again.yaml").write_text(recipe.to_yaml())
    assert load(["recipe=again.yaml"]) == recipe


def test_a_recipe_of_the_working_directory_goes_before_a_shipped_one(workplace: Path) -> None:
    (workplace / "recipes").mkdir()
    (workplace / "recipes" / "gpt_dp.yaml").write_text(BASE + "train: {steps: 7}\n")
    assert load(["recipe=gpt_dp"]).train.steps == 7


def test_folders_of_the_environment_join(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workplace / "mine").mkdir()
    (workplace / "mine" / "own.yaml").write_text(f"# Mine.\n{BASE}")
    monkeypatch.setenv("FLOWRUN_RECIPES", str(workplace / "mine"))
    assert "own" in recipe_names()
    assert load(["recipe=own"]).name == "own"


def test_a_recipe_may_build_on_another(workplace: Path) -> None:
    text = "defaults: [gpt_tp, override /optim: sgd]\ntrain: {steps: 7}\n"
    (workplace / "d.yaml").write_text(text)
    recipe = load(["recipe=d.yaml"])
    assert (recipe.name, recipe.optim.name, recipe.axes) == ("d", "sgd", ("tensor",))
    assert recipe.train.steps == 7


def test_a_folder_of_own_groups_is_searched_first(workplace: Path) -> None:
    (workplace / "conf" / "model").mkdir(parents=True)
    (workplace / "conf" / "model" / "wide.yaml").write_text(
        "# @package _global_\nmodel: {_target_: torch.nn.Linear, in_features: 3, out_features: 2}\n"
    )
    assert load(["recipe=gpt_dp", "model=wide"], config_dir="conf").model["in_features"] == 3


def test_composing_needs_no_torch() -> None:
    program = (
        "import sys; from flowrun.launcher.recipe.compose import load; "
        "load(['recipe=gpt_dp']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_group_file_with_the_name_of_a_shipped_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "lion.yaml").write_text("name: lion\nlr: 0.125\n")
    with pytest.raises(RecipeError, match="name of a shipped file") as error:
        load(["recipe=gpt_dp"], config_dir=str(tmp_path))
    assert "my_lion.yaml" in error.value.instead
