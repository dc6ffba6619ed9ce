"""user_code: the lines of a traceback that are the user's own, as a person is shown them."""

from __future__ import annotations

import concurrent.futures
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType

import torch

_PACKAGES = sysconfig.get_path("purelib") + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_ENGINE = tuple(str(Path(__file__).parents[2] / name) + os.sep for name in ("engine", "launcher"))
_PYTHON = sysconfig.get_path("stdlib") + os.sep

_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_READERS = str(Path(concurrent.futures.__file__).parent) + os.sep
_OURS = ("<", str(Path(__file__).parents[2]) + os.sep, _TORCH, _READERS)  # a thread's error, too


def is_users(file: str) -> bool:
    """False for torch's files, Python's own, and those of flowrun but for its models; a library of
    models (transformers) counts as the user's.
    """
    if file.startswith(("<", _TORCH, *_ENGINE)):
        return False
    return file.startswith(_PACKAGES) or not file.startswith(_PYTHON)


def is_installed(file: str) -> bool:
    """Return whether a file is of an installed package, torch among them."""
    return bool(_INSTALLED.search(file))


def place(frames: Iterable[traceback.FrameSummary]) -> str:
    """The last of the user's own frames, as "mod.py:41 in forward: return self.head(x)", or ""."""
    users = [frame for frame in frames if is_users(frame.filename)]
    if not users:
        return ""
    last = users[-1]
    line = f": {last.line}" if last.line else ""
    return f"{_relative(last.filename)}:{last.lineno} in {last.name}{line}"


def place_of(error: BaseException) -> str:
    """Return the place in the user's own code that raised an error; "" if none did."""
    return place(traceback.extract_tb(error.__traceback__))


def called_by(caller: FrameType, frame: FrameType) -> str:
    """Return which function of Python a frame calls within which `frame` runs; "" if it is both."""
    inner = None
    while frame is not caller and frame.f_back:
        inner, frame = frame, frame.f_back
    return f"{inner.f_globals['__name__']}.{inner.f_code.co_qualname}" if inner else ""


def user_lines(trace: TracebackType | None) -> list[str]:
    """Find the lines in files that are neither flowrun's nor torch's; the last line if none is."""
    frames = traceback.extract_tb(trace)
    users = [frame for frame in frames if not frame.filename.startswith(_OURS)] or frames[-1:]
    return [f"{os.path.relpath(f.filename)}:{f.lineno} in {f.name}: {f.line}" for f in users[-6:]]


def _relative(file: str) -> str:
    """Shorten a path: relative to the working directory if it lies below; from the package's name
    if it is installed, which is the same on every machine; else the whole path.
    """
    _, packages, inside = file.rpartition("site-packages/")
    if packages:
        return inside
    inside = os.path.relpath(file)
    return file if inside.startswith("..") else inside
