"""conf/suite + command line -> the suite, and the folder of its results.

Overrides that begin with `suite` or `hydra` are the suite's; all others go to every recipe, of
flowrun and of the peers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

from flowrun.engine.errors import RecipeError
from flowrun.launcher.bench import suite
from flowrun.launcher.bench.foreseen import published
from flowrun.launcher.bench.foreseen.published import Foreseen
from flowrun.launcher.bench.suite import Suite
from flowrun.launcher.recipe import hydra_source
from flowrun.launcher.recipe.hydra_source import COMPOSING_ERRORS, CONFIG_MODULE
from flowrun.launcher.recipe.recipe_errors import PlacedError, from_hydra

CONFIG_NAME = "bench"
_OURS = re.compile(r"[+~]*(suite|hydra)[.=/]")


def load_suite(
    arguments: list[str], config_dir: str | None = None
) -> tuple[Suite | Foreseen, Path]:
    """The suite that `suite=NAME suite.key=value key=value …` means, and the folder of its results.

    A suite of `kind: foreseen` runs nothing (foreseen/).  config_dir: a folder of the user's own
    groups (suite/, published/), searched first.  Raises RecipeError.
    """
    ours = [text for text in arguments if _OURS.match(text)]
    of_recipes = [text for text in arguments if text not in ours]
    # Hydra's sign for keys that the file leaves open (suite.experiments.mine.ranks)
    spelled = [f"++{text}" if text.startswith("suite.") else text for text in ours]
    if config_dir is not None:
        spelled.append(f"hydra.searchpath=['file://{Path(config_dir).absolute()}']")
    hydra_source.register()
    try:
        with hydra.initialize_config_module(
            CONFIG_MODULE, version_base="1.3", job_name=CONFIG_NAME
        ):
            cfg = hydra.compose(CONFIG_NAME, spelled, return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)  # which fills in the pattern of the folder
        with open_dict(cfg):
            folder = Path(str(cfg.hydra.run.dir))
    except COMPOSING_ERRORS as error:
        raise from_hydra(error, OmegaConf.create({"suite": {}})) from error
    tree: Any = OmegaConf.to_container(cfg.suite, resolve=True)
    parse = published.parse if tree.get("kind") == published.KIND else suite.parse
    try:
        return parse(tree, of_recipes), folder
    except RecipeError as error:
        if any(text.lstrip("+").partition("=")[0] == error.where for text in ours):
            raise
        place = f"suite {tree.get('name')}"  # its files are no part of the recipe
        raise PlacedError(place, error.where, error.problem, error.instead) from error


def list_suites() -> str:
    """Return the suites that come with flowrun, a line each."""
    folder = Path(__file__).resolve().parents[2] / "conf" / "suite"
    found: Any = {file.stem: OmegaConf.load(file) for file in sorted(folder.glob("*.yaml"))}
    notes = {name: suite.get("note") for name, suite in found.items()}
    return "\n".join(f"{name:<15} {note}" for name, note in notes.items() if note)
