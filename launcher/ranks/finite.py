"""finite: numbers that leave their range are noticed in their step, and named.

The plan leaves out an update whose gradients are not all finite (passes/update), so that no weight
takes such a number up, and reports the norm of the gradients.  Here a step is judged by what
it reports; the op where such numbers arise is found by repeating the step (kernels/nonfinite.py).
A loss that is NaN while all gradients are 0 is that of a step without a target: torch's mean is
0 / 0 there, and the run goes on.  Weights are checked where a run evaluates or saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flowrun.engine.actors.plan import Plan
from flowrun.engine.errors import RunError
from flowrun.engine.runtime.drivers.distributed import DistributedRank
from flowrun.engine.runtime.kernels.nonfinite import Origin, OriginSearch, first_origin
from flowrun.engine.runtime.rank.rank import Rank, Results
from flowrun.engine.runtime.rank.replicas import Digests, compare, digests_of
from flowrun.launcher.job.job import Job
from flowrun.launcher.ranks.failure import with_peers
from flowrun.launcher.recipe.schema import IGNORE, ROLLBACK, SKIP, STEP

MOST_SKIPPED = 20  # updates in a row that are left out, with no hope of a better one
_MOST = 8  # names and samples that are listed
_INSTEAD = (
    "No weight took it up, and no checkpoint was written since. Look at the op and the samples,"
    " lower optim.lr, or set optim.clip_norm. train.on_nonfinite=skip leaves out such updates and"
    " continues; rollback does so with the weights of a checkpoint."
)
_DIFFERENT = (
    "These ranks compute the same from the same numbers: hardware computed or stored wrong, or a"
    " sample or an op differs from rank to rank. Checkpoints since the comparison before may have"
    " it, too; flowrun resume --step goes on from an older one."
)
_KEPT = (
    "The checkpoints of this run are from earlier steps. train.on_nonfinite=ignore saves it all the"
    " same."
)


class NotFinite(RunError):
    """The error of a run whose numbers are not finite.

    steps: steps done by then, with the one that is at fault.
    """

    def __init__(self, where: str, problem: str, instead: str, steps: int) -> None:
        super().__init__(where, problem, instead)
        self.steps = steps


class Broken(NamedTuple):
    """A variable of which a rank holds numbers that are not finite."""

    variable: str
    rank: int


class StepJudge:
    """Judges the steps of a run one after the other.  policy: train.on_nonfinite.  per_step: the
    loss of a step is that of its whole batch (train.loss_mean).
    """

    def __init__(self, policy: str, per_step: bool) -> None:
        self.policy = policy
        self.per_step = per_step
        self.skipped = 0  # updates in a row that were left out

    @staticmethod
    def of(job: Job) -> StepJudge:
        """Return the judge that a recipe asks for."""
        train = job.recipe.train
        return StepJudge(train.on_nonfinite, train.loss_mean == STEP)

    def problem(self, results: Results) -> str:
        """Say why what a step reports must end the run; "" if the run goes on."""
        if self.policy == IGNORE:
            return ""
        loss, norm = results["loss"], results.get("grad_norm", 0.0)
        self.skipped = 0 if math.isfinite(norm) else self.skipped + 1
        if self.skipped >= MOST_SKIPPED:
            return f"{self.skipped} updates in a row were left out: their gradients are not finite."
        if self.policy == SKIP or "loss_scale" in results:
            return ""
        if self.skipped:
            return f"its gradients are not finite, and its loss is {loss}."
        if math.isinf(loss) or (math.isnan(loss) and norm > 0 and self.per_step):
            return f"its loss is {loss}, though its gradients are finite."
        return ""


def explain(
    job: Job, step: int, problem: str, origins: Sequence[Origin], broken: Iterable[Broken]
) -> NotFinite:
    """Return the error that ends a run, or rolls it back.

    job: the run.  step: of which StepJudge said `problem`.  origins: found by repeating it.
    broken: what ranks hold that is not finite.
    """
    origin = first_origin(origins)
    facts = [problem]
    if origin:
        facts.append(f"the first op that makes {origin.value} of finite numbers: {origin}.")
    facts += _of_samples(job, step, origin.micro_batch if origin else None)
    facts += _list_broken(broken)
    where = f"step {step}" if origin is None else f"step {step}, rank {origin.rank}"
    return NotFinite(where, "\n".join(facts), _INSTEAD, step + 1)


def check_numbers(
    job: Job,
    trained: DistributedRank,
    step: int,
    problems: Sequence[tuple[int, str]],
    finish: Callable[[], None],
) -> None:
    """Raise NotFinite, on every rank the same, for a step that must end the run: all repeat it to
    find where.  Check weights else.  Every rank calls this function.

    job: the run.  trained: this rank, at rest.  step: number of steps done.  problems: of a step,
    known to the rank that reports.  finish: waits for the checkpoint that this rank writes; no rank
    raises before all have it, so that what a rollback goes back to does not depend on disks.
    """
    import torch.distributed as dist

    if job.recipe.train.on_nonfinite == IGNORE:
        return
    heard = [problems[0] if problems else None]
    with with_peers(trained.rank, "after the last step"):
        dist.broadcast_object_list(heard, src=trained.reporter)
    if heard[0] or job.recipe.train.on_nonfinite == ROLLBACK:
        finish()
        with with_peers(trained.rank, "writing a checkpoint"):
            dist.barrier()
    if heard[0] is None:
        check_weights(job, step, trained.body)
        return
    bad, problem = heard[0]
    search, plan = OriginSearch(), trained.plan
    again = DistributedRank(
        plan,
        trained.rank,
        job.materials.sampler,
        None,
        trained.device,
        trained.links,
        kernels=search.kernels,
        lent=trained.body.lend_variables(plan, {}),
    )
    again.run(bad + 1, first=bad)
    found: list[Any] = [None] * plan.num_ranks
    with with_peers(trained.rank, "repeating a step"):
        dist.all_gather_object(found, (search.origins, find_broken(trained.body)))
    origins = [origin for part, _ in found for origin in part]
    broken = [each for _, part in found for each in part]
    raise explain(job, bad, problem, origins, broken)


def compare_replicas(trained: DistributedRank, step: int) -> None:
    """Compare with the other ranks what several hold alike.  Every rank calls this function.

    trained: this rank, at rest.  step: number of steps done.  Raises RunError.
    """
    import torch.distributed as dist

    plan = trained.plan
    found: list[Any] = [None] * plan.num_ranks
    with with_peers(trained.rank, "comparing what ranks hold alike"):
        dist.all_gather_object(found, digests_of(plan, trained.body.variables))
    check_replicas(plan, step, dict(enumerate(found)))


def check_replicas(plan: Plan, step: int, found: Mapping[int, Digests]) -> None:
    """Raise RunError if ranks hold different bytes of what they should hold alike.

    plan: says which.  step: number of steps done.  found: digests, by rank (rank/replicas.py).
    """
    differences = compare(plan, found)
    if not differences:
        return
    first, names = differences[0], [d.variable for d in differences]
    ranks, more = _list_ranks(first.guilty), f", and in {len(names) - 1} more" * (len(names) > 1)
    if first.others:
        facts = f"its {names[0]} is not that of {_list_ranks(first.others)}{more}."
    else:
        facts = f"one of them holds wrong bytes in {names[0]}{more}; two cannot say which."
    raise RunError(f"{ranks}, step {step - 1}", facts, _DIFFERENT)


def _list_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def check_weights(job: Job, step: int, body: Rank) -> None:
    """Raise NotFinite if a weight, state or buffer that a rank (`body`) holds is not finite after
    `step` steps, unless the job's train.on_nonfinite is ignore: it must not replace a good one on
    disk.
    """
    if job.recipe.train.on_nonfinite == IGNORE:
        return
    if broken := find_broken(body):
        facts = [
            f"after {step} steps not all that would be saved is finite.",
            *_list_broken(broken),
        ]
        where = f"rank {body.rank}, step {step - 1}"
        raise NotFinite(where, "\n".join(facts), _KEPT, step)


def find_broken(body: Rank) -> list[Broken]:
    """Find what training changes and a rank holds that is not finite."""
    found = []
    for tensor, value in body.variables.items():
        v = body.plan.variables[tensor]
        floats = value.is_floating_point() or value.is_complex()
        if v.new and floats and not bool(value.isfinite().all()):
            found.append(Broken(v.name, body.rank))
    return found


def _list_broken(broken: Iterable[Broken]) -> Iterator[str]:
    ranks: dict[str, list[int]] = {}
    for name, rank in broken:
        ranks.setdefault(name, []).append(rank)
    if ranks:
        yield f"not finite: {_cut([f'{name} ({_list_ranks(at)})' for name, at in ranks.items()])}."


def _of_samples(job: Job, step: int, only: int | None) -> Iterator[str]:
    """Yield which samples a step reads; of those that hold numbers that are not finite, the fields.

    only: the micro-batch whose samples are listed if none does; None: of all.
    """
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
        yield f"not finite: {_cut(found)}."
        return
    listed = range(recipe.train.micro_batches) if only is None else (only,)
    indices = [str(sampler.index(step, part, row)) for part in listed for row in range(rows)]
    yield f"its samples: {_cut(indices)} of the data set."


def _cut(words: Sequence[str]) -> str:
    more = f" and {len(words) - _MOST} more" if len(words) > _MOST else ""
    return f"{', '.join(words[:_MOST])}{more}"
