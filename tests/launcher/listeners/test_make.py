from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.listeners import make
from flowrun.launcher.listeners.listener import TAGS
from flowrun.launcher.listeners.make import LOGGERS, make_listeners
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe

ROOT = Path(__file__).resolve().parents[3]


class Own:
    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix

    def on_step(self, step: int, values: dict[str, float]) -> None:
        """See Listener."""


def recipe(*log: Any) -> Recipe:
    return replace(load(["recipe=mlp_data_parallel"]), log=[*log])


def test_tensorboard_follows_a_recipe_that_names_no_logger() -> None:
    [only] = make_listeners(load(["recipe=mlp_data_parallel"]))
    assert (only.name, only.may_end) == ("tensorboard", False)
    assert make_listeners(load(["recipe=mlp_data_parallel", "log=[]"])) == []


def test_a_run_has_no_curves_where_tensorboard_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(make.importlib.util, "find_spec", lambda name: None)
    assert make_listeners(recipe("tensorboard")) == [] and make.lacks_default(recipe("tensorboard"))
    assert not make.lacks_default(recipe())
    with pytest.raises(RecipeError, match="tensorboard is not installed"):
        make_listeners(recipe({"name": "tensorboard"}))


def test_a_logger_takes_options_and_may_be_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    options = "log=[{name: mlflow, experiment: mine}, {_target_: test_make.Own, prefix: a}]"
    mlflow, own = make_listeners(load(["recipe=mlp_data_parallel", options]))
    assert mlflow.listener._experiment == "mine"
    assert (own.name, own.listener.prefix) == ("Own", "a")


@pytest.mark.parametrize(
    ("entry", "where", "problem", "instead"),
    [
        ("wandbb", "log.0", "'wandbb' is not a logger.", "Did you mean 'wandb'"),
        ({"project": "x"}, "log.0", "None is not a logger.", "tensorboard"),
        ({"name": "mlflow", "uri": "x"}, "log.0.uri", "takes no argument 'uri'", "tracking_uri"),
        ({"_target_": "builtins.dict"}, "log.0._target_", "none of the methods", "follow.md"),
    ],
)
def test_what_is_no_logger_is_refused(entry: Any, where: str, problem: str, instead: str) -> None:
    with pytest.raises(RecipeError) as refused:
        make_listeners(recipe(entry))
    error = refused.value
    assert error.where == where
    assert problem in error.problem and instead in error.instead


def test_a_library_that_is_not_installed_is_named_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(make.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="wandb is not installed") as refused:
        make_listeners(recipe("wandb"))
    assert refused.value.instead == "pip install 'flowrun[wandb]'"


def test_every_logger_and_every_tag_stands_on_the_page() -> None:
    page = (ROOT / "docs" / "how_to" / "follow.md").read_text()
    assert [name for name in LOGGERS if f"`{name}`" not in page] == []
    rows = [f"| `{tag}` | {meaning} |" for tag, meaning in TAGS.items()]
    assert [row for row in rows if row not in page] == []


@pytest.mark.parametrize(
    ("arguments", "changes", "where"),
    [
        ("metric: acc", ["eval.every=1"], "callbacks.0.metric"),
        ("patience: 0", ["eval.every=1"], "callbacks.0.patience"),
        ("patience: 1", [], "eval.every"),
    ],
)
def test_a_callback_that_does_not_fit_the_recipe_is_refused_at_its_key(
    arguments: str, changes: list[str], where: str
) -> None:
    name = "flowrun.launcher.listeners.early_stopping.EarlyStopping"
    stopping = f"callbacks=[{{_target_: {name}, {arguments}}}]"
    with pytest.raises(RecipeError) as refused:
        make_listeners(load(["recipe=gpt_dp", stopping, *changes]))
    assert refused.value.where == where
