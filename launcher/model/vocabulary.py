"""Check that a model has a row for every id that its data set may hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from flowrun.engine.errors import RecipeError
from flowrun.launcher.recipe.recipe import Recipe

_NAMES = ("vocabulary", "vocab_size")  # how flowrun's models and those of transformers call it


def check_vocabulary(recipe: Recipe, model: nn.Module, data: object) -> None:
    """Raise RecipeError where a key of the model, or its config, names fewer ids than the data has.

    data: its attribute `vocabulary`, if it has one, is the number of its ids.
    """
    ids = getattr(data, "vocabulary", None)
    found = [*_sizes(recipe.model, "model")]
    if size := getattr(getattr(model, "config", None), "vocab_size", None):
        found.append(("model", size))
    for where, size in found:
        if isinstance(ids, int) and isinstance(size, int) and size < ids:
            tokenizer = recipe.data.get("tokenizer")
            of = f"the tokenizer {tokenizer} of data.tokenizer" if tokenizer else "the data set"
            key = where if where != "model" else "the vocab_size of its config"
            raise RecipeError(
                where,
                f"{of} has {ids:,} ids, and the model a row for {size:,} of them.",
                f"Write {key}={ids}, or a larger number.",
            )


def _sizes(keys: Mapping[str, object], where: str) -> Iterator[tuple[str, object]]:
    """Yield (key, value) of every number of ids among the arguments of a model."""
    for key, value in keys.items():
        if isinstance(value, Mapping):
            yield from _sizes(value, f"{where}.{key}")
        elif key in _NAMES:
            yield f"{where}.{key}", value
