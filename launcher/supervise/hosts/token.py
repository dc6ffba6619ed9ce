"""The secret of a run's hosts: FLOWRUN_TOKEN, or a file of the run's folder that the first makes;
and the name of a folder, by which hosts know that they see the same one.

Who does not know it is not let in (channel.py).  Hosts of a batch system have the variable, or the
folder; hosts without a common folder need the variable.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.files import replacing

TOKEN = "FLOWRUN_TOKEN"  # in the environment of each host
FILE, NAME = ".token", ".name"


def make_token(folder: Path) -> str:
    """Return the token of the hub's host: the variable, or what the folder has, made if it has
    none.  Raises RecipeError, OSError.
    """
    return find_token(folder) or _make(folder, FILE) or find_token(folder)


def name_folder(folder: Path) -> str:
    """Return the name of a run's folder, on all hosts that see it; make it if it has none.  Raises
    OSError.
    """
    file = folder / NAME
    if not file.exists():
        _make(folder, NAME)
    return file.read_text()


def _make(folder: Path, name: str) -> str:
    """Make a file with a random text; return that, or "" where another was faster."""
    folder.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(16)
    made = folder / f"{name}.{secrets.token_hex(4)}"
    with replacing(made, 0o600) as file:
        file.write(token.encode())
    try:
        os.link(made, folder / name)  # whole, or not there
    except FileExistsError:
        return ""
    finally:
        made.unlink()
    return token


def find_token(folder: Path) -> str:
    """Return the variable, or what the run's folder has; empty where there is neither.  Raises
    RecipeError for a file that others could have written or read.
    """
    if token := os.environ.get(TOKEN, ""):
        return token
    file = folder / FILE
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return ""
    with open(handle, "rb") as opened:
        about = os.fstat(handle)
        if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
            raise RecipeError(
                "hydra.run.dir",
                f"others can read {file}, the secret of this run's hosts.",
                f"Remove it, or give every host the same {TOKEN}.",
            )
        return opened.read(256).decode()
