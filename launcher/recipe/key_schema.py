"""The keys of a recipe as a config of OmegaConf, into which recipes are merged; what each means;
nested keys as YAML prints them, as dotted keys, and with some replaced.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from functools import cache
from typing import Any, TypeVar

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


Keys = TypeVar("Keys", bound=Any)


def change_keys(tree: Keys, keys: Mapping[str, Any]) -> Keys:
    """Return `tree` with some nested keys replaced, as a recipe merged over it would: key by key,
    in dicts too.  keys: of the types that the schema asks for.
    """
    given = {}
    for key, value in keys.items():
        before = getattr(tree, key)
        if is_dataclass(before):
            value = change_keys(before, value)
        elif isinstance(before, dict):
            value = before | value
        given[key] = value
    return replace(tree, **given)


def plain(value: Any) -> Any:
    """Return nested mappings and sequences as dicts and lists: what YAML and errors print."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def flatten_keys(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all that is not a mapping with keys.

    tree: nested keys; a value that is none has the key `prefix`.
    """
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from flatten_keys(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def spell_value(value: object) -> str:
    """Write a value as Hydra reads it on a command line."""
    if isinstance(value, list):
        return f"[{','.join(map(spell_value, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
