"""The tokenizer of a run, copied to its folder.

A run that was moved still writes text, and so does one whose tokenizer was made anew since.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.corpus.preferences import Preferences
from flowrun.launcher.data.corpus.tokenizer import copy_tokenizer
from flowrun.launcher.recipe.recipe import Recipe

TOKENIZER_FOLDER = "tokenizer"


def text_of(data: Mapping[str, object]) -> Mapping[str, object]:
    """Return the section of the data set whose text a model learns: of pairs, the chosen ones."""
    pairs = data.get("_target_") == f"{Preferences.__module__}.{Preferences.__name__}"
    chosen = data.get("chosen")
    return chosen if pairs and isinstance(chosen, Mapping) else data


def keep_tokenizer(data: Mapping[str, object], run_folder: Path) -> None:
    """Copy the tokenizer of a recipe's data set to a run's folder, if the recipe names one."""
    named = text_of(data).get("tokenizer")
    if isinstance(named, str):
        with suppress(ArgumentError):  # it means something else to a user's data set
            copy_tokenizer(named, run_folder / TOKENIZER_FOLDER)


def use_own_tokenizer(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with the tokenizer that its run has kept.  folder: run or checkpoint."""
    text, both = text_of(recipe.data), ("chosen", "rejected")
    for run_folder in (folder, *folder.resolve().parents[1:2]):
        if (copy := run_folder / TOKENIZER_FOLDER).is_dir():
            own = {"tokenizer": str(copy)}
            pair = {key: {**recipe.data[key], **own} for key in both if recipe.data.get(key)}
            return replace(recipe, data={**recipe.data, **(own if text is recipe.data else pair)})
    return recipe
