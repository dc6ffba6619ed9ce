"""finite: a training whose numbers have left their range ends before it is saved.

The loss of each step is checked when it is reported, the weights where a run evaluates or saves: no
step waits for either.  A loss that is NaN while weights are finite is that of a step without a
target: torch's mean is 0 / 0 there, its gradients are 0, and the run goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch

from flowrun.engine.actors.plan import Plan
from flowrun.engine.errors import RunError
from flowrun.engine.runtime.rank.rank import Rank, Results
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.schema import STOP

_MOST = 8  # names and samples that are listed
_INSTEAD = (
    "Look at these samples, lower optim.lr, or set optim.clip_norm. The checkpoints of this run are"
    " from earlier steps. train.on_nonfinite=ignore continues regardless."
)


def check_step(job: Job, step: int, results: Results, bodies: Iterable[Rank]) -> None:
    """Raise RunError if the loss of a step is not finite, and it is not that of a step without a
    target, unless the job's train.on_nonfinite is ignore.

    results: of the step.  bodies: the ranks of this process.
    """
    loss = results["loss"]
    scaled = "skipped_updates" in results  # loss scaling leaves such an update out
    if math.isfinite(loss) or scaled or job.recipe.train.on_nonfinite != STOP:
        return
    broken = [name for body in bodies for name in _broken(body.plan, body.variables)]
    if math.isnan(loss) and not broken:
        return
    facts = [f"the loss of step {step} is {loss}.", *_of_samples(job, step), *_list_broken(broken)]
    raise RunError(f"step {step}", "\n".join(facts), _INSTEAD)


def check_weights(job: Job, step: int, body: Rank) -> None:
    """Raise RunError if a weight that a rank (`body`) holds is not finite after `step` steps,
    unless the job's train.on_nonfinite is ignore.
    """
    if job.recipe.train.on_nonfinite != STOP:
        return
    if broken := list(_broken(body.plan, body.variables)):
        facts = [
            f"after {step} steps some weights are not finite.",
            *_list_broken(broken),
        ]
        raise RunError(f"rank {body.rank}, step {step - 1}", "\n".join(facts), _INSTEAD)


def _broken(plan: Plan, variables: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Names of trained parameters, of those that are here, that are not finite."""
    for tensor, value in variables.items():
        v = plan.variables[tensor]
        if v.kind == "parameter" and v.new and not bool(value.isfinite().all()):
            yield v.name


def _list_broken(broken: list[str]) -> Iterator[str]:
    names = list(dict.fromkeys(broken))
    if names:
        more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        yield f"not finite: {', '.join(names[:_MOST])}{more}."


def _of_samples(job: Job, step: int) -> Iterator[str]:
    """The samples of a step; of those that hold numbers that are not finite, the fields."""
    recipe, sampler = job.recipe, job.materials.sampler
    rows, found = recipe.micro_batch_size, list[str]()
    for micro_batch in range(recipe.train.micro_batches):
        for name, value in sampler(step, micro_batch, slice(0, rows)).items():
            if value.is_floating_point() and value.dim():
                bad = (~value.isfinite()).reshape(len(value), -1).any(1).nonzero().flatten()
                found += [
                    f"sample {sampler.index(step, micro_batch, int(row))} (field {name})"
                    for row in bad
                ]
    if found:
        more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
        yield f"not finite: {', '.join(found[:_MOST])}{more}."
        return
    indices = [
        sampler.index(step, micro_batch, row)
        for micro_batch in range(recipe.train.micro_batches)
        for row in range(rows)
    ]
    more = f" and {len(indices) - _MOST} more" if len(indices) > _MOST else ""
    yield f"its samples: {', '.join(map(str, indices[:_MOST]))}{more} of the data set."
