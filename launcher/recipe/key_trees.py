"""Trees of keys: nested keys as YAML prints them, as dotted keys, and with some replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

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
    """Yield (dotted key, value) of all that is no mapping with keys.

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
