"""An extension of griffe: shows the fields that a class's docstring explains as a table.

Docstrings of the tree explain fields in lines such as "step_s: seconds of a step."; mkdocstrings
makes a table of a section "Attributes:".
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class FieldDocs(griffe.Extension):
    """Gives the docstring of every class that explains its fields a section of attributes."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Rewrite the docstring of one class."""
        if cls.docstring and "Attributes:" not in cls.docstring.value:
            names = [name for name, member in cls.members.items() if member.is_attribute]
            cls.docstring.value = with_attributes(cls.docstring.value, names)


def with_attributes(text: str, names: list[str]) -> str:
    """Return a docstring with its explanations of fields in a section of Google's style."""
    if not names:
        return text
    one = "|".join(map(re.escape, names))
    starts = [*re.finditer(rf"(?:^|(?<=[.;] )|(?<=\.  ))((?:{one})(?:, (?:{one}))*): ", text, re.M)]
    if not starts:
        return text
    ends = [start.start() for start in starts[1:]] + [len(text)]
    lines, rest = [], text[: starts[0].start()].rstrip()
    for start, end in zip(starts, ends, strict=True):
        meaning, _, after = text[start.end() : end].partition("\n\n")
        rest += f"\n\n{after.strip()}" if after.strip() else ""
        words = " ".join(meaning.split())
        lines += [f"    {name}: {words}" for name in start[1].split(", ")]
    return "\n".join([rest, "", "Attributes:", *lines])
