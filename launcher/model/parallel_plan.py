"""The tensor-parallel plan that a model of transformers carries, as pins (sbp.from_model)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.sbp import S, Sbp
from flowrun.engine.strategy import Pin

KEY = "sbp.from_model"
# a style of transformers -> the dimension of a weight (out, in) that it splits, and whether it
# splits the bias; what is gathered or summed afterwards follows from the layout
_STYLES: Mapping[str, tuple[int, bool]] = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output"), (0, True)),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input"), (1, False)),
    "embedding_rowwise": (0, False),
    "embedding_colwise": (1, False),
}


def read_plan(model: nn.Module, axis: str) -> tuple[Pin, ...]:
    """Return the pins of a model's own plan on an axis.

    Styles that say nothing of one weight, and those of weights that are several in one, have none.
    Raises RecipeError for a model that carries no plan.
    """
    plan = getattr(model, "_tp_plan", None)
    if not plan:
        raise RecipeError(
            KEY,
            f"{type(model).__name__} carries no tensor-parallel plan.",
            "Models of transformers have one as _tp_plan, such as Llama, Qwen3 and Gemma. Write "
            "pins under sbp instead.",
        )
    parameters = dict(model.named_parameters())
    pins = {
        pattern: Pin(pattern, "variable", axis, sbp)
        for name, style in plan.items()
        if style in _STYLES
        for pattern, sbp in _split(name, *_STYLES[style])
        if any(fnmatchcase(each, pattern) for each in parameters)
    }
    return tuple(pins.values())


def find_others(model: nn.Module) -> list[str]:
    """Return the styles of a model's plan that have no pins."""
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    return sorted({style for style in plan.values() if style not in _STYLES})


def _split(name: str, dim: int, bias: bool) -> Iterator[tuple[str, Sbp]]:
    yield f"{name}.weight", S(dim)
    if bias:
        yield f"{name}.bias", S(dim)
