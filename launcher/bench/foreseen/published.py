"""conf/suite/paper_foreseen.yaml, conf/published/*.yaml + command line -> Foreseen.

A file of conf/published is one published table.  Its columns are figures (units of figures.py) and
keys of a recipe; a row has a value for each, null where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from flowrun.engine.errors import RecipeError
from flowrun.launcher.bench.foreseen.figures import UNITS
from flowrun.launcher.recipe.recipe_errors import did_you_mean

KIND = "foreseen"


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A line of a published table.

    name: "table/row".  overrides: of the recipe, as on flowrun's command line.  figures: unit ->
    what was published.
    """

    name: str
    overrides: tuple[str, ...]
    figures: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A published table.  title: what was run.  source: where it was published."""

    name: str
    title: str
    source: str
    rows: tuple[PublishedRow, ...]

    @property
    def units(self) -> tuple[str, ...]:
        """The units of its figures, in order of the first row that has them."""
        return tuple(dict.fromkeys(unit for row in self.rows for unit, _ in row.figures))


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """The suite.  rank_at_least: of the rank correlation in each table.  error_at_most: of the
    median of relative errors.
    """

    name: str
    note: str
    rank_at_least: float
    error_at_most: float
    tables: tuple[PublishedTable, ...]


def parse(tree: Mapping[str, Any], overrides: list[str] | None = None) -> Foreseen:
    """The suite's keys, checked.  overrides: more of them, of every row.  Raises RecipeError."""
    given = {key: value for key, value in tree.items() if key not in ("kind", "rows", "overrides")}
    known = {field.name for field in fields(Foreseen)}
    for key in (key for key in given if key not in known):
        raise RecipeError(
            f"suite.{key}", f"the suite has no key {key!r}.", did_you_mean(key, known)
        )
    always = [*(tree.get("overrides") or []), *(overrides or [])]
    tables = [_table(str(name), node, always) for name, node in given["tables"].items()]
    return Foreseen(
        name=str(given["name"]),
        note=str(given["note"]),
        rank_at_least=float(given["rank_at_least"]),
        error_at_most=float(given["error_at_most"]),
        tables=_chosen(tables, tree.get("rows")),
    )


def _table(name: str, node: Mapping[str, Any], always: list[str]) -> PublishedTable:
    common = [f"recipe={node['recipe']}", *(node.get("overrides") or [])]
    columns = [str(column) for column in node["columns"]]
    rows = []
    for title, values in node["rows"].items():
        if len(values) != len(columns):
            raise RecipeError(
                f"suite.tables.{name}.rows.{title}",
                f"{len(values)} values stand under {len(columns)} columns.",
                f"Give one for each of {', '.join(columns)}; null where there is none.",
            )
        pairs = [(k, v) for k, v in zip(columns, values, strict=True) if v is not None]
        keys = tuple(f"{key}={_spell(value)}" for key, value in pairs if key not in UNITS)
        figures = tuple((key, float(value)) for key, value in pairs if key in UNITS)
        rows.append(PublishedRow(f"{name}/{title}", (*common, *keys, *always), figures))
    return PublishedTable(name, str(node["title"]), str(node["source"]), tuple(rows))


def _spell(value: Any) -> str:
    """Write a value as Hydra reads it."""
    if isinstance(value, list):
        return f"[{','.join(map(_spell, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _chosen(tables: list[PublishedTable], patterns: list[str] | None) -> tuple[PublishedTable, ...]:
    """Tables with those rows whose "table/row" or whose table matches a pattern (fnmatch)."""
    if patterns is None:
        return tuple(tables)
    names = [name for table in tables for name in (table.name, *(row.name for row in table.rows))]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise RecipeError(
                "suite.rows", f"no row matches {pattern!r}.", did_you_mean(pattern, names)
            )
    kept = (
        PublishedTable(
            t.name, t.title, t.source, tuple(r for r in t.rows if _is_wanted(t, r, patterns))
        )
        for t in tables
    )
    return tuple(table for table in kept if table.rows)


def _is_wanted(table: PublishedTable, row: PublishedRow, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, p) for p in patterns for name in (table.name, row.name))
