"""What `_target_` and its arguments name: a class or function at a dotted path, and what it makes.

Each mistake is a RecipeError at the key that names it.  The working directory is importable, so
that a recipe may name the user's own files.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any

from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf.errors import OmegaConfBaseException

from flowrun.engine.errors import ArgumentError, RecipeError, refuse_as
from flowrun.engine.ir.user_code import place_of
from flowrun.launcher.data.transforms import import_torchvision
from flowrun.launcher.model.hugging_face.convert_models import import_transformers
from flowrun.launcher.model.user_modules import FOLDERS, describe_file, make_importable
from flowrun.launcher.recipe.recipe_errors import did_you_mean, find_near
from flowrun.launcher.recipe.schema import BUCKETS, OF_BATCHES, Target

_WITH_TORCHVISION = ("torchvision", "timm", "transformers")  # these import it
# names that recipes may still hold -> where they are; the first that fits
MOVED = {
    "flowrun.models.data.text.": "flowrun.launcher.data.corpus.text.",
    "flowrun.models.data.tokens.": "flowrun.launcher.data.corpus.tokens.",
    "flowrun.models.data.masked.": "flowrun.launcher.data.corpus.masked.",
    "flowrun.models.data.windows.": "flowrun.launcher.data.corpus.tokens.",
    "flowrun.launcher.data.corpus.windows.": "flowrun.launcher.data.corpus.tokens.",
    "flowrun.models.data.photographs.": "flowrun.launcher.data.images.",
    "flowrun.models.data.click_log.": "flowrun.launcher.data.clicks.",
    "flowrun.models.data.": "flowrun.launcher.data.",
    "flowrun.models.clicks.": "flowrun.launcher.data.clicks.",
    "flowrun.models.callbacks.": "flowrun.launcher.listeners.early_stopping.",
}
_BESIDE = {"model": ("weights",), "data": (*OF_BATCHES, BUCKETS)}  # keys that are no arguments
_FULL_KEY = re.compile(r"^full_key: (.+)$", re.MULTILINE)  # in Hydra's error


def make_object(target: Target, where: str) -> Any:
    """The object that `_target_` and its arguments describe; an argument may be such an object."""
    made_by = find(str(target["_target_"]), f"{where}._target_")
    arguments = _arguments_of(target)
    if "_args_" not in target:
        check_arguments(made_by, arguments, where)
    # paths alone: a config of transformers takes more than its signature shows
    for place, path in targets_within(arguments, where):
        find(path, place)
    return _instantiate(target, str(target["_target_"]), where)


def targets_within(value: object, where: str) -> Iterator[tuple[str, str]]:
    """Yield (key, dotted path) of every `_target_` in the value of a key, `where`."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield f"{where}._target_", str(value["_target_"])
        for key, each in value.items():
            yield from targets_within(each, f"{where}.{key}")
    elif isinstance(value, list):
        for k, each in enumerate(value):
            yield from targets_within(each, f"{where}[{k}]")


def new_name(path: str) -> str:
    """Return the dotted path at which a class or function is that a recipe names."""
    old = next((old for old in MOVED if path.startswith(old)), "")
    return MOVED.get(old, "") + path.removeprefix(old)


def _with_new_names(value: Any) -> Any:
    if isinstance(value, Mapping):
        named = {key: _with_new_names(each) for key, each in value.items()}
        return {key: new_name(each) if key == "_target_" else each for key, each in named.items()}
    return [_with_new_names(each) for each in value] if isinstance(value, list) else value


def note_moved(value: object, where: str) -> Iterator[str]:
    """Note names that have moved.  value: of the key `where`, which may hold targets."""
    for place, old in targets_within(value, where):
        if (new := new_name(old)) != old:
            yield f"{place}={old} is {new} by now"


def make_function(
    target: Target,
    where: str,
    positional: int = 2,
    more: Mapping[str, object] = MappingProxyType({}),
) -> Callable[..., Any]:
    """The callable that `_target_` names; the recipe's arguments, and `more`, follow (output,
    batch), or as many that are `positional`.  Of a class with __call__ it is an object.
    """
    function = find(str(target["_target_"]), f"{where}._target_")
    if inspect.isclass(function) and any("__call__" in vars(kind) for kind in function.__mro__):
        return make_object(target, where)  # type: ignore[no-any-return]
    arguments = _arguments_of(target)
    check_arguments(function, {**arguments, **more}, where, positional)
    made = _instantiate({"arguments": arguments}, str(target["_target_"]), where)["arguments"]
    made |= more
    return functools.partial(function, **made) if made else function


def _instantiate(target: Target, name: str, where: str) -> Any:
    try:
        return instantiate(_with_new_names(target), _convert_="all")
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        if isinstance(cause, ArgumentError):
            within = _FULL_KEY.search(str(error))  # of a target among the arguments of another
            place = f"{where}.{within[1]}" if within else where
            raise RecipeError(f"{place}.{cause.argument}", cause.problem, cause.instead) from error
        reason = " ".join(str(cause).split()) or type(cause).__name__
        reason += f" ({place})" if (place := place_of(cause)) else ""
        raise RecipeError(
            where, f"{name} refused its arguments: {type(cause).__name__}: {reason}"
        ) from error


def _arguments_of(target: Target) -> dict[str, object]:
    """Return all but Hydra's own words, such as `_target_`."""
    return {k: value for k, value in target.items() if not (k.startswith("_") and k.endswith("_"))}


def list_arguments(function: Callable[..., object] | None) -> dict[str, bool]:
    """Return the arguments of a function, and whether each must be given; of None, none."""
    parameters = inspect.signature(function).parameters.values() if function else ()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name: p.default is p.empty for p in named if p.name != "self"}


def check_arguments(
    made_by: Callable[..., object], arguments: Mapping[str, object], where: str, positional: int = 0
) -> None:
    """Compare the names of `arguments` with the signature of `made_by`, not their values.

    positional: how many arguments are given by position.  Raises RecipeError at a key of `where`.
    """
    try:
        parameters = list(inspect.signature(made_by).parameters.values())[positional:]
    except (TypeError, ValueError):
        return
    known = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    name = getattr(made_by, "__name__", str(made_by))
    names = [*known, *_BESIDE.get(where, ())]
    for key in arguments:
        if key not in known and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise RecipeError(
                f"{where}.{key}", f"{name} takes no argument {key!r}.", did_you_mean(key, names)
            )
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in arguments:
            raise RecipeError(
                where,
                f"{name} needs the argument {key!r}.",
                f"Its arguments are {', '.join(known)}.",
            )


def find(path: str, where: str) -> Callable[..., Any]:
    """The class or function at a dotted path; a RecipeError says which part is missing."""
    path = new_name(path)
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        raise RecipeError(where, f"{path!r} is not a dotted path.", "Write package.module.Name.")
    if parts[0] in _WITH_TORCHVISION and find_spec("torchvision"):
        import_torchvision()
    found, depth = _deepest_module(parts, where)
    if parts[0] == "transformers":
        import_transformers()  # the lines of a run are no place for its bars
    for part in parts[depth:]:
        if not hasattr(found, part):
            owner = getattr(found, "__name__", str(found))
            known = [name for name in dir(found) if not name.startswith("_")]
            known += [m.name for m in pkgutil.iter_modules(getattr(found, "__path__", []))]
            near = did_you_mean(part, known) if len(known) < 12 else find_near(part, known)
            problem = f"{owner!r} has no {part!r}{describe_file(found)}."
            raise RecipeError(where, problem, near)
        found = getattr(found, part)
    if not callable(found):
        raise RecipeError(
            where, f"{path!r} is a {type(found).__name__}, which cannot be called.", "Name a class."
        )
    return found


def _deepest_module(parts: list[str], where: str) -> tuple[object, int]:
    """The longest leading part of a dotted path that is a module, imported."""
    module: object = None
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        deeper = import_named(name, where)
        if deeper is None and module is not None:
            return module, depth - 1
        if deeper is None:
            known = [m.name for m in pkgutil.iter_modules([*FOLDERS, *sys.path])]
            instead = "The working directory and installed packages are searched."
            near = find_near(name, known) or instead
            raise RecipeError(where, f"there is no module {name!r}.", near)
        module = deeper
    return module, len(parts)


def import_named(name: str, where: str) -> ModuleType | None:
    """Return a module of the working directory or installed; None if there is none of this name."""
    make_importable(os.getcwd())

    def refuse(error: Exception) -> RecipeError:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        moved = new_name(f"{missing}.").rstrip(".") if missing else None
        what = str(error) if missing else f"{type(error).__name__}: {error}"
        instead = f"It is {moved} by now." if moved != missing else ""
        return RecipeError(where, f"importing {name!r} failed: {what}.", instead)

    with refuse_as(refuse):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and not (name == error.name or name.startswith(f"{error.name}.")):
                raise
            return None
