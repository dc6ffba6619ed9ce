"""The seat of this process among those that a platform started, before a job is composed: it
launches, or waits for the process of its host that does; and all hosts take one folder.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import typer

from flowrun.engine.errors import FlowrunError
from flowrun.launcher.command_line.app import load_recipe
from flowrun.launcher.platforms.platform import Platform, decide, read_platform
from flowrun.launcher.platforms.siblings import launch_for, wait_for_end
from flowrun.launcher.recipe.schema import Launch, nodes_of
from flowrun.launcher.supervise.hosts.token import TOKEN


def take_seat(words: Sequence[str], config_dir: str | None) -> list[str]:
    """Return in the process that launches; in the others wait, and leave with its status.

    What returns are words that give all hosts one folder, where `words` name none.
    """
    if (platform := read_platform(os.environ)) is None:
        return []
    asked = dict(text.partition("=")[::2] for text in words)
    seat = decide(platform, None, None, "")
    launch = Launch(name=asked.get("launch", "local"), nnodes=platform.hosts)
    if platform.processes > 1 or platform.hosts > 1:
        with suppress(FlowrunError):  # of a sweep; or the one that launches shows it
            recipe = load_recipe([*words], config_dir)
            launch = recipe.launch
            seat = recipe.seat if launch.name == "local" else seat
    if seat.waits:
        raise typer.Exit(wait_for_end(platform))
    if seat.others:
        launch_for(platform, seat.others)
    return _name_folders(platform, launch, asked)


def _name_folders(platform: Platform, launch: Launch, asked: Mapping[str, str]) -> list[str]:
    """Return words that name one folder for all hosts of the platform's job; set FLOWRUN_TOKEN to
    the platform's secret.  Hosts that train separately have folders of their own.
    """
    several = nodes_of(launch).most > 1
    if launch.name != "local" or (platform.hosts == 1 and not several):
        return []
    own = "" if several else f"_{platform.rank if platform.host is None else platform.host}"
    if (secret := _secret(platform)) and several and not os.environ.get(TOKEN):
        os.environ[TOKEN] = secret
    job = platform.job if platform.name != "torchrun" else ""  # whose port is used again
    job = hashlib.sha256(secret.encode()).hexdigest()[:12] if secret else job
    name = f"{platform.name.lower().replace(' ', '_')}/{job}{own}"
    names = {"hydra.run.dir": f"outputs/{name}_${{name}}", "hydra.sweep.dir": f"multirun/{name}"}
    return [f"{key}={value}" for key, value in names.items() if job and key not in asked]


def _secret(platform: Platform) -> str:
    """Return a secret that all hosts of the platform know, and nobody else; empty for none."""
    if platform.name != "torchrun" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return platform.secret
    import torch.distributed as dist

    connect: Any = dist.TCPStore  # type: ignore[attr-defined]  # torchrun's: who reaches it, reads it
    store = connect(platform.address, int(os.environ["MASTER_PORT"]), is_master=False)
    return str(store.compare_set(f"flowrun {platform.job}", "", secrets.token_hex(16)).decode())
