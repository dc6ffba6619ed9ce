"""A rank on another device than the CPU, as far as that shows without one: on torch's `meta`, where
tensors have shapes alone, and with reports that a thread waits for.
"""

import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowrun.engine.actors.plan import Actor, BoxWork, Plan, ReportWork
from flowrun.engine.actors.scheduler import Scheduler
from flowrun.engine.errors import RunError
from flowrun.engine.ir.placement import Shape
from flowrun.engine.runtime.drivers.distributed import DistributedRank
from flowrun.engine.runtime.rank.rank import Rank
from flowrun.engine.runtime.transport.links import Links
from flowrun.engine.runtime.transport.pending import Collective, Pending
from flowrun.engine.strategy import LossScale
from support.layouts.grids import Layout, compiled, initial
from support.layouts.plain_loop import TINY_CONVNET, TINY_GPT, TINY_MLP, Training, plain_loop
from support.nets.architectures import training
from support.plans.one_order import in_one_order

META, CPU = torch.device("meta"), torch.device("cpu")
STEPS = 3
TRAININGS = {
    "gpt": TINY_GPT,
    "gpt bf16": replace(TINY_GPT, autocast=torch.bfloat16),
    "gpt fp16": replace(TINY_GPT, autocast=torch.float16, loss_scale=LossScale(2.0**10)),
    "convnet": TINY_CONVNET,
    "llama": training("llama"),
    "bert": training("bert"),
    "t5": training("t5"),
}


class Elsewhere(TorchDispatchMode):
    """Counts the ops that make tensors which are not on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if any(isinstance(x, Tensor) and x.device != META for x in tree_leaves(made)):
            self.found[str(func)] += 1
        return made


@pytest.fixture
def fused_updates() -> Iterator[None]:
    """torch has none of a learning rate in a tensor that know shapes alone."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in ("_fused_adamw_", "_fused_sgd_"):
            library.impl(f"{name}.tensor_lr", lambda *args, **kwargs: None, "Meta")
        yield


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_all_that_a_rank_makes_is_on_its_device(training: Training, fused_updates: None) -> None:
    plan = compiled(training, Layout(clip_norm=1.0)).plan

    shapes = replace(
        training, batches=tuple({k: v.to(META) for k, v in b.items()} for b in training.batches)
    )

    rank, scheduler = Rank(plan, 0, shapes.rows, None, META), Scheduler(plan, 0, 2)
    with torch.no_grad(), Elsewhere() as elsewhere:
        while not scheduler.is_finished():
            actor_id, act = scheduler.next_supply() or scheduler.next_compute() or (-1, -1)
            actor = plan.actors[actor_id]
            if isinstance(actor.work, ReportWork):
                assert {x.device for x in rank.inputs(actor, act)} == {META}
            else:
                rank.compute(actor, act)
            rank.release(actor, act)
            scheduler.end_act(actor_id)
    assert not elsewhere.found


class Behind(DistributedRank):
    """Reports of the first step are not there until the next step computes."""

    def __init__(self, training: Training) -> None:
        self.threads: set[str] = set()
        self.goes_on = threading.Event()
        links = Links(0, CPU)
        with closing(links):
            plan = compiled(training, Layout()).plan
            super().__init__(
                plan, 0, training.rows, initial(training), CPU, links, async_device=True
            )
            self.reported, self.body.report = self.body.report, self._late  # type: ignore[method-assign]
            self.found = [result["loss"] for result in self.run(STEPS)]

    def _late(self, actor: Actor, act: int) -> Callable[[], None]:
        read = self.reported(actor, act)

        def later() -> None:
            self.threads.add(threading.current_thread().name)
            assert self.goes_on.wait(60), "nothing computes beside a report"
            read()

        return later

    def _compute(self, actor: Actor, act: int) -> None:
        if act >= self.plan.acts_per_step(actor):
            self.goes_on.set()
        super()._compute(actor, act)


def test_a_device_that_is_behind_is_not_waited_for() -> None:
    """The first step's report ends only when something of the second is computed."""
    rank = Behind(TINY_MLP)
    assert rank.found == pytest.approx(plain_loop(TINY_MLP, steps=STEPS).losses, rel=1e-5)
    assert rank.threads and threading.main_thread().name not in rank.threads


class Enqueued(Pending):
    """A collective for whose end the host may not wait."""

    def on_done(self, callback: Callable[[], None]) -> None:
        raise AssertionError("the host waits")


class Alone(Links):
    """Of one rank of two: collectives bring zeros."""

    def join(self, plan: Plan) -> None:
        pass

    def start(self, collective: Collective, bucket: Sequence[torch.Tensor]) -> Pending:
        return Enqueued(lambda: [bucket[0].new_zeros(shape) for shape in collective.after])

    def rest(self, ranks: Container[int]) -> None:
        pass


@pytest.mark.parametrize("blocking", [(), (0,)], ids=["overlaps", "blocks"])
def test_the_host_waits_for_no_collective_of_a_blocking_axis(blocking: tuple[int, ...]) -> None:
    plan = replace(compiled(TINY_GPT, Layout(tensor=2)).plan, blocking=blocking)
    with closing(Alone(0, CPU)) as links:
        values = initial(TINY_GPT)
        rank = DistributedRank(plan, 0, TINY_GPT.rows, values, CPU, links, async_device=True)
        with nullcontext() if blocking else pytest.raises(RunError, match="the host waits"):
            rank.run(STEPS)


class Watched(Alone):
    """Counts what the host waits for, which comes at once; messages bring zeros, too."""

    waits = 0

    def start(self, collective: Collective, bucket: Sequence[torch.Tensor]) -> Pending:
        return Counted(self, super().start(collective, bucket).wait)

    def send(self, tensors: Sequence[torch.Tensor], target_rank: int, tag: int) -> Pending:
        return Pending(list)

    def receive(
        self, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], source_rank: int, tag: int
    ) -> Pending:
        message = [torch.zeros(x, dtype=dtype) for x, dtype in zip(shapes, dtypes, strict=True)]
        return Pending(lambda: message)


class Counted(Pending):
    def __init__(self, links: Watched, finish: Callable[[], list[Tensor]]) -> None:
        super().__init__(finish)
        self._links = links

    def on_done(self, callback: Callable[[], None]) -> None:
        self._links.waits += 1
        callback()


@pytest.mark.parametrize(
    "layout", [Layout(tensor=2), Layout(data=2, tensor=2), Layout(tensor=2, stages=2)], ids=str
)
def test_the_host_waits_for_the_collectives_of_a_step_alone(layout: Layout) -> None:
    """Those of micro-batches end for it as in the rehearsal."""
    plan = in_one_order(compiled(TINY_GPT, layout).plan)
    with closing(Watched(0, CPU)) as links:
        rank = DistributedRank(
            plan, 0, TINY_GPT.rows, initial(TINY_GPT), CPU, links, async_device=True
        )
        rank.run(STEPS)
    boxes = [actor for actor in plan.stage_actors(0) if isinstance(actor.work, BoxWork)]
    of_steps = STEPS * sum(actor.per_step for actor in boxes)
    assert links.waits == of_steps < STEPS * sum(map(plan.acts_per_step, boxes)) / 2
