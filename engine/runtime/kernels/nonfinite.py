"""Find where numbers that are not finite arise: kernels that look at what every op reads and makes.

They serve to repeat one step after the fact; no other step pays for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps

import torch

from flowrun.engine.actors.plan import Plan, RegionWork
from flowrun.engine.ir.graph import BACKWARD, COUNT, FORWARD, UPDATE, WEIGHT_GRAD, WEIGHTS, Op
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ir.signature import Function
from flowrun.engine.ops.traits import has
from flowrun.engine.runtime.kernels.kernels import Kernel, emit
from flowrun.engine.runtime.kernels.region_program import region_lines, regions_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """An op that made a number that is not finite of numbers that are, on a rank.

    micro_batch: of the step; None: the op runs once a step.  place: of the op in its graph.
    value: "nan" or "inf".
    """

    op: Op
    rank: int
    micro_batch: int | None
    place: int
    value: str

    def __str__(self) -> str:
        where = f"of module {self.op.module}" if self.op.module else "of the step itself"
        line = f" ({self.op.line})" if self.op.line else ""
        part = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        return f"{self.op.target} {where}{line}, {self.op.phase}{part}, rank {self.rank}"


def first_origin(origins: Sequence[Origin]) -> Origin | None:
    """Return the origin that comes first in a step; of several ranks the first."""
    order = (COUNT, WEIGHTS, FORWARD, BACKWARD, WEIGHT_GRAD, UPDATE)

    def moment(origin: Origin) -> tuple[int, int, int, int]:
        phase = order.index(origin.op.phase)
        return phase, origin.micro_batch or 0, origin.place, origin.rank

    return min(origins, key=moment, default=None)


class OriginSearch:
    """Makes the kernels of a step that is repeated, and keeps the origins that they find.

    What is infinite by intention, such as a mask of -inf, is made of an infinite argument: that is
    not an origin.
    """

    def __init__(self) -> None:
        self.origins: list[Origin] = []

    def kernels(self, plan: Plan, rank: int, device: torch.device) -> Mapping[int, Kernel]:
        """Return region actor -> kernel."""
        places = {op.name: place for place, op in enumerate(plan.graph.ops)}
        return {
            actor: self._kernel(plan, work, rank, places, device)
            for actor, work in regions_of(plan, rank)
        }

    def _kernel(
        self,
        plan: Plan,
        work: RegionWork,
        rank: int,
        places: Mapping[str, int],
        device: torch.device,
    ) -> Kernel:
        program, ops = region_lines(plan, work, rank)
        acts = 0

        def watch(at: int, function: Function) -> Function:
            op, written = ops[at], program.lines[at].into is not None
            if has(op.target, Trait.IN_PLACE):
                return function

            @wraps(function)
            def watched(*args: object, **kwargs: object) -> object:
                clean = not any(map(_name_value, _numbers((args[written:], kwargs))))
                result = function(*args, **kwargs)
                value = next(filter(None, map(_name_value, _numbers(result))), "") if clean else ""
                if value:
                    micro_batch = None if op.per_step else acts % plan.micro_batches
                    place = places.get(op.name, len(places))
                    self.origins.append(
                        Origin(op=op, rank=rank, micro_batch=micro_batch, place=place, value=value)
                    )
                return result

            return watched

        kernel = emit(program, watch, device)

        def counted(values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            nonlocal acts
            results = kernel(values)
            acts += 1
            return results

        return counted


def _numbers(value: object) -> Iterator[torch.Tensor | float]:
    """Yield the tensors and the numbers that arguments or results consist of."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, (torch.Tensor, float)):
        yield value


def _name_value(value: torch.Tensor | float) -> str:
    """Return "nan" or "inf" if such a number is in it, else ""."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else "inf" if math.isinf(value) else ""
    if not (value.is_floating_point() or value.is_complex()) or bool(value.isfinite().all()):
        return ""
    return "nan" if bool(value.isnan().any()) else "inf"
