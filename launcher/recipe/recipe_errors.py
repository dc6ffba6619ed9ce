"""Words shared by the launcher's errors, and Hydra's own errors turned into RecipeError.

Hydra and OmegaConf say what is wrong in their terms; here it becomes a dotted key, the facts, and
what to write instead.
"""

from __future__ import annotations

import difflib
import errno
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from flowrun.engine.errors import FlowrunError, RecipeError
from flowrun.engine.hardware.hardware import AttentionSpeed
from flowrun.engine.hardware.network import Level
from flowrun.launcher.recipe.hydra_source import GROUP, is_path, recipe_names
from flowrun.launcher.recipe.key_schema import flatten_keys, schema
from flowrun.launcher.recipe.locate import COMMAND_LINE, locate, show_path

# type of a value -> as people say it
KINDS: Mapping[object, str] = {
    **{int: "an integer", float: "a number", str: "a word", bool: "true or false"},
    **{type(None): "null", dict: "a mapping"},
}
_ENTRIES = {Level: "hardware.levels", AttentionSpeed: "hardware.attention"}  # of lists
_ENDLESS = re.compile(r"(\S{200})\S{300,}")  # a word that would fill the screen


class PlacedError(RecipeError):
    """A RecipeError that knows its place already: a file that is no YAML, an argument that is no
    override.
    """

    def __init__(self, place: str, where: str, problem: str, instead: str = "") -> None:
        super().__init__(where, problem, instead)
        self.place = place

    def __reduce__(self) -> tuple[type[PlacedError], tuple[str, str, str, str]]:
        return PlacedError, (self.place, self.where, self.problem, self.instead)


class CommandLineError(PlacedError):
    """A PlacedError for an argument, `where`, of the command line."""

    def __init__(self, where: str, problem: str, instead: str = "") -> None:
        super().__init__(COMMAND_LINE, where, problem, instead)


def one_of(words: Iterable[str]) -> str:
    """ "a, b or c"."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def require(holds: bool, where: str, problem: str, instead: str = "") -> None:
    """Raise RecipeError at the key `where` unless the statement holds."""
    if not holds:
        raise RecipeError(where, problem, instead)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Suggest the nearest known word as a question, or list all words."""
    known = list(known)
    return find_near(word, known) or (f"There is: {', '.join(known)}." if known else "")


def find_near(word: str, known: Sequence[str]) -> str:
    """Suggest the nearest known word as a question, or nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}?" if close else ""


def from_hydra(error: Exception, schema: DictConfig) -> RecipeError:
    """Turn what Hydra, OmegaConf or YAML raised while composing into an error for the user."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ or link.__context__
    telling: tuple[tuple[type, Callable[[Any], RecipeError]], ...] = (  # the most first
        (RecipeError, lambda cause: cause),
        (yaml.MarkedYAMLError, _bad_yaml),
        (yaml.reader.ReaderError, _bad_character),
        (OverrideParseException, _bad_override),
        (MissingConfigException, _no_such_choice),
        (OmegaConfBaseException, lambda cause: _bad_key(cause, schema)),
    )
    for kind, show in telling:
        for link in links:
            if isinstance(link, kind):
                return show(link)
    return _other(error)


def _bad_yaml(error: yaml.MarkedYAMLError) -> RecipeError:
    mark = error.problem_mark or error.context_mark
    place = f"{show_path(mark.name)}:{mark.line + 1}:{mark.column + 1}" if mark else "recipe"
    context = f"{error.context}, " if error.context else ""
    return PlacedError(
        place, "", f"This file is not valid YAML: {context}{error.problem}.", str(error.note or "")
    )


def _bad_character(error: yaml.reader.ReaderError) -> RecipeError:
    problem = f"This file is not valid YAML: its character {error.position} cannot stand there."
    return PlacedError(show_path(str(error.name)), "", problem, "Save it as text in UTF-8.")


def _bad_override(error: OverrideParseException) -> RecipeError:
    instead = "Write key=value, such as train.steps=100; quote what holds spaces: 'key=\"a b\"'."
    if "=" not in error.override:
        problem = "This argument is not of the form key=value."
        return CommandLineError(error.override, problem, _meant(error.override, instead))
    reason = str(error.message).splitlines()[0]
    if quoted := re.match(r"([+~]*[\w.]+)=\{\s*[\"']([^\"']+)[\"']", error.override):
        key = quoted[1].lstrip("+~")
        instead = f"Keys in braces have no quotes: {key}={{{quoted[2]}: …}}."
    return CommandLineError(error.override, f"This argument cannot be read: {reason}.", instead)


def _meant(word: str, otherwise: str) -> str:
    """Guess what an argument without = stands for."""
    known = recipe_names()
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    if near or is_path(word):
        return f"Did you mean recipe={near[0] if near else word}?"
    return otherwise


# what other programs call a command -> ours
_OTHER_WORDS = {
    "train": "run",
    "generate": "sample",
    "chat": "sample --chat",
    "evaluate": "eval",
    "finetune": "run",
    "help": "--help",
    "version": "--version",
}


def bad_command(word: str, commands: Sequence[str]) -> PlacedError | None:
    """The error of a first word that is no command; None for the name of a recipe, or almost."""
    if difflib.get_close_matches(word, recipe_names(), n=1, cutoff=0.75):
        return None
    near = difflib.get_close_matches(word, [*commands, *_OTHER_WORDS], n=1, cutoff=0.6)
    instead = f"Commands: {', '.join(commands)}."
    if near:
        instead = f"Did you mean {_OTHER_WORDS.get(near[0], near[0])!r}?"
    return CommandLineError(word, "there is no such command.", instead)


def bad_option(text: str, options: Sequence[str]) -> PlacedError:
    """An option that a command does not have: a key of the recipe, as other programs write it."""
    word, _, value = text.removeprefix("--").partition("=")
    keys = _find_leaves(word.replace("-", "_"), schema())
    known = f"Options are {', '.join(options)}."
    instead = f"Write {keys[0]}={value or '…'}: keys of a recipe have no dashes." if keys else known
    return CommandLineError(text, "there is no such option.", instead)


def _find_leaves(word: str, node: DictConfig) -> list[str]:
    """Find keys of the schema whose last name, or whole name, is `word`, or else resembles it."""
    keys = [key for key, _ in flatten_keys(OmegaConf.to_container(node))]
    found = [key for key in keys if word in (key, key.rpartition(".")[2])]
    names = {key.rpartition(".")[2] for key in keys}
    near = difflib.get_close_matches(word, sorted(names), n=1, cutoff=0.8)
    return found or [key for key in keys if key.rpartition(".")[2] in near]


def _no_such_choice(error: MissingConfigException) -> RecipeError:
    missing = str(error.missing_cfg_file)
    group, _, choice = (
        missing.partition("/") if missing.startswith("recipe/") else missing.rpartition("/")
    )
    options = sorted(recipe_names() if group == "recipe" else error.options or ())
    if group == "recipe" and is_path(choice):
        return RecipeError(
            "recipe", f"there is no file {choice}.", "A path is relative to the working directory."
        )
    known = f"There is: {', '.join(options)}." if options else ""
    instead = f"{find_near(choice, options)} {known}".strip()
    return RecipeError(group or choice, f"there is no {group or 'file'} {choice!r}.", instead)


def _bad_key(error: OmegaConfBaseException, schema: DictConfig) -> RecipeError:
    key = str(error.full_key or error.key or "")
    kind = error.object_type
    if kind in _ENTRIES and "." not in key:  # which OmegaConf does not place
        return _bad_entry(kind, key, error)
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        return unknown_key(key, schema)
    reason = str(error.msg or error).splitlines()[0].rstrip(".")
    if not key:
        return _no_mapping(reason, schema)
    if reason == "list index out of range":
        named, _, number = key.rstrip("]").rpartition("[")
        instead = f"Write '{named}=[…]', or {named} in the recipe."
        return RecipeError(f"{named}.{number}", f"{named} has no such entry.", instead)
    if isinstance(error, InterpolationResolutionError):
        return _bad_reference(key, reason)
    if OmegaConf.is_dict(OmegaConf.select(schema, key)):
        return no_mapping(key, schema)
    if OmegaConf.is_list(OmegaConf.select(schema, key)):
        given = error.value if isinstance(error.value, str | int | float) else "…"
        entry = "" if "not Optional" in reason else given
        return RecipeError(key, "a list stands here.", f"Write '{key}=[{entry}]'.")
    if "not Optional" in reason:
        return _null(key, schema)
    return RecipeError(key, f"{reason}.", describe_key(key, schema))


def _bad_reference(key: str, reason: str) -> RecipeError:
    if name := re.search(r"Environment variable '(\w+)'", reason):
        instead = f"export {name[1]}=…, or write ${{oc.env:{name[1]},default}}."
        return RecipeError(key, f"the environment variable {name[1]} is not set.", instead)
    instead = "${a.b} stands for the value of another key of the recipe."
    return RecipeError(key, f"{reason}.", instead)


def _null(key: str, schema: DictConfig) -> RecipeError:
    """The error of a null where the key has a type without one."""
    default = OmegaConf.select(schema, key)
    instead = describe_key(key, schema)
    if default in (0, "") and default is not False:  # what stands for none
        shown = json.dumps(default) if default != "" else ""
        instead = f"Write {key}={shown}, the default, which stands for none."
    return RecipeError(key, "null cannot stand here.", instead)


def _bad_entry(kind: type, key: str, error: OmegaConfBaseException) -> RecipeError:
    where, known = _ENTRIES[kind], [each.name for each in fields(kind)]
    if key not in known:
        return RecipeError(where, f"an entry of it has no key {key!r}.", did_you_mean(key, known))
    reason = str(error.msg or error).splitlines()[0].rstrip(".")
    return RecipeError(where, f"{key!r} of an entry: {reason}.")


def _no_mapping(reason: str, schema: DictConfig) -> RecipeError:
    """Make the error of a value that stands where keys are expected.  OmegaConf reports the class
    of the mapping, not its key.
    """
    for key, node in _mappings(schema):
        kind = OmegaConf.get_type(node)
        if kind is not None and f"subclass of {kind.__name__}." in reason:
            return no_mapping(key, schema)
    return RecipeError(
        "recipe",
        f"a file of this recipe is not a mapping of keys: {reason}.",
        describe_key("", schema),
    )


def _mappings(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, DictConfig]]:
    for key in map(str, node):
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            yield f"{prefix}{key}", child
            yield from _mappings(child, f"{prefix}{key}.")


def no_mapping(key: str, schema: DictConfig) -> RecipeError:
    """A key whose value does not hold the keys that are expected there."""
    return RecipeError(key, "only a mapping of keys can stand here.", describe_key(key, schema))


# keys that recipes of an earlier flowrun may have -> why they went, and what to write instead
REMOVED_KEYS: Mapping[str, tuple[str, str]] = {
    "engine.cuda_graphs": (
        "CUDA graphs were removed: GPT-2 124M on an H200 took 79.4 ms a step with them and 67.8 ms"
        " without, and 11 GB more.",
        "Delete the key; engine.compiler=inductor fuses short ops.",
    )
}


def unknown_key(key: str, schema: DictConfig) -> RecipeError:
    """A key that the schema does not have, or no longer."""
    if key in REMOVED_KEYS:
        return RecipeError(key, *REMOVED_KEYS[key])
    parent, _, last = key.rpartition(".")
    node = OmegaConf.select(schema, parent) if parent else schema
    known = [str(k) for k in node] if isinstance(node, DictConfig) else []
    what = f"{parent!r} has no key {last!r}." if parent else f"a recipe has no key {last!r}."
    inside = [] if parent else _find_leaves(last, schema)[:3]
    if inside:
        return RecipeError(key, what, f"Did you mean {one_of(inside)}?")
    if key == "optim._target_":  # of a mapping on the command line
        instead = "Write each by itself: optim._target_=my_optim.lion optim.lr=0.001."
        return RecipeError(key, what, instead)
    if parent == "optim" and not find_near(last, known):
        instead = "Arguments of an optimizer stand next to optim._target_: torch.optim.RMSprop."
        return RecipeError(key, what, instead)
    return RecipeError(key or "''", what, did_you_mean(last, known))


def describe_key(key: str, schema: DictConfig) -> str:
    """Describe what a key holds, by its default in the schema: "An integer, such as 100."."""
    default: Any = OmegaConf.select(schema, key) if key else schema
    if OmegaConf.is_dict(default):
        return (
            f"Write a mapping with the keys {', '.join(map(str, default))}."
            if len(default)
            else "Write a mapping."
        )
    kind = KINDS.get(type(default)) if default is not None else None
    if kind == "an integer" and default == 0:  # 0 stands for none, which is no example
        return "Write an integer, in digits alone."
    if kind == "true or false":
        return f"Write {kind}."
    return f"Write {kind}, such as {default}." if kind and default != "" else ""


def _other(error: Exception) -> RecipeError:
    text = " ".join(str(error).split())
    if "--multirun" in text:
        where = text.partition("'")[2].partition("'")[0] or text
        return CommandLineError(
            where,
            "this key has several values, but the command starts one run.",
            "Add -m to run one job for each value; write a list as key=[a,b].",
        )
    if gone := re.search(r"Could not delete from config\. '([^']+)'", text):
        problem = "there is nothing to delete: no such key is there, or it is null."
        return CommandLineError(f"~{gone[1]}", problem)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # of a recipe or a choice
        return RecipeError(
            GROUP, "a word of the command line or the recipe is too long for a name."
        )
    if isinstance(error, OSError) and error.strerror:  # Hydra reads recipes and writes the folder
        small = error.errno == errno.EFBIG
        instead = "Raise the limit in this shell or job: ulimit -f unlimited." if small else ""
        return PlacedError(
            str(error.filename or "the run's folder"), "", f"{error.strerror}.", instead
        )
    if isinstance(error, RecursionError):
        return RecipeError(GROUP, "its keys are nested too deeply, or refer to themselves.")
    known = isinstance(error, HydraException)
    said = text if known else f"{type(error).__name__}: {text}"
    return RecipeError(GROUP, said if len(said) <= 400 else f"{said[:397]}…")


def explain(error: FlowrunError, overrides: list[str], config_dir: str | None = None) -> str:
    """Write an error as the user sees it: the place and what stands there, then the facts, then
    what to write instead.

    overrides, config_dir: the words of the command line, to find the place of a key.
    """
    lines = [line for text in (error.problem, error.instead) for line in text.splitlines() if line]
    return _ENDLESS.sub(r"\1…", "\n  ".join([_first_line(error, overrides, config_dir), *lines]))


def _first_line(error: FlowrunError, overrides: list[str], config_dir: str | None) -> str:
    if isinstance(error, PlacedError):
        return f"{error.place}  {error.where}".rstrip()
    place = locate(error.where, overrides, config_dir) if isinstance(error, RecipeError) else None
    if place is None:
        return error.where
    value = f" = {place.value}" if place.value is not None else ""
    return f"{place}  {error.where}{value}"
