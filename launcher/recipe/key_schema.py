"""The keys of a recipe as a config of OmegaConf, into which recipes are merged; what each means."""

from __future__ import annotations

import dataclasses
import inspect
import re
from functools import cache

from omegaconf import BooleanNode, DictConfig, OmegaConf, ValidationError

from flowrun.launcher.recipe.schema import RecipeSchema


@cache
def schema() -> DictConfig:
    """RecipeSchema as a config that recipes can be merged into: OmegaConf makes frozen dataclasses
    read-only, which is undone, and takes any number for true, which it does not here.
    """
    return _thaw(OmegaConf.structured(RecipeSchema))


class TrueOrFalse(BooleanNode):
    """A key that is true or false, and no number."""

    def _validate_and_convert_impl(self, value: object) -> bool:
        if isinstance(value, int) and not isinstance(value, bool):
            raise ValidationError("Value '$VALUE' is not a valid bool (type $VALUE_TYPE)")
        return super()._validate_and_convert_impl(value)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, object]) -> TrueOrFalse:
        copied = TrueOrFalse()
        self._deepcopy_impl(copied, memo)
        return copied


def _thaw(node: DictConfig) -> DictConfig:
    node._set_flag("readonly", None)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            _thaw(child)
        elif type(child) is BooleanNode:
            child.__class__ = TrueOrFalse
    return node


def meanings(cls: type) -> tuple[str, dict[str, str]]:
    """Return what a docstring says before its keys, and of each key.

    Raises ValueError for a key of the class that the docstring does not name.
    """
    names = {field.name for field in dataclasses.fields(cls)}
    prose: list[str] = []
    found: dict[str, str] = {}
    keys: list[str] = []
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        start = re.match(r"([\w, ]+): (.*)", line)
        if start and names.issuperset(start[1].split(", ")):
            keys = start[1].split(", ")
            found.update(dict.fromkeys(keys, start[2]))
        elif keys and line.startswith(" "):
            found.update({key: f"{found[key]} {line.strip()}" for key in keys})
        else:
            keys = []
            prose.append(line)
    if missing := names - set(found):
        raise ValueError(f"{cls.__qualname__} says nothing of {', '.join(sorted(missing))}")
    return "\n".join(prose).strip(), found
