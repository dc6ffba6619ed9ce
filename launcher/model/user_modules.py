"""user_modules: the user's code imports from the working directory, and nobody else.

Were the working directory in `sys.path`, as for a script, torch would take a folder `triton/` for
the library of that name, which it looks for.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, FrameType, ModuleType

from flowrun.engine.ir.user_code import is_installed

FOLDERS: list[str] = []  # the working directory, and earlier ones of this process
_HIDDEN: dict[str, tuple[str, str]] = {}  # name -> the user's file, an installed one
_HOUSE = [str(Path(__file__).parents[2] / name) for name in ("engine", "launcher", "models")]
_OURS = re.compile("|".join(re.escape(folder + os.sep) for folder in _HOUSE))
_PYTHON = ("<frozen", sysconfig.get_path("stdlib") + os.sep)


class _UserFinder:
    """A finder of top-level modules in FOLDERS, for code that means the user's.

    A module goes before an installed one of its name, as for a script; a folder without
    __init__.py goes behind it.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the user's module, as importlib asks for it; `path` is of a package's parts."""
        found = None if path is not None else PathFinder.find_spec(name, FOLDERS)
        if found is None or not _means_users(name, inspect.currentframe(), found.loader is None):
            return None
        other = PathFinder.find_spec(name)
        if other is None or other.origin is None:
            return found
        if found.loader is not None:
            _HIDDEN[name] = (str(found.origin), other.origin)
        return found if found.loader is not None else None


_FINDER = _UserFinder()


def make_importable(folder: str) -> None:
    """Let recipes and the user's files import what lies in a folder."""
    if folder not in FOLDERS:
        FOLDERS.insert(0, folder)
        sys.meta_path[:] = [_FINDER, *(each for each in sys.meta_path if each is not _FINDER)]
        sys.path[:] = [each for each in sys.path if os.path.abspath(each) != folder]
        importlib.invalidate_caches()


def note_hidden() -> list[str]:
    """Note each module of the user's that takes the place of an installed one."""
    text = "module {} is {}, which hides the installed one ({})"
    return [text.format(name, os.path.relpath(file), far) for name, (file, far) in _HIDDEN.items()]


def describe_file(module: object) -> str:
    """Say in a message that a module is not the file or folder of its name in the working
    directory; "" for any other module.
    """
    name = getattr(module, "__name__", "")
    file = getattr(module, "__file__", None) or "built into Python"
    mine = next((each for each in (f"{name}.py", name) if name and Path(each).exists()), None)
    if not mine or Path(file).is_relative_to(Path(mine).absolute()):
        return ""
    return f" ({file}, not {mine} of this folder, which needs another name)"


def _means_users(name: str, frame: FrameType | None, is_folder: bool) -> bool:
    """Return whether code that imports a module means the user's.

    A library means it if it is given the name, as pickle and Hydra are.  frame: of the finder.
    is_folder: without __init__.py, which the user's code and a recipe import alone.
    """
    asks, frame = False, frame and frame.f_back
    while frame and frame.f_code.co_filename.startswith(("<frozen importlib", importlib.__file__)):
        asks, frame = asks or frame.f_code.co_name == "find_spec", frame.f_back
    if frame is None:
        return True
    file, writes = frame.f_code.co_filename, _writes(name, frame.f_code)
    if _OURS.match(file):
        return not writes
    return not (file.startswith(_PYTHON) or is_installed(file)) or not (is_folder or asks or writes)


def _writes(name: str, code: CodeType) -> bool:
    """Return whether code has the name of a module, or of a part of it, in its text."""
    words = (*code.co_names, *code.co_consts)
    return any(isinstance(word, str) and f"{word}.".startswith(f"{name}.") for word in words)
