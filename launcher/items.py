"""Whether a data set's items are what a recipe needs, one by one and many at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from flowrun.engine.errors import RecipeError
from flowrun.models.data.stacked import batch_of, many_at_once
from flowrun.models.data.steps import preparation, unprepared

_WRITE = {
    "stacked": "It returns {field: tensor (B, …)}, the items of the indices (B,) in their order.",
    "__getitems__": "It returns a list, the item of each index.",
}


def check_items(data: Any) -> None:
    """Of a map-style data set with two items or more.  Raises RecipeError."""
    item = data[0]
    if not _is_dict_of_tensors(item):
        raise RecipeError(
            "data._target_",
            f"items are {type(item).__name__}, not dicts of tensors.",
            "__getitem__ returns {field: tensor}.",
        )
    method = many_at_once(data)
    if method and not preparation(data):
        wrong = _wrong(data, default_collate([item, data[1]]))
        if wrong:
            called = f"{type(data).__name__}.{method}, given the indices 0 and 1,"
            raise RecipeError("data._target_", f"{called} {wrong}", _WRITE[method])
    for field, name in unprepared(data).items():
        _check_alone(data, item, field, name)


def _check_alone(data: Any, item: Mapping[str, Tensor], field: str, name: str) -> None:
    """What makes a field of the index alone makes that of the item.  Raises RecipeError."""
    try:
        alone = getattr(data, name)(0)
        fact = f"makes {alone!r}; the item's {field!r} is {item.get(field)!r}."
        right = field in item and torch.equal(alone, item[field])
    except Exception as error:
        fact, right = f"failed: {type(error).__name__}: {error}.", False
    if not right:
        raise RecipeError(
            "data._target_",
            f"{type(data).__name__}.{name}, which `unprepared` names, given the index 0, {fact}",
            "It returns what the item of that index has in the field.",
        )


def _wrong(data: Any, expected: Mapping[str, Tensor]) -> str:
    """What is wrong with two items made at once, beside the same two made one by one."""
    try:
        made = batch_of(data, torch.tensor([0, 1]))
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    if not _is_dict_of_tensors(made):
        return f"makes a {type(made).__name__}, not a dict of tensors."
    if made.keys() != expected.keys():
        return f"makes the fields {', '.join(made)}; items have {', '.join(expected)}."
    for field, values in expected.items():
        found, wanted = _form(made[field]), _form(values)
        if found != wanted:
            return f"makes {field!r} of {found}; two items make {wanted}."
    return ""


def _is_dict_of_tensors(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, Tensor) for each in value.values())


def _form(value: Tensor) -> str:
    return f"shape {tuple(value.shape)} and {value.dtype}"
