"""Write what a command found as JSON, for programs (`--format json`): an object, whose `version`
rises when a field goes or means something else.  `describe_fields` is its JSON Schema.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

VERSION = 1
_PLAIN = {str: "string", Path: "string", bool: "boolean", int: "integer", NoneType: "null"}


def to_json(found: object) -> str:
    """Return a frozen type as a line of JSON: a path is text, a number that is not finite null."""
    return json.dumps({"version": VERSION, **strict(found)}, separators=(",", ":"))


def strict(value: Any) -> Any:
    """Return what JSON has in place of a value: text of a path, null of what is not finite."""
    if is_dataclass(value):
        return {each.name: strict(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): strict(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [strict(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def describe_fields(found: type) -> dict[str, Any]:
    """Return the JSON Schema of what `to_json` makes of a frozen type."""
    schema = _of_type(found)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "properties": {"version": {"const": VERSION}, **schema["properties"]},
        "required": ["version", *schema["required"]],
    }


def _of_type(kind: Any) -> dict[str, Any]:
    inner, origin = get_args(kind), get_origin(kind) or kind
    if origin in (Union, UnionType):
        return {"anyOf": [_of_type(each) for each in inner]}
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        properties = {each.name: _of_type(hints[each.name]) for each in fields(kind)}
        return {"type": "object", "properties": properties, "required": [*properties]}
    if kind is Any:
        return {}
    if issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _of_type(inner[1])}
    if kind is float:
        return {"type": ["number", "null"]}
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if origin is tuple and inner[-1] is not Ellipsis:
        return {"type": "array", "prefixItems": [*map(_of_type, inner)], "minItems": len(inner)}
    return {"type": "array", "items": _of_type(inner[0])}
