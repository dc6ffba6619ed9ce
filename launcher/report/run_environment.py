"""run_environment: what a run runs on, for environment.json in its folder."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version

from flowrun.launcher.job.job import Job

_GIT_S = 2.0  # a repository on a slow disk holds up no run


def describe_environment(job: Job) -> Mapping[str, str]:
    """Return versions, host, cores, device, and the commit of a working directory that has one."""
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "host": platform.node(),
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
        "device": job.device_type,
        "python": platform.python_version(),
        **{package: version(package) for package in ("flowrun", "torch")},
        **_find_commit(),
    }


def _find_commit() -> dict[str, str]:
    """Return the commit that is checked out here; nothing outside of a repository."""
    command = ("git", "rev-parse", "--verify", "--quiet", "HEAD")
    with suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S)
        return {"commit": found.stdout.strip()} if found.stdout else {}
    return {}
