"""What the names of a model and of a data set stand for, and what forward takes."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from torch import nn
from torch.utils.data import Dataset

from flowrun.engine.errors import FlowrunError
from flowrun.launcher.model.targets import find, import_named, list_arguments
from flowrun.launcher.recipe.locate import COMMAND_LINE
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.recipe.schema import Target

MakerFunction = Callable[..., object]  # a class, or a function that makes a model or a data set
TARGETS = ("targets", "target", "labels", "label", "y")  # arguments of models with a loss
_OF_DATA = re.compile("data|train_set", re.IGNORECASE)  # names of functions that make a data set
GET_OBJECT = "hydra.utils.get_object"  # makes what is in a module already
_CLASS, _OBJECT, _FUNCTION = range(3)  # what stands for a data set, the likeliest first


def find_model(target: str) -> tuple[str, str]:
    """Return (dotted path of the model, module that it is in).  Raises RecipeError.

    target: a module or a file with one model, or the model: module.Name, file.py:Name.  A module
    without a class of a model may have one function, which makes it.
    """
    dotted = find_path(target)
    module = _import(dotted)
    if module is None:
        return dotted, dotted.rpartition(".")[0]
    models = _list_models(module, dotted)
    if len(models) != 1:
        which = ", ".join(models) or "no subclass of torch.nn.Module, and no function"
        problem = f"this module defines {len(models) or 'no'} models: {which}."
        instead = f"Name one: flowrun init {dotted}.{models[-1] if models else 'Net'}."
        raise CommandLineError(target, problem, instead)
    return f"{dotted}.{models[0]}", dotted


def find_path(target: str) -> str:
    """Return the dotted path of module.Name, file.py or file.py:Name.  Raises RecipeError for a
    file from which nothing can be imported here.
    """
    file, _, name = target.partition(":")
    if file.endswith(".py"):
        inside = os.path.relpath(file)
        if inside.startswith(os.pardir):
            problem = "this file is not below the folder in which the command is typed."
            raise CommandLineError(target, problem, f"cd {Path(file).resolve().parent}")
        file = inside.removesuffix(".py").replace(os.sep, ".")
    return f"{file}.{name}" if name else file


def _list_models(module: ModuleType, dotted: str) -> list[str]:
    """Return the models that a module defines and that are no part of another, by name; its
    functions if it defines no class of a model.
    """
    defined = {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == dotted and not name.startswith("_")
    }
    classes = {name: value for name, value in defined.items() if inspect.isclass(value)}
    models = {name: value for name, value in classes.items() if issubclass(value, nn.Module)}
    whole = [name for name in models if not _is_part(name, models)]
    functions = [name for name, value in defined.items() if inspect.isfunction(value)]
    return whole or [name for name in functions if not _OF_DATA.search(name)]


def _is_part(name: str, models: Mapping[str, type]) -> bool:
    """Return whether another model makes this one in its source."""
    for other, value in models.items():
        with suppress(OSError, TypeError):
            if other != name and re.search(rf"\b{name}\(", inspect.getsource(value)):
                return True
    return False


def find_data(module: str, given: Target) -> list[Target]:
    """Return the targets of the data sets that the module of the model defines: the likeliest.

    given: arguments of the data set.  What lacks none goes before what does, then a class before an
    object, that before a function named after data, and then a name with "train" before others.
    """
    found: dict[tuple[bool, int, bool], list[Target]] = {}
    for name, value in vars(importlib.import_module(module)).items():
        if (kind := _kind_of_data(name, value, module)) is not None:
            target = name_data(f"{module}.{name}")
            arguments = {} if kind == _OBJECT else list_arguments(value)
            lacks = any(must and key not in given for key, must in arguments.items())
            found.setdefault((lacks, kind, "train" not in name.lower()), []).append(target)
    return found[min(found)] if found else []


def name_data(path: str) -> Target:
    """Return the target of a dotted data set: of an object of a module, what gets it there."""
    module, _, name = path.rpartition(".")
    value = getattr(_import(module) if module else None, name, find_named)
    is_made = hasattr(value, "__getitem__") and not inspect.isclass(value)
    return {"_target_": GET_OBJECT, "path": path} if is_made else {"_target_": path}


def _kind_of_data(name: str, value: object, module: str) -> int | None:
    """Return how a name of a module stands for a data set; None: it does not."""
    kind = value if inspect.isclass(value) else type(value)
    is_data = issubclass(kind, Dataset) or kind.__module__.startswith("datasets.")
    if kind.__module__ == module and not issubclass(kind, nn.Module | tuple):
        is_data |= all(hasattr(kind, method) for method in ("__getitem__", "__len__"))
    if inspect.isclass(value):
        return _CLASS if is_data and kind.__module__ == module else None
    if inspect.isfunction(value):
        return _FUNCTION if value.__module__ == module and _OF_DATA.search(name) else None
    return _OBJECT if is_data else None


def _import(dotted: str) -> ModuleType | None:
    """Return the module of this name; None if it is no module, but maybe something in one."""
    with of_word(dotted):
        return import_named(dotted, COMMAND_LINE)


def find_named(path: str) -> MakerFunction:
    """Return the class or function of a dotted path.  Raises RecipeError."""
    with of_word(path):
        return find(path, COMMAND_LINE)


@contextmanager
def of_word(word: str) -> Iterator[None]:
    """Within the block, an error is one of this word of the command line."""
    try:
        yield
    except FlowrunError as error:
        raise CommandLineError(word, error.problem, error.instead) from error
