"""conf/suite/paper_foreseen.yaml, conf/published/*.yaml + command line -> Foreseen.

A file of conf/published is one published table.  Its columns are figures (UNITS) and keys of a
recipe; a row has a value for each, null where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from flowrun.engine.compile import Rehearsed
from flowrun.engine.rehearsal.reserved import count_reserved
from flowrun.launcher.bench.suite import make
from flowrun.launcher.recipe.key_schema import spell_value
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import did_you_mean, require

KIND = "foreseen"


def _samples_per_s(recipe: Recipe, planned: Rehearsed) -> float:
    return recipe.train.batch_size / planned.rehearsal.step_s


def _tokens_per_s(recipe: Recipe, planned: Rehearsed) -> float:
    """Tokens of one rank in a second."""
    return _samples_per_s(recipe, planned) * int(recipe.data["length"]) / recipe.num_ranks


def _tflops(recipe: Recipe, planned: Rehearsed) -> float:
    """The speed of one rank, by the formula of Megatron-LM, which counts activations that are
    computed twice.
    """
    sizes = (int(recipe.model[key]) for key in ("depth", "width", "vocabulary"))
    flop = gpt_flop(recipe.train.batch_size, int(recipe.data["length"]), *sizes)
    return flop / planned.rehearsal.step_s / recipe.num_ranks / 1e12


def gpt_flop(samples: int, length: int, depth: int, width: int, vocabulary: int) -> float:
    """Count the operations of one step of a GPT whose blocks run forward twice (arXiv 2104.04473,
    eq. 3).

    samples: of a step.  length: tokens of a sample.  depth, width, vocabulary: of the model.
    """
    more = 1 + length / (6 * width) + vocabulary / (16 * depth * width)
    return 96.0 * samples * length * depth * width**2 * more


def _mib(planned: Rehearsed, reserved_bytes: float = 0.0) -> float:
    """Memory of the rank that takes most.  reserved_bytes: of what holds no tensors."""
    return (max(planned.rehearsal.peak_bytes) + reserved_bytes) / 2**20


# unit -> its name on the screen, and the figure that a plan comes to.  memory_mib is as nvidia-smi
# counts: with what driver and libraries keep; memory_gib as torch.cuda.max_memory_allocated does,
# reserved_gib as max_memory_reserved under torch's FSDP.
UNITS: Mapping[str, tuple[str, Callable[[Recipe, Rehearsed], float]]] = {
    "samples_per_s": ("samples/s", _samples_per_s),
    "tokens_per_s_per_gpu": ("tokens/s per GPU", _tokens_per_s),
    "step_ms": ("ms a step", lambda _, planned: planned.rehearsal.step_s * 1e3),
    "memory_mib": ("MiB", lambda recipe, planned: _mib(planned, recipe.hardware.reserved_bytes)),
    "memory_gib": ("GiB allocated", lambda _, planned: _mib(planned) / 2**10),
    "reserved_gib": (
        "GiB reserved",
        lambda _, planned: count_reserved(planned.plan, streams_of_fsdp=True) / 2**30,
    ),
    "tflops_per_gpu": ("TFLOP/s per GPU", _tflops),
}


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
    note: str = ""
    rank_at_least: float
    error_at_most: float
    tables: tuple[PublishedTable, ...]


def parse(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> Foreseen:
    """The suite's keys, checked.  overrides: more of them, of every row.  Raises RecipeError."""
    given = {key: value for key, value in tree.items() if key not in ("kind", "rows", "overrides")}
    always = (*(tree.get("overrides") or []), *overrides)
    tables = [_table(str(name), node, always) for name, node in given["tables"].items()]
    if tree.get("rows") is not None:
        tables = _choose(tables, tree["rows"])
    return make(Foreseen, {**given, "tables": tables}, "suite")


def _table(name: str, node: Mapping[str, Any], always: tuple[str, ...]) -> PublishedTable:
    common = [f"recipe={node['recipe']}", *(node.get("overrides") or [])]
    columns = [str(column) for column in node["columns"]]
    rows = []
    for title, values in node["rows"].items():
        require(
            len(values) == len(columns),
            f"suite.tables.{name}.rows.{title}",
            f"{len(values)} values stand under {len(columns)} columns.",
            f"Give one for each of {', '.join(columns)}; null where there is none.",
        )
        pairs = [(k, v) for k, v in zip(columns, values, strict=True) if v is not None]
        keys = tuple(f"{key}={spell_value(value)}" for key, value in pairs if key not in UNITS)
        figures = tuple((key, float(value)) for key, value in pairs if key in UNITS)
        rows.append(PublishedRow(f"{name}/{title}", (*common, *keys, *always), figures))
    return PublishedTable(name, str(node["title"]), str(node["source"]), tuple(rows))


def _choose(tables: Sequence[PublishedTable], patterns: Sequence[str]) -> list[PublishedTable]:
    """Tables with those rows whose "table/row" or whose table matches a pattern (fnmatch)."""
    names = [name for table in tables for name in (table.name, *(row.name for row in table.rows))]
    for pattern in patterns:
        matches = any(fnmatchcase(name, pattern) for name in names)
        problem = f"no row matches {pattern!r}."
        require(matches, "suite.rows", problem, did_you_mean(pattern, names))

    def chosen(table: PublishedTable, row: PublishedRow) -> bool:
        return any(fnmatchcase(name, p) for p in patterns for name in (table.name, row.name))

    kept = (replace(t, rows=tuple(row for row in t.rows if chosen(t, row))) for t in tables)
    return [table for table in kept if table.rows]
