"""The keys of a recipe as a config of OmegaConf, into which recipes are merged; what each means."""

from __future__ import annotations

import dataclasses
import inspect
import re
from functools import cache

from omegaconf import DictConfig, OmegaConf

from flowrun.launcher.recipe.schema import RecipeSchema


@cache
def schema() -> DictConfig:
    """RecipeSchema as a config that recipes can be merged into: OmegaConf makes frozen dataclasses
    read-only, which is undone.
    """
    return _thaw(OmegaConf.structured(RecipeSchema))


def _thaw(node: DictConfig) -> DictConfig:
    node._set_flag("readonly", None)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            _thaw(child)
    return node


def meanings(cls: type) -> tuple[str, dict[str, str]]:
    """Return what a docstring says before its keys, and of each key.

    Raises ValueError for a key of the class that the docstring does not name.
    """
    names = {field.name for field in dataclasses.fields(cls)}
    prose, found, key = [], {}, ""
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        start = re.match(r"(\w+): (.*)", line)
        if start and start[1] in names:
            key = start[1]
            found[key] = start[2]
        elif key and line.startswith(" "):
            found[key] += " " + line.strip()
        else:
            key = ""
            prose.append(line)
    if missing := names - set(found):
        raise ValueError(f"{cls.__qualname__} says nothing of {', '.join(sorted(missing))}")
    return "\n".join(prose).strip(), found
