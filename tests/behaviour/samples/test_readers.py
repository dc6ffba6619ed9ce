"""Samples made in steps: a chain of actors with two registers each, beside compute, that gives the
batches which reading at once gives.
"""

import threading
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrun.engine.actors.plan import READER, Actor, FeedWork, Plan, PrepareWork
from flowrun.engine.errors import RunError
from flowrun.engine.ir.graph import FORWARD, Feed
from flowrun.engine.rehearsal.rehearsal import rehearse
from flowrun.engine.runtime.drivers.distributed import DistributedRank
from flowrun.engine.runtime.drivers.virtual import VirtualCluster
from flowrun.engine.runtime.transport.links import Links
from support.layouts.grids import Layout, compiled, initial
from support.layouts.plain_loop import TINY_MLP, Batch, plain_loop
from support.layouts.stepwise import Noisy, plan, sampler

STEPS = 4
CPU = torch.device("cpu")
CHAIN = ("read", "decode", "augment")


def at_once(layout: Layout) -> Plan:
    return compiled(TINY_MLP, layout).plan


def losses(plan: Plan, order_seed: int | None = None) -> list[float]:
    check = order_seed is not None
    ranks = VirtualCluster(plan, sampler(Noisy()), initial(TINY_MLP), order_seed, check)
    return [result["loss"] for result in ranks.run(STEPS)]


@pytest.mark.parametrize("layout", [Layout(), Layout(data=2), Layout(stages=2)], ids=str)
def test_every_stage_that_reads_images_has_the_chain(layout: Layout) -> None:
    made = plan(layout)
    for stage in {feed.stage for feed in made.graph.feeds if feed.field == "images"}:
        readers = [a for a in made.stage_actors(stage) if a.runs_in_thread]
        if layout.stages == 1:  # labels are counted a step ahead: by a reader of their own
            labels = readers.pop(0).work
            assert isinstance(labels, FeedWork) and labels.unprepared
        assert [a.work.step for a in readers if isinstance(a.work, PrepareWork)] == list(CHAIN)
        assert [a.kind for a in readers] == [READER] * 4
        assert isinstance(readers[-1].work, FeedWork)
        between = [made.registers[r] for a in readers[:-1] for r in a.outputs]
        assert [r.slots for r in between] == [2, 2, 2]
        assert [r.readers for r in between] == [(a.id,) for a in readers[1:]]


@pytest.mark.parametrize(("fields", "beside"), [("@draw", False), ("@draw images", True)])
def test_a_number_of_the_engines_own_needs_no_thread(fields: str, beside: bool) -> None:
    work = FeedWork(tuple(Feed(field, field) for field in fields.split()))
    assert (
        Actor(0, "batch", READER, 0, phase=FORWARD, per_step=False, work=work).runs_in_thread
        == beside
    )


def test_a_stage_that_reads_labels_alone_does_no_step() -> None:
    data, made = Noisy(), plan(Layout(stages=2))
    (reader,) = [a for a in made.stage_actors(1) if a.runs_in_thread]
    assert isinstance(reader.work, FeedWork) and reader.work.unprepared
    VirtualCluster(made, sampler(data), initial(TINY_MLP)).run(STEPS)
    assert data.done == dict.fromkeys(CHAIN, 16 * STEPS)


def test_a_stage_that_reads_labels_alone_makes_no_samples() -> None:
    data, made = Noisy(), plan(Layout(stages=2), chain=False)
    readers = [a.work for a in made.actors if isinstance(a.work, FeedWork) and not a.per_step]
    assert [work.unprepared for work in readers] == [False, True]
    found = VirtualCluster(made, sampler(data), initial(TINY_MLP)).run(STEPS)
    assert [result["loss"] for result in found] == losses(at_once(Layout(stages=2)))
    assert data.done == dict.fromkeys(CHAIN, 16 * STEPS)


def test_bytes_between_the_steps_are_those_of_the_samples_of_a_rank() -> None:
    made = plan(Layout(data=2))
    held = TINY_MLP.micro_batch // 2
    found = {r.tensors[0]: r.num_bytes for r in made.registers if r.name.startswith("batch.")}
    assert found == {
        "batch.read@0": 8 * held,
        "batch.decode@0": 256 * held,
        "batch.augment@0": 256 * held,
    }


@pytest.mark.parametrize("layout", [Layout(), Layout(data=2), Layout(stages=2)], ids=str)
def test_a_chain_trains_as_reading_at_once(layout: Layout) -> None:
    assert losses(plan(layout)) == losses(at_once(layout))


@pytest.mark.parametrize("order_seed", range(3))
def test_any_order_of_acts_gives_the_same(order_seed: int) -> None:
    layout = Layout(data=2)
    assert losses(plan(layout), order_seed) == losses(at_once(layout))


def test_a_rank_makes_its_own_samples_alone() -> None:
    data = Noisy()
    VirtualCluster(plan(Layout(data=2)), sampler(data), initial(TINY_MLP)).run(STEPS)
    assert data.done == dict.fromkeys(CHAIN, 16 * STEPS)


# ---- randomness ----------------------------------------------------------------------------------


def test_what_is_random_is_a_function_of_seed_step_and_sample() -> None:
    one, whole = sampler(Noisy()), slice(0, 4)
    first = one(1, 2, whole)["images"]
    assert torch.equal(first, sampler(Noisy())(1, 2, whole)["images"])
    assert torch.equal(first[1:3], one(1, 2, slice(1, 3))["images"])
    other = replace(one, seed=6)
    assert not torch.equal(first, other(1, 2, whole)["images"])


def test_a_sample_is_augmented_anew_in_each_epoch() -> None:
    small = replace(sampler(Noisy()), held_out=39)  # one sample is left, read again and again
    images = small(0, 0, slice(0, 4))["images"]
    assert len({float(value) for value in images[:, 0]}) == 4


def test_evaluation_augments_nothing() -> None:
    data = Noisy()
    found = sampler(data, evaluation=True)(0, 0, slice(0, 4))["images"]
    assert torch.equal(found, torch.stack([data[k]["images"] for k in range(32, 36)]))


# ---- the rehearsal -------------------------------------------------------------------------------


def test_the_rehearsal_hides_reading_behind_compute() -> None:
    """With two registers a step lasts as long as the slowest actor of the chain or compute, not as
    long as all of them.
    """
    made = plan(Layout())
    costs = {"batch.read": 1.0, "batch.decode": 5.0, "batch.augment": 1.0, "batch": 1.0}
    found = rehearse(made, lambda actor: costs.get(actor.name, 0.0))
    assert found.step_s == pytest.approx(5.0 * made.micro_batches)
    busy = rehearse(made, lambda actor: costs.get(actor.name, 1.0))
    alone = rehearse(made, lambda actor: 0.0 if actor.runs_in_thread else 1.0)
    assert busy.step_s == pytest.approx(max(5.0 * made.micro_batches, alone.step_s))


def test_foreseen_seconds_are_those_of_the_samples_of_a_rank() -> None:
    made = plan(Layout(data=2))
    seconds = {a.name: a.seconds for a in made.actors}
    act = seconds["batch"]
    assert seconds["batch.decode"] == pytest.approx(act + 2e-3 * (TINY_MLP.micro_batch // 2))


# ---- in threads ----------------------------------------------------------------------------------


class Rows:
    """What Training.rows gives, in steps; the decode of `broken` fails."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken
        self.threads: set[str] = set()

    def __call__(self, step: int, micro_batch: int, rows: slice) -> Batch:
        raise AssertionError("the samples come in steps")

    def prepare(
        self, name: str, samples: list[Any] | None, step: int, micro_batch: int, rows: slice
    ) -> list[Any]:
        self.threads.add(threading.current_thread().name)
        if self.broken and name == "decode":
            raise ValueError("not an image")
        batch = TINY_MLP.rows(step, micro_batch, rows)
        return samples or [{k: v[i] for k, v in batch.items()} for i in range(len(rows_of(batch)))]

    def read_raw_fields(self, step: int, micro_batch: int, rows: slice) -> Batch:
        return {"labels": TINY_MLP.rows(step, micro_batch, rows)["labels"]}

    def collate(self, samples: list[Any], *at: Any) -> Batch:
        return {name: torch.stack([s[name] for s in samples]) for name in samples[0]}


def rows_of(batch: Batch) -> Tensor:
    return next(iter(batch.values()))


def test_a_process_prepares_in_threads_beside_compute() -> None:
    made, rows = plan(Layout()), Rows()
    with closing(Links(0, CPU)) as links:
        body = DistributedRank(made, 0, rows, initial(TINY_MLP), CPU, links)
        found = [result["loss"] for result in body.run(STEPS)]
    assert found == pytest.approx(plain_loop(TINY_MLP, steps=STEPS).losses, rel=1e-5)
    assert rows.threads and threading.main_thread().name not in rows.threads


class Decoded(Rows):
    """Whose samples are arrays of `num_bytes` each until they are augmented, and copies then."""

    num_bytes = 100_000

    def prepare(self, name: str, samples: list[Any] | None, *at: Any) -> list[Any]:
        made = super().prepare(name, samples, *at)
        if name == "augment":
            return [{k: v.clone() for k, v in sample.items()} for sample, _ in made]
        return (
            made if samples else [(sample, np.zeros(self.num_bytes, np.uint8)) for sample in made]
        )


def test_what_threads_that_read_samples_make_is_measured() -> None:
    """Arrays that are no tensors too: all samples of a micro-batch, of several that are ahead."""
    made, peaks = plan(Layout()), []
    for rows in (Rows(), Decoded()):
        with closing(Links(0, CPU)) as links:
            body = DistributedRank(made, 0, rows, initial(TINY_MLP), CPU, links, metered=True)
            body.run(STEPS)
            peaks.append(body.live_bytes.peak)
    plain, decoded = peaks
    a_micro_batch = TINY_MLP.micro_batch * Decoded.num_bytes
    assert a_micro_batch <= decoded - plain <= 6 * a_micro_batch


def test_a_step_that_fails_is_told_with_rank_and_actor() -> None:
    told = r"rank 0, actor batch.decode\n.*ValueError: not an image"
    rows = Rows(broken=True)
    with closing(Links(0, CPU)) as links, pytest.raises(RunError, match=told):
        DistributedRank(plan(Layout()), 0, rows, initial(TINY_MLP), CPU, links).run(STEPS)


def test_samples_made_at_once_are_foreseen_where_they_are_made() -> None:
    made = plan(Layout(stages=2), chain=False)
    images, labels = (a.seconds for a in made.actors if a.name == "batch")
    assert images == pytest.approx(labels + 3e-3 * TINY_MLP.micro_batch)
    with_steps = {a.name: a.seconds for a in plan(Layout()).actors}
    assert with_steps["batch"] == labels
