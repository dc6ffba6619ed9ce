"""Cost of a step of Wide & Deep against the size of its tables: python tests/support/
wide_deep_steps.py [overrides].

CPU seconds of all ranks of the recipe on the virtual cluster, so that other programs on the machine
do not count; reading is part of it.  Median of the steps behind the first ten.
"""

import statistics
import sys
import time
from itertools import pairwise

from flowrun.engine.runtime.drivers.virtual import VirtualCluster
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load

SIZES = (100_000, 1_000_000, 10_000_000)


def step_ms(ids: int, *overrides: str, steps: int = 60) -> float:
    """Median CPU milliseconds of a step."""
    job = Job(load(["recipe=wide_deep", f"model.ids={ids}", *overrides]))
    ranks = VirtualCluster(job.training.plan, job.materials.sampler, job.materials.initial)
    times = []
    ranks.run(steps, lambda step, results: times.append(time.process_time()))
    return 1e3 * statistics.median(b - a for a, b in pairwise(times[10:]))


if __name__ == "__main__":
    for ids in SIZES:
        print(f"{ids:>11,} ids  {step_ms(ids, *sys.argv[1:]):8.2f} ms", flush=True)
