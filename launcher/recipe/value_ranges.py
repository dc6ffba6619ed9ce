"""Check the values of keys, also inside lists and mappings: ranges of numbers, and words."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from flowrun.engine.errors import RecipeError
from flowrun.engine.hardware.hardware import PRODUCT_DTYPES
from flowrun.launcher.recipe.recipe_errors import KINDS, one_of, require
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
    "auto.seconds": Range("(0, inf)", "null searches to the end."),
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
    "engine.expert_room": Range("[1, 65536]", "1 is an even share; 0 is off.", or_zero=True),
    "engine.loss_chunks": Range(COUNT.interval, "1 holds whole logits."),
    **dict.fromkeys(
        (
            "hardware.backward_share",
            "hardware.weight_grad_share",
            "hardware.convolution_share",
            "hardware.batched_share",
            "hardware.attention_share",
            "hardware.masked_share",
            "hardware.attention.*.width",
            "hardware.attention.*.keys.*",
            "hardware.crowded_share",
            "hardware.memory_bytes_per_s",
            "hardware.host_bytes_per_s",
            "hardware.winograd",
            "hardware.fp32.flops",
            "hardware.elements_per_s.*",
            "hardware.ops.*.*",
        ),
        POSITIVE,
    ),
    **{
        f"hardware.{dtype}.{curve}": row
        for dtype in PRODUCT_DTYPES
        for curve, row in {"flop.*": POSITIVE, "share.*": Range("(0, 1]")}.items()
    },
    "hardware.attention.*.forward.*": Range("(0, 1]"),
    "hardware.attention.*.backward.*": Range("(0, 1]"),
    "hardware.tile": COUNT,
    "hardware.core": Range("(0, 1]"),
    "hardware.cores": Range("(0, inf]"),
    "hardware.levels.*.bytes_per_s": Range("(0, inf]"),
    "hardware.levels.*.taken": Range("[0, 1]"),
}


_ELSEWHERE = {"optim.name": " Any class of torch.optim is optim._target_: torch.optim.RMSprop."}


def check_values(recipe: object) -> None:
    """Check ranges and words of all that the annotated keys hold, and that what lists and mappings
    hold is no list or mapping itself, which OmegaConf takes.  Raises RecipeError with the key.
    """
    _check(recipe, type(recipe), "", "")


def check_number(value: float, row: str, where: str) -> None:
    """Check a number that stands at `where`.

    row: the key whose range applies, such as optim.lr.  Raises RecipeError.
    """
    if isinstance(value, bool):
        return
    range_ = RANGES.get(row) or (INTEGER if isinstance(value, int) else ANY)
    if problem := range_.problem(value):
        name = where.rpartition(".")[2]
        raise RecipeError(where, f"{name} is {problem}, not {value}.", range_.instead)


def _check(value: object, hint: object, key: str, row: str) -> None:
    """hint: its type.  key: where it stands; row: the same with * inside of lists and mappings."""
    if is_dataclass(value):
        kind: type = type(value)
        for name, inner in hints_of(kind):
            _check(getattr(value, name), inner, *(f"{at}.{name}".lstrip(".") for at in (key, row)))
    elif hint is Any:
        return
    elif isinstance(value, Mapping | list | tuple):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        inner = _inner(value, hint, key)
        for at, held in entries:
            _check(held, inner, f"{key}.{at}", f"{row}.*")
    elif isinstance(value, int | float):
        check_number(value, row, key)
    elif isinstance(value, str) and (words := CHOICES.get(row)):
        numbers = [KINDS[each] for each in kinds_of(hint) if each in (int, float)]
        instead = f"Write {one_of((*numbers, *words))}.{_ELSEWHERE.get(row, '')}"
        require(value in words, key, f"{value!r} is not one of its values.", instead)


def _inner(value: object, hint: object, key: str) -> object:
    """Return the type of what a list or mapping holds.  Raises RecipeError where none can stand."""
    for kind in kinds_of(hint):
        if get_origin(kind) in (dict, list, tuple):
            return get_args(kind)[-1 if get_origin(kind) is dict else 0]
    name, shown = one_of([KINDS.get(each, str(each)) for each in kinds_of(hint)]), repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}…"
    raise RecipeError(key, f"{shown} is not {name}.", f"Write {name}.")


@cache
def hints_of(kind: type) -> tuple[tuple[str, object], ...]:
    """Return the keys of a class of the schema with their types."""
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in fields(kind))


def kinds_of(hint: object) -> tuple[Any, ...]:
    """Return the types of which a value may be one."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
