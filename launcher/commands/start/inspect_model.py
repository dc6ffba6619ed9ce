"""What the names of a model and of a data set stand for, and what forward and an item show."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from flowrun.engine.errors import FlowrunError
from flowrun.launcher.data.named import NamedFields
from flowrun.launcher.model.dataset_checks import NAMED, check_items, check_kind, data_errors
from flowrun.launcher.model.targets import find, import_named, make_object
from flowrun.launcher.recipe.locate import COMMAND_LINE
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.recipe.schema import Target

MakerFunction = Callable[..., object]  # a class, or a function that makes a model or a data set
TARGETS = ("targets", "target", "labels", "label", "y")  # arguments of models with a loss


def find_model(target: str) -> tuple[str, str]:
    """Return (dotted path of the model, module that it is in).  Raises RecipeError.

    target: a module or a file with one model, or the model: module.Name, file.py:Name.  A module
    without a class of a model may have one function, which makes it.
    """
    file, _, name = target.partition(":")
    dotted = file.removesuffix(".py").strip("./").replace("/", ".") if ".py" in file else file
    dotted = f"{dotted}.{name}" if name else dotted
    module = _import(dotted)
    if module is None:
        return dotted, dotted.rpartition(".")[0]
    models = _list_models(module, dotted)
    if len(models) != 1:
        several = f"{len(models)} models: {', '.join(models)}."
        none = "no model: no subclass of torch.nn.Module, and no function."
        raise CommandLineError(
            target,
            f"this module defines {several if models else none}",
            f"Name one: flowrun init {dotted}.{models[-1] if models else 'Net'}.",
        )
    return f"{dotted}.{models[0]}", dotted


def _list_models(module: ModuleType, dotted: str) -> list[str]:
    """Return the models that a module defines and that are no part of another, by name; its
    functions if it defines no class of a model.
    """
    defined = {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == dotted and not name.startswith("_")
    }
    models = {
        name: value
        for name, value in defined.items()
        if inspect.isclass(value) and issubclass(value, nn.Module)
    }
    whole = [name for name in models if not _is_part(name, models)]
    return whole or [name for name, value in defined.items() if inspect.isfunction(value)]


def _is_part(name: str, models: Mapping[str, type]) -> bool:
    """Return whether another model makes this one in its source."""
    for other, value in models.items():
        with suppress(OSError, TypeError):
            if other != name and re.search(rf"\b{name}\(", inspect.getsource(value)):
                return True
    return False


def find_data(module: str) -> str | None:
    """Return the data set that the module of the model defines, if it is the only one."""
    sets = [
        name
        for name, value in vars(importlib.import_module(module)).items()
        if inspect.isclass(value)
        and value.__module__ == module
        and all(hasattr(value, method) for method in ("__getitem__", "__len__"))
        and not hasattr(value, "forward")
    ]
    return f"{module}.{sets[0]}" if len(sets) == 1 else None


def _import(dotted: str) -> ModuleType | None:
    """Return the module of this name; None if it is no module, but maybe something in one."""
    with _of_word(dotted):
        return import_named(dotted, COMMAND_LINE)


def find_named(path: str) -> MakerFunction:
    """Return the class or function of a dotted path.  Raises RecipeError."""
    with _of_word(path):
        return find(path, COMMAND_LINE)


@contextmanager
def _of_word(word: str) -> Iterator[None]:
    """Within the block, an error is one of this word of the command line."""
    try:
        yield
    except FlowrunError as error:
        raise CommandLineError(word, error.problem, error.instead) from error


def arguments_of_forward(maker: MakerFunction) -> dict[str, bool]:
    """Return the arguments of forward, and whether each must be given; none of a function that
    makes a model.
    """
    forward = getattr(maker, "forward", None)
    parameters = inspect.signature(forward).parameters.values() if forward else ()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name: p.default is p.empty for p in named if p.name != "self"}


@dataclass(frozen=True, kw_only=True)
class FirstItem:
    """The first item of a data set, by field.

    number: of all items.  names: that its values were given; (): it has its own.
    """

    fields: Mapping[str, Tensor]
    number: int
    names: Sequence[str] = ()

    def lines(self, made_by: Sequence[str]) -> list[str]:
        """Return the YAML of the data set: what its items are, and names of values without any.

        made_by: the YAML of what makes it.
        """
        shown = [f"{name} {_describe(value)}" for name, value in self.fields.items()]
        comment = f"# {self.number:,} items: {', '.join(shown)}"
        if not self.names:
            return [comment, *made_by]
        named = [f"_target_: {NAMED}", f"names: [{', '.join(self.names)}]", "data:"]
        return [comment, *named, *(f"  {line}" for line in made_by)]


def _describe(value: Tensor) -> str:
    """Return dtype and shape: "float32 3 x 32 x 32"."""
    shape = " x ".join(map(str, value.shape)) or "scalar"
    return f"{str(value.dtype).removeprefix('torch.')} {shape}"


def read_first_item(path: str, given: Target, arguments: Mapping[str, bool]) -> FirstItem:
    """Return the first item of the data set at a dotted path.  Raises RecipeError.

    given: arguments of the data set.  arguments: of forward, which name the values of a tuple; what
    is left of it is the target.
    """
    names: tuple[str, ...] = ()
    try:
        data = make_object({"_target_": path, **given}, "data")
        check_kind(data)
        with data_errors():
            item = data[0]
        if isinstance(item, tuple | list):
            names = _name_values(len(item), arguments)
            data = NamedFields(data, names)
        check_items(data)
    except FlowrunError as error:
        raise CommandLineError(path, error.problem, error.instead) from error
    fields = {name: torch.as_tensor(value) for name, value in data[0].items()}
    return FirstItem(fields=fields, number=len(data), names=names)


def _name_values(count: int, arguments: Mapping[str, bool]) -> tuple[str, ...]:
    """Return names for the values of a tuple: arguments of forward, then targets."""
    needed = [name for name, must in arguments.items() if must][:count]
    optional = [name for name in arguments if name in TARGETS and name not in needed]
    target = optional[0] if optional else "targets"
    more = [target, *(f"{target}_{k}" for k in range(2, count))]
    return (*needed, *more[: count - len(needed)])
