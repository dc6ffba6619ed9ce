"""Recipes as Hydra's config group `recipe`: any folder of YAML files, or one file by its path.

Hydra asks its config sources, in order, for "recipe/<name>".  Each folder of recipes is one source
(scheme recipe://); the last one answers for paths.  A recipe needs no `# @package` line, and groups
that it leaves out are filled in here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import cast

import hydra
import yaml  # type: ignore[import-untyped]
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flowrun.engine.errors import RecipeError
from flowrun.launcher.recipe.key_schema import schema
from flowrun.launcher.recipe.schema import ARGUMENTS, TARGET

CONFIG_MODULE, CONFIG_NAME = "flowrun.conf", "config"
# what Hydra, OmegaConf and YAML raise of a recipe that is wrong, and of files they cannot read
COMPOSING_ERRORS = (
    *(RecipeError, HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ImportError),
    *(ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError),
)
GROUP = "recipe"
FOLDERS = "FLOWRUN_RECIPES"  # environment variable: more folders of recipes, separated as in PATH
# The recipe of a command line that names none: empty, so that -m can sweep recipes and groups alone
# can run.
NONE = "none"
MOST_LEVELS = 50  # of keys in keys; each takes some twenty frames of Python's stack
CONF = Path(__file__).resolve().parents[2] / "conf"
_BASE_60 = re.compile(r"[-+]?[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_PLACES = re.compile(r"hydra\.(run|sweep|job)\.")
LEFT_OUT = {
    "model": None,
    "data": None,
    "optim": "adamw",
    "launch": "local",
    "hardware": "cpu",
    "parallel": "manual",
}
NAMED = ("optim", "launch", "hardware")  # groups whose files say their own name


def recipe_folders() -> list[Path]:
    """List the folders that are searched for recipes, in order: ./recipes, those of
    $FLOWRUN_RECIPES, and the recipes that come with flowrun.
    """
    named = filter(None, os.environ.get(FOLDERS, "").split(os.pathsep))
    own = [Path(folder).expanduser() for folder in named]
    shipped = Path(__file__).resolve().parents[2] / "recipes"
    candidates = [Path("recipes"), *own, shipped]
    found = {folder.resolve(): folder for folder in reversed(candidates) if folder.is_dir()}
    return list(reversed(found.values()))


def recipe_file(name: str) -> Path | None:
    """The file that `recipe=name` means: a name in a folder, or a path; None if there is none."""
    if is_path(name):
        path = Path(name).expanduser()
        return path if path.is_file() else None
    files = (folder / f"{name}.yaml" for folder in recipe_folders())
    return next((file for file in files if file.is_file()), None)


def is_path(name: str) -> bool:
    """True if `recipe=name` names a file and not one of the recipes."""
    return name.endswith((".yaml", ".yml"))


def may_choose_mode(overrides: Iterable[str]) -> bool:
    """False if it is certain that neither arguments nor their recipe set hydra.mode."""
    chosen = {key.lstrip("+"): value for key, _, value in (o.partition("=") for o in overrides)}
    if any(key.startswith("hydra") and not _PLACES.match(key) for key in chosen):
        return True
    file = recipe_file(chosen.get(GROUP, "").strip("'"))
    # a recipe may begin with another one
    return not file or bool(re.search(f"hydra|{GROUP}", file.read_text(errors="replace")))


def is_resolved(file: Path, sections: Iterable[str]) -> bool:
    """True of a recipe that says all sections itself and chooses no group."""
    config = OmegaConf.load(file)
    return "defaults" not in config and all(section in config for section in sections)


def recipe_names() -> dict[str, Path]:
    """Every recipe by name, sorted."""
    files = [file for folder in reversed(recipe_folders()) for file in folder.glob("*.yaml")]
    return dict(sorted({file.stem: file for file in files}.items()))


def describe(file: Path) -> str:
    """The one-line description of a recipe: its first comment line."""
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return next((line.lstrip("# ") for line in lines if line.startswith("#")), "")


class RecipeSource(ConfigSource):
    """The group `recipe`, over every folder of recipe_folders() and every path to a file."""

    @staticmethod
    def scheme() -> str:
        return "recipe"

    def load_config(self, config_path: str) -> ConfigResult:
        file = _file(config_path)
        if file is None and config_path != f"{GROUP}/{NONE}":
            raise ConfigLoadError(f"there is no recipe {config_path}")
        config = _read(file) if file is not None else OmegaConf.create({})
        if not isinstance(config, DictConfig):
            raise RecipeError(
                GROUP,
                f"{file} does not hold a mapping of keys.",
                "Write key: value, such as train: {steps: 100}.",
            )
        config = _with_groups(config, file.stem if file is not None else "")
        return ConfigResult(
            config=config,
            path=self.full_path(),
            provider=self.provider,
            header={"package": "_global_"},
        )

    def is_group(self, config_path: str) -> bool:
        return config_path == GROUP

    def is_config(self, config_path: str) -> bool:
        return _file(config_path) is not None or config_path == f"{GROUP}/{NONE}"

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return list(recipe_names()) if config_path == GROUP else []


def _with_arguments(
    usual: Callable[[ConfigSource, str], ConfigResult],
) -> Callable[[ConfigSource, str], ConfigResult]:
    """Let a file of the user's own group `optim` name its update by _target_."""

    @functools.wraps(usual)
    def load_config(self: ConfigSource, config_path: str) -> ConfigResult:
        found = usual(self, config_path)
        config = found.config
        of_optim = config_path.rpartition("/")[0] == "optim"
        if of_optim and isinstance(config, DictConfig) and TARGET in config:
            beneath = {"defaults": config.pop("defaults")} if "defaults" in config else {}
            take_arguments(tree := OmegaConf.create({"optim": config}))
            found.config = OmegaConf.create({**beneath, **tree.optim})
        return found

    return load_config


class RecipeSearchPath(SearchPathPlugin):
    """Puts the recipes behind flowrun's own groups on Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="recipes", path="recipe://")


def register() -> None:
    """Make Hydra know the schema and the recipes; once is enough, more does no harm."""
    ConfigStore.instance().store(name="schema", node=schema())
    sources = cast("list[type[ConfigSource]]", Plugins.instance().discover(ConfigSource))
    [files] = (kind for kind in sources if kind.scheme() == "file")
    if not hasattr(files.load_config, "__wrapped__"):
        files.load_config = _with_arguments(files.load_config)  # type: ignore[method-assign, assignment]
    Plugins.instance().register(RecipeSource)
    Plugins.instance().register(RecipeSearchPath)


@contextlib.contextmanager
def open_hydra() -> Iterator[GlobalHydra]:
    """Start Hydra.  Inside a job of hydra.main its own is set aside: there is one at a time."""
    register()
    opened = GlobalHydra.instance()
    held, opened.hydra = opened.hydra, None
    try:
        with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3", job_name="flowrun"):
            yield opened
    finally:
        opened.hydra = held


def search_path(config_dir: str | None) -> list[str]:
    """Return the argument by which Hydra searches a folder of the user's own groups first."""
    return [f"hydra.searchpath=['file://{Path(config_dir).absolute()}']"] if config_dir else []


def _read(file: Path) -> DictConfig | ListConfig:
    try:
        _check_text(file)
        return OmegaConf.load(file)
    except UnicodeDecodeError as error:
        raise RecipeError(
            GROUP,
            f"{file} is not text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}.",
            "Save it in UTF-8.",
        ) from error


def _check_text(file: Path) -> None:
    """Refuse what YAML 1.1 reads as a number in base 60, 1:30 as 90, which nobody means, and deeper
    keys than every reader of the recipe follows.  Raises RecipeError.
    """
    level = 0
    with contextlib.suppress(yaml.YAMLError):  # which is said where the file is parsed
        for event in yaml.parse(file.read_text(encoding="utf-8")):
            line = event.start_mark.line + 1
            level += isinstance(event, yaml.CollectionStartEvent)
            level -= isinstance(event, yaml.CollectionEndEvent)
            if level > MOST_LEVELS:
                deep = f"its keys are nested too deeply: more than {MOST_LEVELS} levels."
                raise RecipeError(GROUP, f"{file}:{line}: {deep}")
            plain = isinstance(event, yaml.ScalarEvent) and not event.style
            if plain and _BASE_60.fullmatch(event.value):
                raise RecipeError(
                    GROUP,
                    f"{file}:{line}: {event.value} is a number in base 60 in YAML.",
                    f'Write it in quotes: "{event.value}".',
                )


def _file(config_path: str) -> Path | None:
    group, _, name = config_path.partition("/")
    return recipe_file(name) if group == GROUP and name else None


def _with_groups(config: DictConfig, name: str) -> DictConfig:
    """The recipe with its name, and with the groups that it leaves out, unless it builds on another
    recipe.
    """
    config.setdefault("name", name)
    own_optimizer = take_arguments(config)
    if not isinstance(config.get("defaults") or ListConfig([]), ListConfig):
        raise RecipeError(
            "defaults",
            "defaults must be a list.",
            "Write defaults: [/model: gpt_tiny, /data: text].",
        )
    defaults = take_defaults(config)
    named = {group_of(entry) for entry in defaults}
    if own_optimizer and not named & {GROUP, "optim"}:  # no file of numbers lies beneath
        choose(defaults, "optim", None)
        named.add("optim")
        if "lr" not in config.optim:
            problem = f"nothing says the rate of {config.optim['update'][TARGET]}."
            raise RecipeError("optim.lr", problem, "Write lr: 1e-3 next to _target_.")
    if GROUP not in named:
        defaults = [
            {f"/{group}": choice} for group, choice in LEFT_OUT.items() if group not in named
        ] + defaults
    config["defaults"] = ListConfig(defaults)
    return config


def take_arguments(config: DictConfig) -> bool:
    """Let what stands next to optim._target_ be its arguments, but for the keys of any optimizer;
    return whether there is one.
    """
    tree = cast("dict[str, object]", OmegaConf.to_container(config)).get("optim")
    if not isinstance(tree, dict) or TARGET not in tree:
        return False
    own = {*ARGUMENTS, "name", "update"}
    given = {key: value for key, value in tree.items() if key in own or key not in schema().optim}
    config["optim"] = {key: value for key, value in tree.items() if key not in given}
    config["optim"]["update"] = given
    return True


def take_defaults(config: DictConfig) -> list[object]:
    """Take the defaults list out of a recipe, and the names of sections, as choices of the list.
    Beneath a section that says all its keys, as the recipe.yaml of a run does, lies no file.
    """
    tree = cast("dict[str, object]", OmegaConf.to_container(config))  # nothing is looked up yet
    defaults = cast("list[object]", tree.get("defaults") or [])
    config.pop("defaults", None)
    for group in NAMED:
        section = tree.get(group)
        if isinstance(section, dict) and schema()[group].keys() <= section.keys():
            choose(defaults, group, None)
        elif isinstance(section, dict) and is_choice(group, section.get("name")):
            del config[group]["name"]
            choose(defaults, group, section["name"])
    return defaults


def choose(defaults: list[object], group: str, choice: object) -> None:
    """Let a choice take the place of the recipe's own, or of the recipe's that it builds on."""
    groups = [group_of(entry) for entry in defaults]
    place, word = groups.index(group) if group in groups else 0, f"/{group}"
    if GROUP in groups:
        place, word = len(defaults), f"override /{group}"
    defaults[:] = [entry for entry in defaults if group_of(entry) != group]
    defaults.insert(place, {word: choice})


def is_choice(group: str, name: object) -> bool:
    """True if a group that comes with flowrun has a file of this name."""
    return (CONF / group / f"{name}.yaml").is_file()


def group_of(entry: object) -> str:
    """The group that an entry of a defaults list chooses from: {"override /optim": "sgd"} ->
    "optim"; a bare name -> "recipe".
    """
    if isinstance(entry, dict | DictConfig):
        return str(next(iter(entry))).split()[-1].partition("@")[0].lstrip("/")
    name = str(entry)
    return "_self_" if name == "_self_" else name.lstrip("/").rpartition("/")[0] or GROUP
