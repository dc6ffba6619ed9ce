"""Check that a data set's items are what a recipe needs, one by one and many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from flowrun.engine.errors import RecipeError, refuse_as
from flowrun.engine.ir.user_code import place_of
from flowrun.launcher.data.collate import (
    Collate,
    ItemError,
    batch_method,
    batch_of,
    collate,
    differing_fields,
    item_of,
)
from flowrun.launcher.data.named import NamedFields, Streamed
from flowrun.launcher.data.sampler import length
from flowrun.launcher.data.steps import preparation, unprepared_fields
from flowrun.launcher.recipe.recipe_errors import require
from flowrun.launcher.recipe.schema import Target
from flowrun.models.losses import IGNORED, model_loss

NAMED, STREAMED = (f"{kind.__module__}.{kind.__name__}" for kind in (NamedFields, Streamed))
_VOCABULARY = ("vocabulary", "vocab_size")  # how flowrun's models and those of transformers call it
_OWN_LOSS = (
    "Write task.inputs={input_ids: tokens} and "
    "task.loss={_target_: flowrun.models.losses.cross_entropy}, which reads the targets."
)
_WRITE = {
    "stacked": "It returns {field: tensor (B, …)}, the items of the indices (B,) in their order.",
    "__getitems__": "It returns a list, the item of each index.",
}


def check_kind(data: object) -> None:
    """It has a length and items by number.  Raises RecipeError."""
    name = type(data).__name__
    if isinstance(data, IterableDataset):
        instead = f"Write data: {{_target_: {STREAMED}, data: {{_target_: this, …}}, length: …}}."
        problem = f"{name} gives its items in turn, and does not say how many there are."
        raise RecipeError("data._target_", problem, instead)
    if isinstance(data, DataLoader):
        raise RecipeError(
            "data._target_",
            f"{name} makes batches; flowrun makes its own, of items.",
            "Name the Dataset that it reads.",
        )
    parts = [*data.values()] if isinstance(data, dict) else data
    several = isinstance(parts, tuple | list) and all(
        isinstance(part, Dataset) or type(part).__module__.startswith("datasets.") for part in parts
    )
    problem = f"this makes a {name} of data sets."
    require(not several, "data._target_", problem, "Name what makes one of them.")
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise RecipeError(
            "data._target_",
            f"a {name} has no length or cannot be indexed.",
            "Name a map-style torch Dataset.",
        )
    with data_errors():
        found = len(data)
    if found < 2:
        raise RecipeError(
            "data", f"the data set has {found} items.", "Some are held out: at least 2 are needed."
        )


def check_items(data: Dataset[object], own: Collate | None = None) -> None:
    """Check a map-style data set with two items or more.  own: stacks them.  Raises RecipeError."""
    with data_errors():
        items = [item_of(data, number) for number in (0, 1)]
        if own:
            collate(items, (0, 1), own)
            return
        if isinstance(items[0], tuple | list):
            raise RecipeError(
                "data._target_",
                f"item 0 is a {type(items[0]).__name__}: return a dict, {{field: tensor}}.",
                f"Or name its {len(items[0])} values: data: {{_target_: {NAMED}, names: […], data: "
                "{_target_: this class, …}}",
            )
        expected = collate(items, (0, 1))
    method = batch_method(data)
    if method and not preparation(data):
        wrong = _wrong(data, expected)
        if wrong:
            called = f"{type(data).__name__}.{method}, given the indices 0 and 1,"
            raise RecipeError("data._target_", f"{called} {wrong}", _WRITE[method])
    for field, name in unprepared_fields(data).items():
        _check_alone(data, items[0], field, name)


def check_labels(
    model: object, inputs: Mapping[str, str], loss: Target | None, data: object
) -> None:
    """Check that labels of a model that computes its loss are those of the data set.

    inputs: argument of forward -> field.  loss: of the recipe; a model whose loss is computed
    outside needs no labels.  data: its first item, and that of each of its sources, is looked at.
    Raises RecipeError for labels that count what `targets` mask, and for labels that are shifted
    already where the model shifts them again.
    """
    field, ids = inputs.get("labels"), inputs.get("input_ids")
    outside = loss is not None and loss["_target_"] != f"{model_loss.__module__}.model_loss"
    if outside or field is None:
        return
    for part in getattr(data, "sources", [data]):
        with data_errors():
            item = {name: torch.as_tensor(value) for name, value in item_of(part, 0).items()}
        labels, targets = item[field], item.get("targets")
        if targets is not None and IGNORED in targets and IGNORED not in labels:
            raise RecipeError(
                "task.inputs.labels",
                f"{field!r} counts every id, also those that the field 'targets' of the data set "
                "leaves out: prompts and padding would be trained on.",
                _OWN_LOSS,
            )
        if _shifts(model) and ids is not None and _are_shifted(labels, item[ids]):
            raise RecipeError(
                "task.inputs.labels",
                f"{field!r} is one id ahead of {ids!r} already, and {type(model).__name__} shifts "
                "its labels by itself: it would learn the id after the next.",
                _OWN_LOSS,
            )


def _shifts(model: object) -> bool:
    """Return True for a causal language model of transformers, also one that peft has wrapped."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    kinds = [kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers.")]
    return any(kind.__name__.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds)


def _are_shifted(labels: Tensor, ids: Tensor) -> bool:
    """Return True if labels (T,) are the ids (T,) one ahead, and not the ids themselves."""
    if labels.dim() != 1 or labels.shape != ids.shape:
        return False
    counted = labels != IGNORED
    ahead = counted[:-1].any() and (labels[:-1] == ids[1:])[counted[:-1]].all()
    return bool(ahead) and not torch.equal(labels[counted], ids[counted])


def check_vocabulary(keys: Target, model: nn.Module, data: object, tokenizer: object) -> None:
    """Raise RecipeError where a key of the model, or its config, names fewer ids than the data has.

    keys: of the model.  data: its attribute `vocabulary`, if it has one, is the number of its ids.
    tokenizer: what data.tokenizer names, if anything.
    """
    ids = getattr(data, "vocabulary", None)
    found = [*_sizes(keys, "model")]
    if size := getattr(getattr(model, "config", None), "vocab_size", None):
        found.append(("model", size))
    for where, size in found:
        if isinstance(ids, int) and isinstance(size, int) and size < ids:
            of = f"the tokenizer {tokenizer} of data.tokenizer" if tokenizer else "the data set"
            key = where if where != "model" else "the vocab_size of its config"
            raise RecipeError(
                where,
                f"{of} has {ids:,} ids, and the model a row for {size:,} of them.",
                f"Write {key}={ids}, or a larger number.",
            )


def _sizes(keys: Mapping[str, object], where: str) -> Iterator[tuple[str, object]]:
    """Yield (key, value) of every number of ids among the arguments of a model."""
    for key, value in keys.items():
        if isinstance(value, Mapping):
            yield from _sizes(value, f"{where}.{key}")
        elif key in _VOCABULARY:
            yield f"{where}.{key}", value


def notes_of(data: object) -> tuple[str, ...]:
    """Return the notes that a data set of flowrun's own has for the user."""
    found = getattr(data, "notes", ())
    return found if type(data).__module__.startswith("flowrun.") else ()


def data_errors() -> AbstractContextManager[None]:
    """Turn what a data set raises into a RecipeError with the item and the user's own line."""
    return refuse_as(_refuse_data)


def _refuse_data(error: Exception) -> RecipeError:
    if isinstance(error, ItemError):
        return RecipeError("data._target_", f"{error}.")
    what = f"{type(error).__name__}: {error}".strip(": ")
    lines = filter(None, [what, *getattr(error, "__notes__", []), place_of(error)])
    return RecipeError("data._target_", "\n".join(lines))


def random_fields(data: object, own: Collate | None = None) -> list[str]:
    """Fields that `data[0]` makes differently each time.  own: stacks items."""
    with data_errors():
        one, other = (collate([item_of(data, 0)], (0,), own) for _ in range(2))
    return differing_fields(one, other)


def _check_alone(data: object, item: Mapping[str, Tensor], field: str, name: str) -> None:
    """Check that a field made from the index alone equals that of the item.  Raises RecipeError."""
    alone, fact = _call(lambda: torch.as_tensor(getattr(data, name)(0)))
    if fact or field not in item or not torch.equal(alone, torch.as_tensor(item[field])):
        raise RecipeError(
            "data._target_",
            f"{type(data).__name__}.{name}, which `unprepared` names, given the index 0, "
            + (fact or f"makes {alone!r}; the item's {field!r} is {item.get(field)!r}."),
            "It returns what the item of that index has in the field.",
        )


def _wrong(data: Dataset[object], expected: Mapping[str, Tensor]) -> str:
    """Say how two items made at once differ from the same two made one by one."""
    made, failed = _call(lambda: batch_of(data, torch.tensor([0, 1])))
    if failed:
        return failed
    if not isinstance(made, dict) or not all(isinstance(each, Tensor) for each in made.values()):
        return f"makes a {type(made).__name__}, not a dict of tensors."
    if made.keys() != expected.keys():
        return f"makes the fields {', '.join(made)}; items have {', '.join(expected)}."
    for field, values in expected.items():
        found, wanted = (
            f"shape {tuple(each.shape)} and {each.dtype}" for each in (made[field], values)
        )
        if found != wanted:
            return f"makes {field!r} of {found}; two items make {wanted}."
    return ""


def _call(function: Callable[[], Any]) -> tuple[Any, str]:
    """Call code of a data set; return what it makes, and how it failed."""
    try:
        return function(), ""
    except Exception as error:
        return None, f"failed: {type(error).__name__}: {error}"


def check_lengths(
    data: Dataset[object], buckets: Sequence[int], batch: Mapping[str, Tensor]
) -> None:
    """Raise RecipeError for a data set whose batches cannot have one of several lengths.

    buckets: of data.buckets, the longest last.  batch: one of its samples.
    """
    if not buckets:
        return
    lengths, longest = getattr(data, "lengths", ()), buckets[-1]
    name, where = type(data).__name__, "data.buckets"
    problem = f"{name} does not say how long each item is, or packs several into a sample."
    instead = "Give the data set an attribute lengths: of each item, without its padding."
    require(len(lengths) == length(data), where, problem, instead)
    most = max(map(int, lengths))
    problem = f"an item is {most} long, and the longest bucket {longest}."
    instead = f"Let the last be {most} or more, and pad items to it."
    require(most <= longest, where, problem, instead)
    shapes = {field: tuple(values.shape[1:]) for field, values in batch.items()}
    problem = f"no field is {longest} long, as the longest bucket is; they are {shapes}."
    instead = f"Pad items to {longest}, as data.length={longest} does for text."
    require(any(shape[:1] == (longest,) for shape in shapes.values()), where, problem, instead)
    for field, shape in shapes.items():
        problem = f"field {field!r} is {shape}: a bucket cuts its first dim, and not the others."
        instead = "Make it in forward of the lengths, or of fields with one such dim."
        require(shape[:1] != (longest,) or longest not in shape[1:], where, problem, instead)
