"""Weights and models between flowrun's own classes and those of transformers.

Their config says what a class computes; where theirs can compute something else than ours, it is
refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flowrun.engine.errors import RecipeError, refuse_as
from flowrun.launcher.model.hugging_face.counterpart import Counterpart
from flowrun.launcher.model.hugging_face.own_models import COUNTERPARTS, find_counterpart

KEY = "model.weights"
CONFIG = "config.json"


def rename_to_ours(
    model: nn.Module, path: Path, found: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return what a folder of Hugging Face's holds by the names of a model of ours, if it is one.

    path: the folder, or a file in it.  found: its tensors.  Raises RecipeError where their config
    says that their model computes something else.
    """
    file = (path if path.is_dir() else path.parent) / CONFIG
    counterpart = find_counterpart(model)
    if counterpart is None or not file.is_file() or {*found} <= {*model.state_dict()}:
        return found
    theirs = _find_class(counterpart)
    _check_config(counterpart, theirs, file, type(model).__name__)
    prefix = f"{theirs.base_model_prefix}."
    if not any(name.startswith(prefix) for name in found):  # saved without the head
        found = {f"{prefix}{name}": value for name, value in found.items()}
    ours, left = counterpart.to_ours(found)
    return {**ours, **{name: found[name] for name in drop_needless(theirs, left)}}


def drop_needless(theirs: object, names: Iterable[str]) -> list[str]:
    """Return the names of tensors but for those that a model of transformers may leave out."""
    unread = getattr(theirs, "_keys_to_ignore_on_load_unexpected", None) or ()
    needless = re.compile("|".join(unread) or r"(?!)")
    return [name for name in names if not needless.search(name)]


def _check_config(counterpart: Counterpart, theirs: Any, file: Path, name: str) -> None:
    there: Mapping[str, object] = {}

    def refuse(error: Exception) -> RecipeError:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return RecipeError(KEY, f"{file} cannot be read: {reason}")

    with refuse_as(refuse):  # classes of configs check their fields by errors of their own
        kind = json.loads(file.read_text(encoding="utf-8")).get("model_type")
        if kind == counterpart.kind:
            there = theirs.config_class.from_pretrained(file.parent).to_dict()
    if kind != counterpart.kind:
        raise RecipeError(
            KEY,
            f"{file.parent} is of model_type {kind!r}; this {name} is {counterpart.kind!r} to it.",
            "Train it as its own class: model._target_=transformers.…",
        )
    here = theirs.config_class(**counterpart.config).to_dict()
    unlike = [
        f"{key} is {there[key]} there and {here[key]} here"
        for key in counterpart.compared
        if there[key] != here[key]
    ]
    if unlike:
        raise RecipeError(
            KEY,
            f"{file.parent} computes something else than this {name}: {', '.join(unlike)}.",
            f"Change the model's arguments, or train it as transformers.{theirs.__name__}.",
        )


def make_theirs(model: nn.Module, also: Mapping[str, Any]) -> Any:
    """Return a model of transformers that computes what `model` does: itself, if it is one.

    also: arguments of the config that the model does not know, such as ids of tokens.  Raises
    RecipeError for a class that has no counterpart.
    """
    if hasattr(model, "save_pretrained"):
        return model
    counterpart = find_counterpart(model)
    if counterpart is None:
        raise RecipeError(
            "model._target_",
            f"transformers has no class that computes what {type(model).__name__} does.",
            "It has one for its own models, and for "
            f"{', '.join(each.__name__ for each in COUNTERPARTS)} of flowrun.models.",
        )
    theirs = _find_class(counterpart)
    config = theirs.config_class(**{**counterpart.config, **counterpart.also, **also})
    made = theirs(config)
    given = counterpart.to_theirs(model.state_dict())
    state = made.state_dict(keep_vars=True)
    filled = {id(state[name]) for name in given}
    assert all(id(value) in filled for value in state.values()), "a table names all weights"
    made.load_state_dict(given, strict=False)  # of a tied weight one name will do
    return made.eval()


def _find_class(counterpart: Counterpart) -> Any:
    return getattr(import_transformers(), counterpart.name)


def import_transformers() -> Any:
    """Return the package, which then draws no bars of its own.  Raises RecipeError."""
    try:
        import transformers
    except ImportError as error:
        instead = "pip install 'flowrun[text]'"
        raise RecipeError("model", "this needs the package transformers.", instead) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers
