"""Random modules (compositions.py) through both ways of capture: the graphs give the same numbers.

python tests/support/checks/two_ways.py --seeds 0:500
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flowrun.engine.capture import capture
from flowrun.engine.capture.capture import Task, Traced, trace
from flowrun.engine.capture.capture_errors import UnfollowedError
from flowrun.engine.capture.check.draws import Draws
from flowrun.engine.capture.check.interpret import interpret
from flowrun.engine.capture.in_python.banned import FrozenError
from flowrun.engine.capture.patches.substitutes import replace_attribute
from flowrun.engine.errors import FlowrunError
from support.layouts.plain_loop import largest
from support.nets.compositions import SEED, TOLERANCE, Model, apart, model_of, module_of


def traced_in_python(task: Task, batch: Any) -> Traced:
    """What is captured of a task where Dynamo follows nothing."""

    def unfollowed(*_: object, **__: object) -> Traced:
        raise UnfollowedError(FrozenError("Dynamo is not asked", []), None)

    with replace_attribute(capture, "_trace_blocks", unfollowed):
        return trace(task, batch)


def difference(model: Model) -> float:
    """The largest relative difference of a loss, a gradient or a buffer."""
    with module_of(model), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        import mod  # type: ignore[import-not-found]

        data = mod.Samples()
        batch = torch.utils.data.default_collate([data[k] for k in range(4)])
        results = []
        for way in (trace, traced_in_python):
            torch.manual_seed(SEED)
            task = Task(mod.Net(), {"x": "x"}, mod.measure)
            found = way(task, batch)
            values = {name: tensor.detach() for name, tensor in task.tensors.items()}
            torch.manual_seed(SEED)
            with Draws():
                results.append(interpret(found.graph, values, batch))
    one, other = results
    assert one.keys() == other.keys()
    return largest(apart(one[key], other[key]) for key in one)


def _differs(seed: int) -> bool:
    try:
        return difference(model_of(seed)) > TOLERANCE
    except FlowrunError as error:
        return "fails in plain torch, too" not in str(error)


def main() -> int:
    """Try the models of seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:20", help="a:b")
    first, _, last = parser.parse_args().seeds.partition(":")
    torch.set_num_threads(1)
    wrong = [s for s in range(int(first), int(last)) if _differs(s)]
    print(f"{wrong} differ")
    return min(len(wrong), 1)


if __name__ == "__main__":
    sys.exit(main())
