import zlib
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowrun.engine.errors import RunError
from flowrun.engine.runtime.drivers.logical_checkpoint import (
    read,
    read_contents,
    read_whole,
    restore,
    write,
)
from flowrun.engine.runtime.drivers.virtual import VirtualCluster
from flowrun.engine.runtime.rank.shards import (
    Shard,
    choose_shards,
    collect_shards,
    make_whole_shard,
)
from support.layouts.grids import FIVE, Layout, cluster, compiled, weights_of
from support.layouts.plain_loop import gpt

SIX = (*FIVE, Layout(stages=2, tensor=2))
SMALL = gpt(blocks=2, width=16, micro_batches=2)
BEFORE = 2  # steps that the checkpoint has
TOLERANCE = 1e-5  # relative, of the next loss: float32 sums in another order


def fresh(layout: Layout) -> VirtualCluster:
    return cluster(SMALL, compiled(SMALL, layout).plan)


def save(ranks: VirtualCluster, folder: Path) -> None:
    folder.mkdir()
    for rank, body in ranks.ranks.items():
        write(folder, rank, choose_shards(ranks.plan, rank, body.variables))


def load(ranks: VirtualCluster, folder: Path) -> None:
    for rank, body in ranks.ranks.items():
        restore(folder, ranks.plan, rank, body.variables)


def values(ranks: VirtualCluster) -> dict[str, torch.Tensor]:
    """Logical values of all variables, states included."""
    return weights_of(ranks, states=True)


@cache
def trained(layout: Layout) -> tuple[dict[str, torch.Tensor], float]:
    """The values that the checkpoint has, and the loss of the step after it."""
    ranks = fresh(layout)
    ranks.run(BEFORE)
    before = values(ranks)
    return before, ranks.run(BEFORE + 1, first=BEFORE)[0]["loss"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each of the layouts."""
    folder = tmp_path_factory.mktemp("saved")
    for layout in SIX:
        ranks = fresh(layout)
        ranks.run(BEFORE)
        save(ranks, folder / str(layout))
    return folder


@pytest.mark.parametrize(
    ("writer", "reader"), list(product(SIX, SIX)), ids=lambda layout: str(layout)
)
def test_a_layout_goes_on_from_anothers_checkpoint(
    saved: Path, writer: Layout, reader: Layout
) -> None:
    before, loss = trained(writer)
    ranks = fresh(reader)
    load(ranks, saved / str(writer))
    found = values(ranks)
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], before[name]) for name in before)
    (next_step,) = ranks.run(BEFORE + 1, first=BEFORE)
    assert next_step["loss"] == pytest.approx(loss, rel=TOLERANCE)


@pytest.mark.parametrize("layout", SIX, ids=str)
def test_every_region_is_written_by_one_rank(layout: Layout) -> None:
    ranks = fresh(layout)
    written = Counter(
        shard.place
        for rank, body in ranks.ranks.items()
        for shard in choose_shards(ranks.plan, rank, body.variables)
    )
    regions = {
        shard.place
        for rank, body in ranks.ranks.items()
        for shard in collect_shards(ranks.plan, rank, body.variables).values()
    }
    assert written == Counter(regions)


def test_ranks_that_hold_the_same_share_the_writing() -> None:
    ranks = fresh(Layout(data=2))
    parts = [choose_shards(ranks.plan, rank, body.variables) for rank, body in ranks.ranks.items()]
    assert abs(len(parts[0]) - len(parts[1])) <= 1


def test_scalars_and_tensors_of_other_types_come_back(tmp_path: Path) -> None:
    given = {
        "scalar": torch.tensor(3.0),
        "counts": torch.arange(6).reshape(2, 3),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "wide": torch.tensor([[1 + 2j], [3 - 4j]], dtype=torch.complex128),  # not of safetensors
        "nothing": torch.empty(0, 3),
        "bits": torch.tensor([True, False, True]),
    }
    write(tmp_path, 0, [make_whole_shard(*item) for item in given.items()])
    assert read_contents(tmp_path) == {n: (tuple(v.shape), v.dtype) for n, v in given.items()}
    found = read_whole(tmp_path, given)
    assert all(torch.equal(found[name], given[name]) for name in given)


def region(first: int, value: torch.Tensor) -> Shard:
    """Elements of a tensor of eight from `first` on."""
    return Shard("a", (8,), ((first, len(value)),), value)


def test_a_region_is_read_from_all_that_overlap_it(tmp_path: Path) -> None:
    for rank, (first, end) in enumerate([(0, 3), (3, 5), (5, 8)]):
        write(tmp_path, rank, [region(first, torch.arange(first, end))])
    all_of_it = torch.zeros(8, dtype=torch.int64)
    read(tmp_path, [region(2, all_of_it[2:6])])
    assert all_of_it.tolist() == [0, 0, 2, 3, 4, 5, 0, 0]


def test_a_region_that_no_file_holds_is_told(tmp_path: Path) -> None:
    write(tmp_path, 0, [region(0, torch.ones(3))])
    with pytest.raises(RunError, match="it does not hold all of a"):
        read(tmp_path, [region(2, torch.zeros(2))])


def test_other_programs_read_the_files(tmp_path: Path) -> None:
    write(tmp_path, 0, [region(2, torch.ones(2))])
    assert load_file(tmp_path / "rank00000.safetensors")["a[2:4]"].tolist() == [1, 1]


def test_what_was_written_is_told_by_size_and_checksum(tmp_path: Path) -> None:
    written = write(tmp_path, 7, [region(0, torch.ones(5))])
    file = tmp_path / "rank00007.safetensors"
    assert written == (file.stat().st_size, zlib.crc32(file.read_bytes()))


def test_a_disk_that_refuses_is_told_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"rank00000\.safetensors"):
        write(tmp_path / "gone", 0, [region(0, torch.ones(1))])
