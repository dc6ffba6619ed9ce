"""The meaning of every key of a recipe, out of the docstrings of the schema."""

from __future__ import annotations

import dataclasses
import inspect
import re


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
