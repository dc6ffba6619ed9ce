"""Several updates in a step: each is the recipe once more, with a loss, parameters and an optimizer
of its own.

They run one after the other, each with the weights that the one before has left, as in the loop
that alternates discriminator and generator (Goodfellow et al. 2014, algorithm 1).  An update that
runs with every `every`th step counts its own updates: its optimizer and its schedule see these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import OmegaConf

from flowrun.engine.errors import RecipeError
from flowrun.launcher.recipe.compose import to_recipe
from flowrun.launcher.recipe.hydra_source import COMPOSING_ERRORS, take_arguments
from flowrun.launcher.recipe.key_schema import schema
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import did_you_mean, from_hydra, require

_EXAMPLE = "Write {name: critic, loss: {_target_: my_loss}, parameters: critic.*}."


@dataclass(frozen=True, kw_only=True)
class StepUpdate:
    """An update of some parameters in a step.

    name: of its results: "loss/generator".  every: the steps from one to the next; 0: it takes the
    place of the first where its bucket is the step's.  recipe: with the loss, the parameters and
    the optimizer of this update, and its number of updates as steps.  given: its keys.
    """

    name: str = ""
    every: int = 1
    recipe: Recipe
    given: Collection[str] = ()


def updates_of(recipe: Recipe) -> tuple[StepUpdate, ...]:
    """Return the updates of a step; the one of a recipe that names none is the recipe itself.

    Raises RecipeError at the key of `updates` that is wrong.
    """
    found = tuple(_read_update(recipe, k, given) for k, given in enumerate(recipe.updates))
    if not found:
        shorter = () if recipe.bucket else recipe.buckets[-2::-1]
        buckets = (StepUpdate(every=0, recipe=replace(recipe, bucket=n)) for n in shorter)
        return (StepUpdate(recipe=recipe), *buckets)
    names = [update.name for update in found]
    for k, name in enumerate(names):
        where = f"updates.{k}.name"
        require(name not in names[:k], where, f"two updates are called {name!r}.", "Rename one.")
    problem = "the first update runs with every step: a step is counted by it."
    require(found[0].every == 1, "updates.0.every", problem, "Write another update first.")
    own = found[0].recipe
    first = replace(own, train=recipe.train, updates=recipe.updates, text=recipe.text)
    return (replace(found[0], recipe=first), *found[1:])


def _read_update(recipe: Recipe, number: int, given: Any) -> StepUpdate:
    where = f"updates.{number}"
    if not isinstance(given, Mapping):
        raise RecipeError(where, f"{given!r} is not an update.", _EXAMPLE)
    known = ("name", "loss", "parameters", "optim", "every")
    for key in given:
        problem = f"an update has no key {key!r}."
        require(key in known, f"{where}.{key}", problem, did_you_mean(str(key), known))
    for key in ("name", "loss", "parameters"):
        require(bool(given.get(key)), where, f"the update has no {key}.", _EXAMPLE)
    named, every = given["parameters"], given.get("every", 1)
    patterns = (named,) if isinstance(named, str) else tuple(named)
    right = type(every) is int and every > 0
    require(right, f"{where}.every", f"{every!r} is not a number of steps.", "Write every: 2.")
    tree = OmegaConf.create(recipe.to_yaml())
    tree.updates = []
    tree.task.loss = given["loss"]
    tree.train.steps, tree.train.epochs = -(-recipe.train.steps // every), 0.0
    changed = OmegaConf.create({"optim": given.get("optim") or {}})
    if take_arguments(changed):
        tree.optim.update = {}
    try:
        tree.optim = OmegaConf.merge(tree.optim, changed.optim)
        own = to_recipe(OmegaConf.merge(schema(), tree))  # type: ignore[arg-type]
    except (RecipeError, *COMPOSING_ERRORS) as error:
        found = error if isinstance(error, RecipeError) else from_hydra(error, schema())
        key = found.where.replace("task.loss", "loss")
        raise RecipeError(f"{where}.{key}", found.problem, found.instead) from error
    name = str(given["name"])
    own = replace(own, trained=patterns, loss_key=f"{where}.loss")
    return StepUpdate(name=name, every=every, recipe=own, given=tuple(given))


@contextmanager
def name_key(key: str, own: str) -> Iterator[None]:
    """Let a RecipeError of a key, or of one inside it, name the key of an update in its place."""
    try:
        yield
    except RecipeError as error:
        if f"{error.where}.".startswith(f"{key}.") and key != own:
            where = own + error.where.removeprefix(key)
            raise RecipeError(where, error.problem, error.instead) from error
        raise


def check_trained(trained: Mapping[str, Mapping[str, bool]]) -> None:
    """Raise RecipeError for a parameter that two updates train, unless both do so by functions of
    the user: these share states by their names.

    trained: update -> parameter -> whether such a function updates it.
    """
    by: dict[str, tuple[str, bool]] = {}
    for update, parameters in trained.items():
        for name, own in sorted(parameters.items()):
            other, both = by.setdefault(name, (update, own))
            problem = f"{name} is trained by {other} and by {update}."
            alone = other == update or (own and both)
            require(alone, "updates", problem, "Let each update train its own parameters.")
