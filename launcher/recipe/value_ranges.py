"""Check the values of a recipe's keys: the types of what lists and mappings hold, as the schema
annotates them, the range of every number, and the words that a key may hold.

Hydra compares types of keys alone: what lies inside a list or a mapping passes it.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from flowrun.engine.errors import RecipeError
from flowrun.launcher.recipe.recipe_errors import one_of, require
from flowrun.launcher.recipe.schema import CHOICES

_INTERVAL = re.compile(r"([\[(])(.*), (.*)([\])])")
_INT64 = 2**63
MOST_RANKS = 2**20


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers between two ends, written as mathematics does: "[0, 1)" has 0 and not 1.

    instead: a sentence that says what to write.  or_zero: 0 is in range, too.
    """

    interval: str
    instead: str = ""
    or_zero: bool = False

    def problem(self, value: float) -> str:
        """Say what a number must be, such as "at least 1"; empty if it is in range."""
        if self.or_zero and value == 0:
            return ""
        begin, low, high, end = ends_of(self.interval)
        if not value >= low or (value == low and begin == "("):
            return f"over {low:g}" if begin == "(" else f"at least {low:g}" if low else "0 or more"
        if value == high == math.inf and end == ")":
            return "a finite number"
        if not value <= high or (value == high and end == ")"):
            most = f"{high:g}" if isinstance(high, float) else f"{high:,}"
            return f"below {most}" if end == ")" else f"at most {most}"
        return ""


@cache
def ends_of(interval: str) -> tuple[str, float, float, str]:
    begin, low, high, end = _INTERVAL.fullmatch(interval).groups()  # type: ignore[union-attr]
    return begin, float(low), math.inf if high == "inf" else _number(high), end


def _number(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)


POSITIVE = Range("(0, inf)")
_FP32 = "Ranks compute in fp32, which ends at 3.4e38."
FP32 = Range("(0, 1e38]", _FP32)
FP32_OR_OFF = Range("[0, 1e38]", f"0 is off.  {_FP32}")
COUNT = Range(f"[1, {MOST_RANKS}]")
FRACTION = Range("[0, 1)", "0 is off.")
OFF_OR_MORE = Range("[0, inf)", "0 is off.")
ANY = Range("[0, inf)")  # of whatever has no row
INTEGER = Range(f"[0, {_INT64})")

# key, with * for what is inside a list or a mapping -> its range
RANGES: Mapping[str, Range] = {
    "placement.axes.*": Range(COUNT.interval, "An axis of 1 rank is as if absent."),
    "placement.chunks": COUNT,
    "placement.in_flight": COUNT,
    "train.batch_size": Range(f"[1, {2**31})"),
    "train.micro_batches": Range(f"[1, {2**31})"),
    "train.steps": Range(f"[1, {10**9}]"),
    "train.epochs": OFF_OR_MORE,
    "train.seed": INTEGER,
    "eval.fraction": Range("[0, 1)"),
    "adapters.rank": Range("[1, 65536]", "Usual are 8 to 64."),
    "adapters.alpha": FP32,
    "adapters.dropout": FRACTION,
    "optim.lr": FP32,
    "optim.eps": FP32,
    "optim.betas.*": Range("[0, 1)", "Usual are [0.9, 0.95] and [0.9, 0.999]."),
    "optim.beta1": Range("[0, 1)"),
    "optim.beta2": Range("[0, 1)"),
    "optim.momentum": FRACTION,
    "optim.ema": FRACTION,
    "optim.weight_decay": FP32_OR_OFF,
    "optim.clip_norm": FP32_OR_OFF,
    "optim.clip_value": FP32_OR_OFF,
    "zero.stage": Range("[0, 3]", "0 is off."),
    "auto.computation_cost_ratio": Range("[0, inf)", "1 counts compute as foreseen."),
    "auto.wait_time": Range("[0, inf)", "null stands for two acts, 2 x hardware.act_s."),
    "engine.trace": Range("[0, inf)", "Write true, false or a number of steps."),
    "auto.ranks": COUNT,
    "auto.plans": COUNT,
    "precision.loss_scale": Range(
        "(0, 1e38]", "Usual are dynamic, and powers of two such as 1024."
    ),
    "launch.nnodes": COUNT,
    "launch.min_ranks": COUNT,
    "launch.hang_s": Range(
        "[0.1, inf)", "0 is never; null is 60 s or 20 foreseen steps.", or_zero=True
    ),
    "launch.join_s": POSITIVE,
    "launch.threads": Range("[1, 4096]"),
    "launch.data_workers": Range("[0, 4096]"),
    "launch.time_limit": Range("(0, inf)", 'Write minutes, or "HH:MM:SS"; null is none.'),
    "launch.grace_s": POSITIVE,
    "launch.slurm.minutes": COUNT,
    "launch.slurm.cpus_per_node": COUNT,
    "launch.slurm.mem_gb": POSITIVE,
    "engine.register_slots": Range("[1, 4096]"),
    **dict.fromkeys(
        (
            "hardware.backward_share",
            "hardware.weight_grad_share",
            "hardware.convolution_share",
            "hardware.batched_share",
            "hardware.attention_share",
            "hardware.crowded_share",
            "hardware.memory_bytes_per_s",
            "hardware.winograd",
            "hardware.fp32.flops",
            "hardware.elements_per_s.*",
            "hardware.ops.*.*",
        ),
        POSITIVE,
    ),
    **{
        f"hardware.{dtype}.{curve}": row
        for dtype in ("fp32", "tf32", "bf16", "fp16")
        for curve, row in {"flop.*": POSITIVE, "share.*": Range("(0, 1]")}.items()
    },
    "hardware.tile": COUNT,
    "hardware.core": Range("(0, 1]"),
    "hardware.cores": Range("(0, inf]"),
    "hardware.levels.*.bytes_per_s": Range("(0, inf]"),
    "hardware.levels.*.taken": Range("[0, 1]"),
}


def check_values(recipe: Any) -> None:
    """Types and ranges of all that the annotated keys hold.  Raises RecipeError with the key."""
    _check(recipe, type(recipe), "", "")


def check_number(value: Any, row: str, where: str) -> None:
    """Check a number that stands at `where`.

    value: the number.  row: the key whose range applies, such as optim.lr.  Raises RecipeError.
    """
    if isinstance(value, bool):
        return
    range_ = RANGES.get(row) or (INTEGER if isinstance(value, int) else ANY)
    if problem := range_.problem(value):
        name = where.rpartition(".")[2]
        raise RecipeError(where, f"{name} is {problem}, not {value}.", range_.instead)


def _check(value: object, kind: Any, key: str, row: str) -> None:
    """key: where the value stands; row: the same with * inside of lists and mappings."""
    if isinstance(kind, type) and is_dataclass(kind):
        _check_fields(value, kind, key, row)
        return
    if not _is_a(value, kind):
        raise RecipeError(
            key, f"{_show_value(value)} is not {_name_type(kind)}.", f"Write {_name_type(kind)}."
        )
    kind = next((each for each in _choices(kind) if _is_a(value, each)), kind)
    inner = get_args(kind)
    if isinstance(value, Mapping) and len(inner) == 2:
        _check_mapping(value, inner, key, row)
    elif isinstance(value, list | tuple) and inner:
        for at, held in enumerate(value):
            _check(held, inner[0], f"{key}.{at}", f"{row}.*")
    elif isinstance(value, int | float) and kind is not Any:
        check_number(value, row, key)
    elif isinstance(value, str) and (words := CHOICES.get(row)):
        require(
            value in words, key, f"{value!r} is not one of its values.", f"Write {one_of(words)}."
        )


def _check_fields(value: object, kind: Any, key: str, row: str) -> None:
    hints = _hints(kind)
    for each in fields(kind):
        names = (f"{at}.{each.name}".lstrip(".") for at in (key, row))
        _check(getattr(value, each.name), hints[each.name], *names)


def _check_mapping(
    value: Mapping[object, object], inner: tuple[object, ...], key: str, row: str
) -> None:
    """inner: the kinds of its keys and of what they hold."""
    for name, held in value.items():
        if not _is_a(name, inner[0]):
            raise RecipeError(key, f"its key {_show_value(name)} is not {_name_type(inner[0])}.")
        _check(held, inner[1], f"{key}.{name}", f"{row}.*")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _choices(kind: Any) -> tuple[Any, ...]:
    """The kinds of which a value may be one."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _is_a(value: Any, kind: Any) -> bool:
    """Check the outermost type alone; what lists and mappings hold is checked by itself."""
    if len(_choices(kind)) > 1:
        return any(_is_a(value, each) for each in _choices(kind))
    origin = get_origin(kind) or kind
    if kind is Any or value is None:
        return kind is Any or kind is type(None)
    if isinstance(value, bool):
        return origin is bool
    wide = {float: int | float, list: list | tuple, tuple: list | tuple, dict: Mapping}
    return isinstance(value, wide.get(origin, origin))


def _name_type(kind: Any) -> str:
    """Name a type as people say it."""
    words = {int: "an integer", float: "a number", str: "a word", bool: "true or false"}
    words |= {list: "a list", tuple: "a list", dict: "a mapping", type(None): "null"}
    if len(_choices(kind)) > 1:
        return " or ".join(map(_name_type, _choices(kind)))
    origin = get_origin(kind) or kind
    return words.get(origin, str(origin))


def _show_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
