from collections.abc import Iterator, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrun.engine.runtime.drivers.virtual import VirtualCluster
from flowrun.engine.runtime.rank.rank import Results
from flowrun.launcher.job.job import Job
from flowrun.launcher.ranks.snapshot_memory import NONE, SnapshotMemory, Stamps
from flowrun.launcher.ranks.snapshots import SnapshotWriter
from flowrun.launcher.recipe.compose import load

STEPS = 12


def write_steps(
    rank: int, stamps: Stamps, held: dict[int, list[list[int]]], every: int
) -> Iterator[int]:
    """A rank that trains: it yields wherever it may be killed, the steps that it has done.

    held: what lies in the buffers of each rank, piece by piece.  every: steps between snapshots.
    """
    held[rank] = [[0, 0], [0, 0]]
    yield 0
    stamps.close(rank, 0, 0)
    for step in range(1, STEPS + 1):
        yield step
        if step % every == 0:
            buffer = stamps.open(rank)
            for piece in range(2):
                yield step
                held[rank][buffer][piece] = step
            yield step
            stamps.close(rank, buffer, step)


@pytest.mark.parametrize("in_step", [True, False], ids=["ranks in step", "ranks at any pace"])
@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_after_any_kill_all_ranks_hold_one_whole_step(
    in_step: bool, num_ranks: int, every: int, data: st.DataObject
) -> None:
    stamps, held = Stamps(range(num_ranks), range(num_ranks)), {}
    ranks = {r: write_steps(r, stamps, held, every) for r in range(num_ranks)}
    done = {rank: next(ranks[rank]) for rank in ranks}
    begun = False
    for chosen in data.draw(st.lists(st.integers(0, num_ranks - 1), max_size=200)):
        # A rank updates a step when all have ended the step before: it needs their results.
        if in_step and done[chosen] > min(done.values()):
            continue
        done[chosen] = next(ranks[chosen], done[chosen])
        newest = stamps.newest()
        begun = begun or newest != NONE
        if begun:
            for rank, buffers in held.items():
                assert [newest, newest] == buffers[stamps.of(rank).index(newest)]
            if in_step:
                assert newest >= min(done.values()) - every


def test_what_was_torn_counts_no_more_after_the_launcher_has_chosen() -> None:
    stamps = Stamps(range(2), [0, 1])
    for rank in range(2):
        stamps.close(rank, 0, 4)
    buffer = stamps.open(0)
    stamps.close(0, buffer, 5)
    assert stamps.newest() == 4
    stamps.keep(4)
    assert (stamps.of(0), stamps.of(1)) == ((4, NONE), (4, NONE))
    stamps.keep(NONE)
    assert stamps.newest() == NONE


def test_a_rank_whose_variables_stay_counts_once_it_has_filled_its_memory() -> None:
    stamps = Stamps(range(2), [0])
    stamps.close(0, 0, 3)
    assert stamps.newest() == NONE
    stamps.close(1, 0, 0)
    assert stamps.newest() == 3


Copies = dict[int, dict[str, torch.Tensor]]


def copies(variables: Mapping[int, Mapping[str, torch.Tensor]]) -> Copies:
    return {
        rank: {name: value.clone() for name, value in tensors.items()}
        for rank, tensors in variables.items()
    }


SMALLER = {
    "gpt_hybrid": ("model.depth=2", "model.width=16", "data.max_bytes=100000"),
    "gpt_zero": ("model.depth=1", "model.width=16", "data.max_bytes=100000"),
    "resnet_dp": ("model.blocks=[1,1]", "train.batch_size=8", "train.micro_batches=2"),
}


@pytest.mark.parametrize("recipe", SMALLER)
def test_a_snapshot_is_what_all_ranks_hold_after_its_step(recipe: str) -> None:
    """resnet: forward updates buffers of batch norm, in each micro-batch."""
    keys = ("train.steps=4", "eval.batches=0", "engine.check_capture=false")
    job = Job(load([f"recipe={recipe}", *SMALLER[recipe], *keys]))
    plan = job.training.plan
    made = job.materials.sampler, job.materials.initial
    undisturbed = VirtualCluster(plan, *made)
    expected = {0: copies({r: body.variables for r, body in undisturbed.ranks.items()})}
    for k in range(4):
        undisturbed.run(k + 1, first=k)
        expected[k + 1] = copies({r: body.variables for r, body in undisturbed.ranks.items()})

    every = 2 if job.recipe.train.micro_batches > 1 else 1
    cluster, memory = VirtualCluster(plan, *made, order_seed=1), SnapshotMemory(plan, every)
    assert memory.newest is None
    reporter = cluster.reporter()
    writers = {
        rank: SnapshotWriter(body, rank == reporter, memory, None)
        for rank, body in cluster.ranks.items()
    }
    seen: list[int] = []

    def look() -> None:
        """Whatever is newest is what an undisturbed run holds."""
        snapshot = memory.newest
        assert snapshot is not None
        seen.append(snapshot.step)
        empty = {r: {k: v * 0 for k, v in held.items()} for r, held in expected[0].items()}
        for rank, variables in empty.items():
            snapshot.restore(rank, variables)
            for name, value in variables.items():
                assert torch.equal(value, expected[snapshot.step][rank][name]), (rank, name)

    def on_step(step: int, results: Results) -> None:
        look()
        writers[reporter].report(step + 1)

    cluster.run(4, on_step)
    look()
    assert seen[0] <= 1
    assert seen[-1] == 4
    assert all(step >= k - every for k, step in enumerate(seen))
