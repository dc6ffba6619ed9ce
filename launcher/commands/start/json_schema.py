"""flowrun schema: the keys of a recipe as JSON Schema, for editors that complete and check YAML.

It is made from the dataclasses of launcher/recipe/schema.py, so that it says what they say: types,
meanings, words and ranges.  What keys say together is checked by flowrun alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from flowrun.launcher.recipe.key_schema import meanings
from flowrun.launcher.recipe.schema import CHOICES, RecipeSchema
from flowrun.launcher.recipe.value_ranges import RANGES, ends_of, hints_of, kinds_of

Schema = dict[str, Any]
NAME = "recipe.schema.json"
# ${another.key}, or not yet given
_REFERENCE = {"type": "string", "pattern": r"^(.*\$\{.*|\?\?\?)$"}
_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


def make_schema() -> Schema:
    """Return the schema of a recipe's file."""
    found = _of_class(RecipeSchema, "")
    found["properties"]["defaults"] = {
        "type": "array",
        "description": "choices of groups, such as /model: gpt_tiny, or another recipe by its name",
    }
    found["properties"]["hydra"] = {"type": "object", "description": "Hydra's own keys"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of flowrun",
        **found,
        "$defs": {"reference": _REFERENCE},
    }


def write_schema(file: Path) -> str:
    """Write the schema; return the comment line by which an editor finds it from ./recipes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(make_schema(), indent=1) + "\n", encoding="utf-8")
    return f"# yaml-language-server: $schema={file.resolve()}"


def _of_class(cls: type, section: str) -> Schema:
    _, meaning = meanings(cls)
    properties = {
        name: {**_of_key(hint, f"{section}.{name}".lstrip(".")), "description": meaning[name]}
        for name, hint in hints_of(cls)
    }
    more = section == "optim"  # arguments of its _target_
    return {"type": "object", "additionalProperties": more, "properties": properties}


def _of_key(hint: Any, row: str) -> Schema:
    """Return the schema of a value that may be a reference, too.

    hint: its type.  row: the key, with * for what is inside a list or a mapping.
    """
    kinds = kinds_of(hint)
    if Any in kinds:
        return {}
    found = [_of_type(kind, row) for kind in kinds]
    return found[0] if is_dataclass(hint) else {"anyOf": [*found, {"$ref": "#/$defs/reference"}]}


def _of_type(kind: Any, row: str) -> Schema:
    inner, origin = get_args(kind), get_origin(kind) or kind
    if isinstance(kind, type) and is_dataclass(kind):
        return _of_class(kind, row)
    if origin in (list, tuple):
        return {"type": "array", "items": _of_key(inner[0], f"{row}.*") if inner else {}}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        values = _of_key(inner[1], f"{row}.*") if len(inner) == 2 else {}
        return {"type": "object", "additionalProperties": values}
    if kind is str and (words := CHOICES.get(row)):
        return {"enum": [word for word in words if word != "null"]}
    return {"type": _PLAIN[kind], **(_limit(row) if kind in (int, float) else {})}


def _limit(row: str) -> Schema:
    """Return the range of a number; empty for one that has none."""
    if row not in RANGES:
        return {}
    begin, low, high, end = ends_of(RANGES[row].interval)
    found: Schema = {"minimum" if begin == "[" else "exclusiveMinimum": low}
    if high != math.inf:
        found["maximum" if end == "]" else "exclusiveMaximum"] = high
    return {"anyOf": [found, {"const": 0}]} if RANGES[row].or_zero else found
