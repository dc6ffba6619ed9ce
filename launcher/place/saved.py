"""The recipe that won, as a small file: what the recipe said itself, and the chosen keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from flowrun.launcher.place.place import Placed
from flowrun.launcher.place.planner import without_own
from flowrun.launcher.recipe import hydra_source
from flowrun.launcher.recipe.compose import GROUPS, compose, spell
from flowrun.launcher.recipe.hardware_keys import choose_profile
from flowrun.launcher.terminal.units import seconds, size


def save(placed: Placed, overrides: list[str], file: Path) -> None:
    """Write to `file` a recipe that composes to the one that was placed.

    overrides: of the command line.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text(placed, overrides))


def text(placed: Placed, overrides: list[str]) -> str:
    """The file: what was foreseen as comments, then YAML."""
    changes = _list_changes(placed, overrides)
    if changes is None:
        return f"{_comments(placed)}{placed.recipe.to_yaml()}"
    written = yaml.safe_dump(changes, sort_keys=False, default_flow_style=None, width=100)
    return f"{_comments(placed)}{written}"


def _list_changes(placed: Placed, overrides: list[str]) -> dict[str, object] | None:
    """Return the keys of the small file; None where only the whole recipe is right."""
    parsed = OverridesParser.create().parse_overrides(spell(overrides))
    given = {override.key_or_group: override for override in parsed}
    named = given.pop(hydra_source.GROUP, None)
    file = hydra_source.recipe_file(str(named.value())) if named else None
    if file is not None and hydra_source.is_resolved(file, GROUPS):
        return None
    own = _own(file) if file else {}
    defaults = own.pop("defaults", [])
    for group in [group for group in hydra_source.LEFT_OUT if group in given]:
        hydra_source.choose(defaults, group, given.pop(group).value())
    tree = OmegaConf.create(own)
    _set_keys(tree, [override for override in parsed if override.key_or_group in given])
    if hydra_source.GROUP in map(hydra_source.group_of, defaults) and named:
        # a merge leaves its axes before the others
        before = compose([f"recipe={named.value()}"]).placement.axes
        axes = placed.keys["placement"]["axes"]
        if [*dict.fromkeys([*before, *axes])] != [*axes]:
            return None
    body = _merge_placed(tree, placed)
    return {"defaults": defaults, **body} if defaults else body


def _set_keys(tree: DictConfig, overrides: list[Override]) -> None:
    for override in overrides:
        if not override.key_or_group.startswith("hydra."):
            value = None if override.is_delete() else override.value()
            OmegaConf.update(tree, override.key_or_group, value, merge=True)


def _merge_placed(tree: DictConfig, placed: Placed) -> dict[str, object]:
    tree["auto"] = without_own(tree.get("auto") or {})
    if "axes" in tree.get("placement", {}):
        del tree.placement.axes  # a merge would leave its axes before the others
    if not tree["auto"]:
        del tree["auto"]
    return cast(dict[str, object], OmegaConf.to_container(OmegaConf.merge(tree, placed.keys)))


def _own(file: Path) -> dict[str, Any]:
    """Read the recipe's file; a recipe that it builds on stays named in its defaults."""
    config = cast(DictConfig, OmegaConf.load(file))
    defaults = hydra_source.take_defaults(config)
    found: Any = OmegaConf.to_container(config)
    found.setdefault("name", file.stem)
    found["defaults"] = [  # a recipe that is named by a path, by one that holds in any folder
        str((file.parent / entry).resolve())
        if isinstance(entry, str) and hydra_source.is_path(entry)
        else entry
        for entry in defaults
    ]
    return found  # type: ignore[no-any-return]


def _comments(placed: Placed) -> str:
    best, recipe = placed.best, placed.recipe
    lines = (
        f"{recipe.name} on {recipe.num_ranks} ranks, placed by auto.placement: {best.candidate}.",
        f"Foreseen on {choose_profile(recipe).name}: {seconds(best.step_s)} a step;"
        f" {size(best.bytes)} on rank {best.rank} (stage {best.stage}), which needs most;"
        f" {size(best.sent_bytes)} sent a step; bubble {max(0.0, best.bubble):.0%}.",
    )
    return "".join(f"# {line}\n" for line in lines)
