"""A watch over one rank of a small plan, whose ways out a test takes."""

from pathlib import Path
from typing import Any

from flowrun.engine.runtime.drivers.pulse import Pulses
from flowrun.engine.runtime.process.stacks import Stacks
from flowrun.launcher.supervise.hands.watch import Watch
from support.plans.unit_pipeline import unit_plan


def unit_watch(folder: Path, **given: Any) -> Watch:
    """Return a watch that writes into `folder`.  given: fields of Watch that differ."""
    usual: dict[str, Any] = {"say": print, "fail": print, "compares": False, "grows": False}
    usual |= {"pulses": Pulses([unit_plan(2, 2, "1f1b")], 1), "stacks": Stacks(1)}
    return Watch(**(usual | {"folder": lambda: folder, "host_of": str} | given))
