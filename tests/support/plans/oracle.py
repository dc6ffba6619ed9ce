"""Oracle: toulbar2, a solver of weighted constraint networks, on the networks of the search."""

from collections.abc import Sequence

import numpy as np
import pytoulbar2

from flowrun.engine.passes.layout.elimination import CostTable

DIGITS = 6  # after the point, of costs that are scaled so that the known one is SCALE
SCALE = 1000.0


def least_cost(sizes: Sequence[int], tables: Sequence[CostTable], known: float) -> float:
    """Return the least cost of any choice, to about 1e-6 of `known`, the cost of one.

    sizes: values of each variable.  tables: costs in seconds.
    """
    sums: dict[tuple[int, ...], np.ndarray] = {}
    for table in tables:
        costs = np.asarray(table.values, dtype=float) * (SCALE / known)
        sums[table.over] = sums[table.over] + costs if table.over in sums else costs
    network = pytoulbar2.CFN(SCALE * 1.001, resolution=DIGITS)
    for variable, size in enumerate(sizes):
        network.AddVariable(str(variable), range(size))
    for over, costs in sums.items():
        finite = np.where(np.isinf(costs), 100 * SCALE, costs)
        network.AddFunction([str(variable) for variable in over], finite.flatten().tolist())
    solved = network.Solve(showSolutions=0)
    assert solved, "toulbar2 finds no choice as cheap as the known one"
    return float(solved[1]) * known / SCALE
