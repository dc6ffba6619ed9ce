"""collate: items of a data set -> a batch, as torch's default_collate stacks them; `batch_of` asks
for the items.

An error names the field and the item that cannot be stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

_STACKED = (Tensor, np.ndarray, np.number, np.bool_, bool, int, float, complex)
_INSTEAD: Mapping[type, str] = {
    **dict.fromkeys((str, bytes), "leave it out of __getitem__"),
    type(None): "leave it out of __getitem__, or return a tensor in its place",
    list: "write torch.tensor(…)",
    tuple: "write torch.tensor(…)",
    dict: "make a field of each of its values",
}


class ItemError(ValueError):
    """Items that cannot be stacked; the text names field and item."""


Collate = Callable[[list[object]], dict[str, Tensor]]


def collate(
    items: Sequence[object], numbers: Sequence[int], own: Collate | None = None
) -> dict[str, Tensor]:
    """Stack B items to {field: (B, …)}.

    numbers: indices of the items in the data set.  own: stacks them in its way.  Raise ItemError if
    they cannot be stacked, or are no dicts of tensors, numbers or arrays.
    """
    if own:
        return _collate_by(own, items, numbers)
    try:
        batch = default_collate(list(items))
        if _is_batch(batch):
            return {field: value.detach() for field, value in batch.items()}
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ItemError(_find_fault(items, numbers) or f"{_list(numbers)}: {error}") from None
    raise ItemError(_find_fault(items, numbers) or f"{_list(numbers)} make no dict of tensors")


def _collate_by(own: Collate, items: Sequence[object], numbers: Sequence[int]) -> dict[str, Tensor]:
    with naming_items(numbers, "data.collate"):
        batch = own(list(items))
    if not _is_batch(batch):
        raise ItemError(f"data.collate makes {_with_article(batch)}: return {{field: tensor}}")
    for field, value in batch.items():
        if value.shape[:1] != (len(items),):
            what = f"{field!r} of shape {tuple(value.shape)} of {len(items)} items"
            raise ItemError(f"data.collate makes {what}: its first dim is that of the items")
    return {field: value.detach() for field, value in batch.items()}


def _is_batch(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(_is_name(field) for field in value)
        and all(isinstance(each, Tensor) for each in value.values())
    )


def _is_name(field: object) -> bool:
    return isinstance(field, str) and field != "" and not field.startswith("@")


def _find_fault(items: Sequence[Any], numbers: Sequence[int]) -> str:
    """Describe the first item that cannot be stacked with item 0; "" if none is found."""
    first = items[0]
    for item, number in zip(items, numbers, strict=False):
        if fault := _fault_of(item, number):
            return fault
        if missing := [field for field in first if field not in item]:
            return f"item {number} has no field {missing[0]!r}, which item {numbers[0]} has"
    for field in first:
        for item, number in zip(items, numbers, strict=False):
            one, other = (tuple(getattr(x[field], "shape", ())) for x in (first, item))
            if one != other:
                which = f"items {numbers[0]} and {number} is of shape {one} and {other}"
                instead = "pad it to one shape, or resize it, in __getitem__ or in data.collate"
                return f"field {field!r} of {which}: {instead}"
    return ""


def _fault_of(item: object, number: int) -> str:
    if not isinstance(item, Mapping):
        return f"item {number} is {_with_article(item)}: return a dict, {{field: tensor}}"
    if not item:
        return f"item {number} has no fields"
    for field, value in item.items():
        if not _is_name(field):
            return f"field {field!r} of item {number} is not a name: write a str without @ in front"
        if isinstance(value, np.ndarray) and value.dtype.kind not in "biufc":
            what = f"an array of dtype {value.dtype}: leave it out of __getitem__"
        elif isinstance(value, _STACKED):
            continue
        else:
            instead = (text for kind, text in _INSTEAD.items() if isinstance(value, kind))
            what = f"{_with_article(value)}: {next(instead, 'make it a tensor')}"
        return f"field {field!r} of item {number} is {what}"
    return ""


def _with_article(value: object) -> str:
    """Return words for a value's type: "None", "a str", "an Image"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _list(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:3]))
    return f"items {shown}{' …' if len(numbers) > 3 else ''}"


def batch_of(
    data: Dataset[object], indices: Tensor, own: Collate | None = None
) -> dict[str, Tensor]:
    """Return items of any map-style data set, stacked: {field: (B, …)}.

    The items come from its `stacked`, else from its `__getitems__` (torch's, a list of items), else
    one by one.  own: stacks items.  An error of the data set gets a note that names the items.
    Raise ItemError if they cannot be stacked.
    """
    chosen, way = indices.tolist(), batch_method(data)
    if way is None or (own and way == "stacked"):
        return collate([item_of(data, k) for k in chosen], chosen, own)
    with naming_items(chosen):
        many = getattr(data, way)(indices if way == "stacked" else chosen)
    return many if way == "stacked" else collate(many, chosen, own)


def batch_method(data: Dataset[object]) -> str | None:
    """Return the method by which `batch_of` makes a batch in one call; None: one by one."""
    ways = ("stacked", "__getitems__")
    return next((name for name in ways if callable(getattr(data, name, None))), None)


def item_of(data: Any, number: int) -> Any:
    """Return data[number]; an error gets a note that names the item."""
    with naming_items([number]):
        return data[number]


@contextmanager
def naming_items(numbers: Sequence[int], step: str = "") -> Iterator[None]:
    """Name the items to which an error of the data set's own code belongs, in a note of it.

    step: of their making, if they are made in steps.
    """
    try:
        yield
    except Exception as error:
        items = f"item {numbers[0]}" if len(numbers) == 1 else _list(numbers)
        error.add_note(f"{items} of the data set{step and f', in its step {step}'}")
        raise


def differing_fields(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Return the fields whose bytes differ between two batches."""
    bytes_of = lambda value: value.contiguous().flatten().view(torch.uint8)  # noqa: E731
    return [
        field
        for field, value in one.items()
        if field not in other or not torch.equal(bytes_of(value), bytes_of(other[field]))
    ]
