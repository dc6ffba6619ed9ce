"""The page of all recipe keys, made from launcher/recipe/schema.py: types, defaults, docstrings."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flowrun.engine.hardware.hardware import AttentionSpeed, Hardware, Products
from flowrun.engine.hardware.network import Level
from flowrun.launcher.recipe.key_schema import meanings
from flowrun.launcher.recipe.schema import RecipeSchema

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ("model", "data", "optim", "parallel", "launch", "hardware")
ENDINGS = {  # of a key's name -> unit
    "bytes_per_s": "bytes/s",
    "elements_per_s": "elements/s",
    "_bytes": "bytes",
    "_s": "s",
    "_gb": "GB",
    "_share": "share",
    "flops": "FLOP/s",
    "minutes": "minutes",
    "_steps": "steps",
}
UNITS = {
    "auto.plans": "plans",
    "auto.ranks": "ranks",
    "auto.seconds": "s",
    "auto.wait_time": "s",
    "eval.batches": "batches",
    "eval.every": "steps",
    "eval.fraction": "share",
    "hardware.attention.backward": "share",
    "hardware.attention.forward": "share",
    "hardware.attention.keys": "keys",
    "hardware.core": "share",
    "hardware.cores": "cores",
    "hardware.levels.peer_s": "s",
    "hardware.levels.ranks": "ranks",
    "hardware.levels.taken": "share",
    "hardware.fp32.flop": "FLOP",
    "hardware.fp32.share": "share",
    "launch.nnodes": "hosts",
    "launch.threads": "threads",
    "engine.register_slots": "slots",
    "engine.trace": "steps",
    "placement.axes": "ranks",
    "placement.in_flight": "micro-batches",
    "train.batch_size": "samples",
    "train.keep": "checkpoints",
    "train.log_every": "steps",
    "train.save_every": "steps",
    "train.steps": "steps",
    "zero.min_size": "elements",
}
HEAD = """# Recipe keys

This page lists every key of a recipe. A command makes it from the schema
(`launcher/recipe/schema.py`), which also checks what you write: an unknown key or a value of a
wrong type is an error with file, line and column. Every key can be set in the recipe's file and on
the command line (`train.steps=50`).

Sections of the recipe: {sections}.
"""


class Key(NamedTuple):
    """One row of the page."""

    name: str
    type: str
    default: str
    unit: str
    meaning: str


def keys(cls: type, section: str) -> Iterator[Key]:
    """Yield the keys of a section, in the order of the schema."""
    _, meaning = meanings(cls)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        dotted = f"{section}.{field.name}".lstrip(".")
        yield Key(
            dotted, _type(hints[field.name]), _default(field), unit_of(dotted), meaning[field.name]
        )


def unit_of(dotted: str) -> str:
    """Return the unit of a key, "" if its value is no quantity."""
    ending = next((unit for ending, unit in ENDINGS.items() if dotted.endswith(ending)), "")
    return UNITS.get(dotted, ending)


def sections() -> dict[str, tuple[type, str]]:
    """Return the classes of the schema by their dotted place, with the heading of each."""
    found: dict[str, tuple[type, str]] = {"": (RecipeSchema, "The recipe")}
    for field in dataclasses.fields(RecipeSchema):
        hint = typing.get_type_hints(RecipeSchema)[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found[field.name] = (hint, field.name)
            for inner, inner_hint in typing.get_type_hints(hint).items():
                if dataclasses.is_dataclass(inner_hint) and inner_hint is not Products:
                    found[f"{field.name}.{inner}"] = (inner_hint, f"{field.name}.{inner}")
    assert found["hardware"][0] is Hardware
    found["hardware.fp32"] = (Products, "hardware.fp32, tf32, bf16, fp16")
    found["hardware.attention"] = (AttentionSpeed, "hardware.attention")
    found["hardware.levels"] = (Level, "hardware.levels")
    return found


def page() -> str:
    """Return the page, as Markdown."""
    parts, links = [], []
    for dotted, (cls, heading) in sections().items():
        anchor = heading.lower().replace(", ", "-").replace(".", "").replace(" ", "-")
        if dotted:
            links.append(f"[`{heading}`](#{anchor})")
        prose, _ = meanings(cls)
        rows = ["| key | type | default | unit | meaning |", "| --- | --- | --- | --- | --- |"]
        for key in keys(cls, dotted):
            name = key.name.removeprefix(f"{dotted}.") if dotted else key.name
            shown = (
                f"[`{name}`](#{key.name})" if not dotted and key.name in sections() else f"`{name}`"
            )
            default = f"`{key.default}`" if key.default else ""
            cells = (shown, f"`{key.type}`", default, key.unit, _prose(key.meaning))
            rows.append(f"| {' | '.join(cells)} |")
        parts.append(
            f"## {heading} {{ #{anchor} }}\n\n{_prose(prose)}\n\n" + "\n".join(rows) + "\n"
        )
    return HEAD.format(sections=", ".join(links)) + "\n" + "\n".join(parts) + "\n" + groups()


def groups() -> str:
    """Return the files of conf/, by group: what `model=NAME` and the like choose from."""
    lines = [
        "## Groups { #groups }",
        "",
        "A group is a folder of `conf/`; `model=NAME` on the command line, or `/model: NAME` under",
        "`defaults`, takes a file of it. `--config-dir DIR` adds groups of your own.",
        "",
        "| group | choices |",
        "| --- | --- |",
    ]
    for group in GROUPS:
        names = sorted(file.stem for file in (ROOT / "conf" / group).glob("*.yaml"))
        lines.append(f"| `{group}` | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines) + "\n"


def _type(hint: Any) -> str:
    if hint is Any:
        return "any"
    if hint is type(None):
        return "null"
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return "section"
    if options := typing.get_args(hint):
        names = [_type(each) for each in options if each is not Ellipsis]
        origin = typing.get_origin(hint)
        if origin is dict:
            return f"{names[0]} -> {names[1]}"
        return f"list of {names[0]}" if origin in (list, tuple) else " or ".join(names)
    return str(getattr(hint, "__name__", hint))


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        value = field.default
    if dataclasses.is_dataclass(value) or (
        isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0])
    ):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    return {"": "''", "None": "null"}.get(str(value), str(value))


def _prose(text: str) -> str:
    """Docstrings name pages as paths; here they are links, and braces and stars are code."""
    text = re.sub(r"docs/(\w+/(\w+))\.md", r"[see \2](../\1.md)", text)
    return re.sub(r"(?<!`)(\{[^}]*\})(?!`)", r"`\1`", text)
