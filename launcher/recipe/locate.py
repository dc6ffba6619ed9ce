"""Dotted key -> where it was written: a file with line and column, or the command line.

Used only to show an error.  Hydra lists the files that took part, the later the stronger.  Keys may
hold dots themselves (`sbp.blocks.*.attn.qkv.weight.tensor`), so every way to cut a key is tried.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from hydra.types import RunMode

from flowrun.launcher.recipe import hydra_source

COMMAND_LINE = "command line"
# 3e-4 is a number to Hydra, a text to YAML 1.1
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_UNREADABLE = (yaml.YAMLError, RecursionError, ValueError)  # a date may be none


@dataclass(frozen=True, slots=True)
class FilePosition:
    """source: a file, shown relative to the working directory, or "command line".  line, column:
    from 1; 0 where there are none.

    key: as much of the wanted key as stands there.  value: as it is written, shortened, with what
    the command line sets inside of it; None for an enclosing key.  changes: the arguments that do.
    """

    source: str
    line: int
    column: int
    key: str
    value: str | None
    changes: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = f"{self.source}:{self.line}:{self.column}" if self.line else self.source
        if self.changes:
            own = [] if place == COMMAND_LINE else [place]
            return ", ".join([*own, f"{COMMAND_LINE} {' '.join(self.changes)}"])
        return place


def locate(key: str, overrides: list[str], config_dir: str | None = None) -> FilePosition | None:
    """Find where the value of `key` comes from: one of the `overrides` of the command line, else
    the file that sets it last, else the file that could set it.

    A key of which no file has even a part is placed in the recipe, without a line.
    """
    if found := _on_command_line(key, overrides):
        return _with_changes(found, None, overrides)
    nearest: FilePosition | None = None
    for file, package in _files(overrides, config_dir):
        place = _in_file(key, file, package, overrides) or FilePosition(
            show_path(file), 0, 0, "", None
        )
        if place.value is not None:
            return place
        if nearest is None or len(place.key) > len(nearest.key):
            nearest = place
    return _below_on_command_line(key, overrides) or nearest


def _files(overrides: list[str], config_dir: str | None) -> Iterator[tuple[Path, str]]:
    """Yield the files that take part, strongest first, each with the key that its contents stand
    under ("" = top); where Hydra cannot list them, the recipe alone.
    """
    choices = [text for text in overrides if "." not in text.partition("=")[0]]
    recipes = [text.partition("=")[2].strip("'") for text in choices if text.startswith("recipe=")]
    try:
        with hydra_source.open_hydra() as opened:
            arguments = [*choices, *hydra_source.search_path(config_dir)]
            listed = opened.config_loader().compute_defaults_list(
                hydra_source.CONFIG_NAME, arguments, RunMode.RUN
            )
        taking_part = [(each.config_path, each.package) for each in reversed(listed.defaults[:-1])]
    except hydra_source.COMPOSING_ERRORS:
        taking_part = [(f"{hydra_source.GROUP}/{name}", "") for name in recipes]
    # a recipe that sets nothing of a key could set it
    taking_part.append((hydra_source.CONFIG_NAME, ""))
    for path, package in taking_part:
        if file := _file_of(str(path), config_dir):
            yield file, package or ""


def _file_of(path: str, config_dir: str | None) -> Path | None:
    """Return the file that Hydra calls GROUP/NAME; None if it is none of ours."""
    group, _, name = path.partition("/")
    if group == hydra_source.GROUP:
        return hydra_source.recipe_file(name)
    folders = [*([Path(config_dir)] if config_dir else []), hydra_source.CONF]
    files = (folder / f"{path}.yaml" for folder in folders)
    return next((file for file in files if file.is_file()), None)


def _read(file: Path) -> str:
    """The text of a file, which may be what the error is about: bytes that are no text stay in."""
    return file.read_text(encoding="utf-8", errors="replace")


def _in_file(key: str, file: Path, package: str, overrides: list[str]) -> FilePosition | None:
    """Find the key, or the longest part of it, in a file."""
    if package and not (key == package or key.startswith(f"{package}.")):
        return None
    inside = key[len(package) :].lstrip(".")
    try:
        root = yaml.compose(_read(file), Loader=yaml.SafeLoader)
    except _UNREADABLE:
        return None
    if root is None:
        return None
    rest, node, at = _descend(inside, root, root)
    found = key[: len(key) - len(rest)].rstrip(".")
    if rest and (choice := _in_defaults(key, root)):
        found, rest, node = key, "", choice
    if not found:
        return None
    mark = (node if not rest else at).start_mark
    place = FilePosition(
        show_path(file), mark.line + 1, mark.column + 1, found, None if rest else _show(node)
    )
    return place if rest else _with_changes(place, node, overrides)


def _with_changes(
    place: FilePosition, node: yaml.Node | None, overrides: list[str]
) -> FilePosition:
    """The place of a mapping, with what the command line sets inside of it."""
    changes = [
        (name[len(place.key) + 1 :], value, f"{name}={value}")
        for name, equals, value in (text.lstrip("+").partition("=") for text in overrides)
        if equals and name.startswith(f"{place.key}.")
    ]
    if not changes:
        return place
    shown = place.value
    if isinstance(node, yaml.MappingNode):
        tree = yaml.safe_load(yaml.serialize(node, Dumper=yaml.SafeDumper))
        for name, value, _ in changes:
            _set(tree, name, value)
        shown = _flow(tree)
    return replace(place, value=shown, changes=tuple(_shorten(text) for *_, text in changes))


def _set(tree: object, key: str, value: str) -> None:
    """Set a dotted key of nested mappings, where all on the way to it is one."""
    *around, last = key.split(".")
    for name in around:
        tree = tree.setdefault(name, {}) if isinstance(tree, dict) else None
    if isinstance(tree, dict):
        try:
            tree[last] = yaml.safe_load(value)
        except yaml.YAMLError:
            tree[last] = value


def _in_defaults(group: str, root: yaml.Node) -> yaml.Node | None:
    """The choice that a file's defaults list makes of a group."""
    listed = next((child for name, child, _ in _children(root) if name == "defaults"), root)
    for _, entry, _ in _children(listed):
        for name, choice, _ in _children(entry):
            if (
                isinstance(choice, yaml.ScalarNode)
                and hydra_source.group_of({name: choice.value}) == group
            ):
                return choice
    return None


def _descend(key: str, node: yaml.Node, at: yaml.Node) -> tuple[str, yaml.Node, yaml.Node]:
    """(what is left of the key, the deepest node reached, the node of its name), over every way to
    cut the key at its dots.
    """
    best = (key, node, at)
    if not key:
        return best
    for name, child, name_node in _children(node):
        if key == name or key.startswith(f"{name}."):
            found = _descend(key[len(name) + 1 :], child, name_node)
            if len(found[0]) < len(best[0]):
                best = found
    return best


def _children(node: yaml.Node) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        yield from ((str(name.value), child, name) for name, child in node.value)
    elif isinstance(node, yaml.SequenceNode):
        yield from ((str(index), child, child) for index, child in enumerate(node.value))


def _show(node: yaml.Node) -> str:
    """The value as one would type it: text in quotes, the rest in YAML's flow style."""
    if isinstance(node, yaml.ScalarNode):
        is_text = node.tag.endswith(":str") and not _NUMBER.fullmatch(node.value)
        return f'"{node.value}"' if is_text else (node.value or "null")
    text = yaml.serialize(node, Dumper=yaml.SafeDumper, width=10_000)
    return _flow(yaml.safe_load(text))


def _flow(tree: object) -> str:
    """Write a tree in YAML's flow style, shortened."""
    flow = yaml.safe_dump(tree, default_flow_style=True, width=10_000, sort_keys=False)
    return _shorten(flow.strip())


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}…"


def _on_command_line(key: str, overrides: list[str]) -> FilePosition | None:
    """The last argument that sets the key, or a mapping that holds it."""
    for text in reversed(overrides):
        name, equals, value = text.lstrip("+~").partition("=")
        if not equals:
            continue
        if key == name:
            return FilePosition(COMMAND_LINE, 0, 0, key, value)
        if key.startswith(f"{name}.") and value[:1] in ("{", "["):
            tree = yaml.compose(value.replace(":", ": "), Loader=yaml.SafeLoader)
            rest, node, _ = _descend(key[len(name) + 1 :], tree, tree)
            if not rest:
                return FilePosition(COMMAND_LINE, 0, 0, key, _show(node))
    return None


def _below_on_command_line(key: str, overrides: list[str]) -> FilePosition | None:
    """An argument that sets something inside the key."""
    inside = (text for text in overrides if text.lstrip("+~").startswith(f"{key}."))
    return next((FilePosition(COMMAND_LINE, 0, 0, key, None) for _ in inside), None)


def show_path(file: str | Path) -> str:
    """Relative to the working directory if the file is inside it."""
    relative = os.path.relpath(file)
    return str(file) if relative.startswith("..") else relative
