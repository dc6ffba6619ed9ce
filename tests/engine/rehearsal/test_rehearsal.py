import itertools
from dataclasses import replace
from typing import Any

import pytest

from flowrun.engine.actors.plan import BOX, READER, RECEIVE, REGION, SEND, Actor, BoxWork, Plan
from flowrun.engine.actors.protocol import LaunchAct
from flowrun.engine.actors.scheduler import Scheduler
from flowrun.engine.errors import PlanError
from flowrun.engine.ir.graph import COUNT, UPDATE, WEIGHTS
from flowrun.engine.rehearsal.rehearsal import rehearse
from flowrun.engine.runtime.drivers import virtual
from support.layouts.grids import LAYOUTS, Layout, cluster, compiled, run_plan
from support.layouts.plain_loop import TINY_GPT, Training, image_batches, mlp
from support.plans.tight_plan import tight_plan

TINY_MLP = mlp(micro_batches=4)
DEEP_MLP = mlp(micro_batches=16)


def wide_mlp(samples: int) -> Training:
    """One sample for each rank in each of 2 micro-batches."""
    return replace(mlp(micro_batches=2), batches=image_batches(1, 2 * samples, 10))


# ---- no deadlock ---------------------------------------------------------------------------------


def test_registers_that_do_not_suffice_are_refused_with_the_whole_wait_cycle() -> None:
    with pytest.raises(PlanError) as error:
        rehearse(tight_plan(micro_batches=4, slots=1))
    assert error.value.where == "placement.in_flight (register 0)"
    assert error.value.problem.splitlines() == [
        "the plan would deadlock: its registers do not suffice.",
        "actor 0 make on rank 0 (stage 0) waits for a free slot (1 in all) of register 0, "
        "held by actor 1 send it",
        "actor 1 send it on rank 0 (stage 0) waits for the other end of channel 0",
        "actor 2 receive it on rank 1 (stage 1) waits for a free slot (1 in all) of register 1, "
        "held by actor 3 use",
        "actor 3 use on rank 1 (stage 1) waits to read register 4 from actor 6 receive sum",
        "actor 6 receive sum on rank 1 (stage 1) waits for the other end of channel 1",
        "actor 5 send sum on rank 0 (stage 0) waits to read register 3 from actor 4 sum",
        "actor 4 sum on rank 0 (stage 0) waits to read register 2 from actor 0 make",
    ]


@pytest.mark.parametrize("micro_batches", [2, 4, 6])
def test_the_same_plan_ends_with_a_slot_for_every_micro_batch(micro_batches: int) -> None:
    assert rehearse(tight_plan(micro_batches, slots=micro_batches)).step_s > 0


def test_a_stash_without_a_slot_is_refused_naming_actor_register_and_rank() -> None:
    plan = compiled(TINY_MLP, Layout(stages=2)).plan
    stash = next(r for r in plan.registers if r.stash and r.stage == 0)
    assert stash.producer is not None
    registers = tuple(replace(r, slots=0) if r == stash else r for r in plan.registers)
    maker, reader = (plan.actors[a].name for a in (stash.producer, stash.readers[0]))
    with pytest.raises(
        PlanError, match=f"{maker} on rank 0 .*stage 0.* waits for a free slot"
    ) as e:
        rehearse(replace(plan, registers=registers, order=()))
    assert f"register {stash.id}, held by actor {stash.readers[0]} {reader}" in e.value.problem


def test_an_order_of_collectives_that_cannot_be_is_refused() -> None:
    plan = compiled(TINY_MLP, Layout(tensor=2)).plan
    ((group, acts),) = plan.order
    with pytest.raises(PlanError, match="waits for its turn in the order of axis tensor"):
        rehearse(replace(plan, order=((group, tuple(reversed(acts))),)))


def test_the_virtual_cluster_tells_the_same_cycle_as_the_rehearsal() -> None:
    plan = compiled(TINY_MLP, Layout(stages=2)).plan
    none = replace(plan, registers=tuple(replace(r, slots=0) for r in plan.registers))
    with pytest.raises(PlanError) as foreseen:
        rehearse(none)
    with pytest.raises(PlanError) as met:
        cluster(TINY_MLP, none).run(1)
    assert str(met.value) == str(foreseen.value)


# ---- stashes and back-pressure -------------------------------------------------------------------


@pytest.mark.parametrize("order_seed", [None, 1, 2])
@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x.stages < 4], ids=str)
def test_live_versions_never_exceed_the_slots(layout: Layout, order_seed: int | None) -> None:
    plan = compiled(TINY_MLP, layout).plan
    found = run_plan(TINY_MLP, plan, 2, order_seed)
    assert found.most_live
    for (rank, register), most in found.most_live.items():
        assert most <= plan.registers[register].slots, f"register {register} of rank {rank}"


@pytest.mark.parametrize(
    ("in_flight", "stashed"),
    [(1, [1, 1, 1, 1]), (2, [2, 2, 2, 2]), ("1f1b", [4, 3, 2, 1])],
    ids=["1", "2", "1f1b"],
)
def test_each_stage_stashes_at_most_its_credits_and_the_first_all_of_them(
    in_flight: int | str, stashed: list[int]
) -> None:
    plan = compiled(TINY_GPT, Layout(stages=4, in_flight=in_flight)).plan
    found = run_plan(TINY_GPT, plan, 2)
    live = [0, 0, 0, 0]
    for (_, register), most in found.most_live.items():
        r = plan.registers[register]
        if r.stash and r.producer is not None and plan.actors[r.producer].kind != READER:
            live[r.stage] = max(live[r.stage], most)
    assert all(most <= credits for most, credits in zip(live, stashed, strict=True))
    assert live[0] == stashed[0]


# ---- the order of collectives --------------------------------------------------------------------


class _Recording(Scheduler):
    """Remembers which collectives were issued, by axis."""

    def __init__(self, *arguments: Any) -> None:
        self.told: dict[int, list[tuple[int, int]]] = {}
        super().__init__(*arguments)

    def next_communication(self) -> LaunchAct | None:
        launched = super().next_communication()
        work = self.actors[launched.actor].work if launched else None
        if launched and isinstance(work, BoxWork):
            self.told.setdefault(work.step.axis, []).append((launched.actor, launched.act))
        return launched


def issued(plan: Plan, order_seed: int, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """For each group of ranks, the orders in which its members issued its collectives, as text."""
    ranks = cluster(TINY_MLP, plan, order_seed)
    with monkeypatch.context() as patched:
        patched.setattr(virtual, "Scheduler", _Recording)
        ranks.run(2)
    found = set()
    for rank, scheduler in ranks.schedulers.items():
        assert isinstance(scheduler, _Recording)
        placement = plan.placements[plan.stage_of(rank)]
        for axis, told in scheduler.told.items():
            found.add(f"{placement.group(rank, axis)}: {told}")
    return found


ORDERED = [
    Layout(data=2, tensor=2, zero=3),
    Layout(data=2, tensor=2, stages=2, clip_norm=0.5),
    Layout(grids=((1, 2), (2, 2))),
]


@pytest.mark.parametrize("layout", ORDERED, ids=str)
def test_all_ranks_of_a_group_issue_its_collectives_in_the_order_of_the_plan(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = compiled(TINY_MLP, layout).plan
    planned = set()
    for (stage, axis), acts in plan.order:
        every = [plan.acts_per_step(plan.actors[actor]) for actor, _ in acts]
        told = [
            (a, step * n + k) for step in range(2) for (a, k), n in zip(acts, every, strict=True)
        ]
        planned |= {f"{group}: {told}" for group in plan.placements[stage].groups(axis)}
    for order_seed in range(3):
        assert issued(plan, order_seed, monkeypatch) == planned


def test_without_an_order_in_the_plan_ranks_of_a_group_issue_unlike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = replace(compiled(TINY_MLP, ORDERED[1]).plan, order=())
    groups = sum(len(plan.placements[0].groups(axis)) for axis in (0, 1))
    assert max(len(issued(plan, seed, monkeypatch)) for seed in range(5)) > groups


# ---- what is foreseen ----------------------------------------------------------------------------


def test_a_rank_computes_one_act_at_a_time() -> None:
    found = compiled(TINY_GPT, Layout(tensor=2, stages=2))
    for stage in (0, 1):
        computing = [
            event
            for event in sorted(found.rehearsal.first_step, key=lambda e: (e.start, e.end))
            if event.stage == stage
            and found.plan.actors[event.actor].kind not in (BOX, SEND, RECEIVE)
            and not found.plan.actors[event.actor].runs_in_thread
        ]
        for one, following in itertools.pairwise(computing):
            assert one.end <= following.start


BLOCKED = Layout(data=2, tensor=2, stages=2)


@pytest.mark.parametrize("blocking", [(0,), (1,), (0, 1)], ids=["data", "tensor", "both"])
def test_nothing_computes_beside_a_blocking_collective(blocking: tuple[int, ...]) -> None:
    plan = replace(compiled(TINY_GPT, BLOCKED).plan, order=(), blocking=blocking)
    timeline = rehearse(plan).first_step
    stands = [e for e in timeline if plan.blocks(plan.actors[e.actor])]
    acts = [e for e in timeline if plan.actors[e.actor].computes]
    assert stands
    for stage, own in itertools.groupby(sorted(stands), key=lambda event: event.stage):
        alone = [*own]
        others = [e for e in (*acts, *alone) if e.stage == stage]
        assert not any(
            one is not other and one.start < other.end and other.start < one.end
            for one in alone
            for other in others
        )


def test_what_hides_behind_compute_is_what_blocking_takes() -> None:
    plan = compiled(TINY_GPT, BLOCKED).plan
    blocked = rehearse(replace(plan, order=(), blocking=(0, 1))).step_s
    hidden = rehearse(plan).step_s
    assert hidden < blocked


def test_a_step_s_reductions_wait_for_all_that_can_be_computed() -> None:
    """So those of one stage hold up no backward of the stage before."""
    plan = replace(compiled(wide_mlp(samples=2), Layout(data=2)).plan, order=(), blocking=(0,))
    timeline = rehearse(plan).first_step
    actor = lambda event: plan.actors[event.actor]  # noqa: E731
    reductions = [e.start for e in timeline if plan.blocks(actor(e)) and actor(e).phase == UPDATE]
    backward = [e.end for e in timeline if actor(e).computes and not actor(e).per_step]
    assert min(reductions) >= max(backward)


def test_rehearsal_is_flat_in_the_number_of_ranks() -> None:
    """3072 ranks are rehearsed with the events of 3: one rank stands for all of its stage.

    (Up to four exchange a small all-reduce, in other buffers.)
    """
    few = compiled(wide_mlp(5), Layout(data=5))
    many = compiled(wide_mlp(3072), Layout(data=3072))
    assert many.plan.num_ranks == 3072
    assert len(many.plan.actors) == len(few.plan.actors)
    assert len(many.rehearsal.first_step) == len(few.rehearsal.first_step)
    assert many.rehearsal.peak_bytes == few.rehearsal.peak_bytes


def test_the_bubble_shrinks_with_more_micro_batches() -> None:
    """The next step's forward waits for the weights, so that a step fills and drains the stages."""
    layout = Layout(stages=2, in_flight="1f1b")

    def seconds(actor: Actor) -> float:
        return float(actor.kind == REGION and actor.phase not in (COUNT, WEIGHTS))

    def bubbles(training: Training) -> tuple[float, ...]:
        plan = compiled(training, layout).plan
        return rehearse(plan, seconds).bubble

    pairs = zip(bubbles(TINY_MLP), bubbles(DEEP_MLP), strict=True)
    assert all(0 < many < few < 1 for few, many in pairs)
