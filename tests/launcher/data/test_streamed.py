"""Iterable data sets: read by number, in their own order, in any layout and after a resume."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from flowrun.engine.errors import RecipeError
from flowrun.launcher.data.collate import ItemError
from flowrun.launcher.data.named import Streamed
from flowrun.launcher.model.dataset_checks import random_fields
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from flowrun.launcher.store.checkpoint import find_step
from flowrun.launcher.store.weight_files import load as load_weights

LENGTH, STEPS = 41, 11  # 11 steps of 8 are over one epoch


class Items(Dataset[Any]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        x = torch.randn(64, generator=torch.Generator().manual_seed(k))
        return {"images": x, "labels": torch.tensor(k % 10)}


class Stream(IterableDataset[Any]):
    """The same, in turn; every `share`th of them alone."""

    def __init__(self, share: int = 1) -> None:
        self.share, self.opened = share, 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[Any]:
        self.opened += 1
        items = Items()
        return (items[k] for k in range(0, LENGTH, self.share))


class Changing(Stream):
    def __iter__(self) -> Iterator[Any]:
        self.opened += 1
        return ({"images": torch.full((64,), float(self.opened + k))} for k in range(LENGTH))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Items()[k] for k in range(10**9))


def of_datasets() -> Any:
    """A stream of Hugging Face's, which can skip."""
    import datasets

    names = ("images", "labels")
    rows = [{name: Items()[k][name].tolist() for name in names} for k in range(LENGTH)]
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3).with_format("torch")


def test_items_by_number_are_those_in_turn_however_they_are_asked_for() -> None:
    data = Streamed(stream := Stream(), kept=4)
    for index in (0, 1, 2, 0, 7, 5, 30, 29, 3, 40, 40, 0):
        assert not random_fields(data) or index
        assert torch.equal(data[index]["images"], Items()[index]["images"])  # type: ignore[index]
    opened = stream.opened
    assert [int(data[k]["labels"]) for k in range(LENGTH)] == [k % 10 for k in range(LENGTH)]  # type: ignore[index]
    assert stream.opened == opened and len(data._kept) == 4  # read on, and no more is held


@pytest.mark.parametrize(
    ("data", "index", "said"),
    [
        (Changing(), 0, "its first items change with each iteration"),
        (Stream(2), 30, "it ends after 21 items, and its length is 41"),
    ],
)
def test_what_is_not_the_same_each_time_is_refused(data: Stream, index: int, said: str) -> None:
    with pytest.raises(ItemError, match=said):
        [Streamed(data)[k] for k in range(index + 1)]


def test_a_stream_that_divides_itself_by_process_is_refused() -> None:
    data = Streamed(stream := Stream(), kept=2)
    assert data[0] and data[9]
    stream.share = 3  # as of a rank that sees torch.distributed, or of a worker
    with pytest.raises(ItemError, match="leave it to flowrun to divide them"):
        data[1]


# ---- runs ----------------------------------------------------------------------------------------

RECIPE = """
defaults: [/model: mlp, /optim: sgd, /launch: virtual]
task: {{inputs: {{x_BI: images}}}}
eval: {{fraction: 0.2, batches: 1, every: 4}}
train: {{batch_size: 8, micro_batches: 2, steps: 11, save_every: 4, keep: 0}}
log: []
data: {}
placement: {{axes: {{data: 1}}}}
"""
STREAMED = (
    f"{{_target_: {Streamed.__module__}.Streamed, length: {LENGTH}, data: {{_target_: {{0}}}}"
)
DATA = {
    "iterable": "{_target_: mod.Stream}",
    "datasets": "{_target_: flowrun.launcher.data.named.Streamed, length: 41, "
    "data: {_target_: mod.of_datasets}}",
}
ORDERED = "{_target_: mod.Items, order: {_target_: flowrun.models.sampling.in_order}}"
SINGLE, SEVERAL = "placement.axes={data: 1}", "placement={axes: {data: 2}, stages: 2}"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mod", sys.modules[__name__])


def trained(folder: Path, data: str, *keys: str, step: int = 0) -> tuple[list[Any], Any]:
    """The lines of steps and evaluations, and the weights."""
    start = find_step(folder, step) if step else None
    file = folder.with_suffix(".yaml")
    file.write_text(RECIPE.format(data))
    run(load([f"recipe={file}", *keys]), folder, None, start)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line.get("loss") or line["validation"] for line in lines], load_weights(folder)


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_a_run_reads_what_a_map_in_order_has_in_any_layout_and_resumed(
    data: str, tmp_path: Path
) -> None:
    expected, weights = trained(tmp_path / "map", ORDERED, SINGLE)
    assert trained(tmp_path / "out", data, SINGLE)[0] == expected
    trained(tmp_path / "out", data, SEVERAL, step=4)
    losses, found = trained(tmp_path / "out", data, SINGLE, step=8)
    assert len(losses) == len(expected) == STEPS + 3
    assert all(torch.allclose(found[name], weights[name], atol=1e-6) for name in weights)


@pytest.mark.processes
@pytest.mark.parametrize("keys", [(), ("launch.data_workers=2",)])
def test_ranks_and_their_workers_read_the_same(keys: tuple[str, ...], tmp_path: Path) -> None:
    expected, _ = trained(tmp_path / "map", ORDERED, SEVERAL)
    found, _ = trained(tmp_path / "out", DATA["iterable"], SEVERAL, "launch=local", *keys)
    assert found == expected


def test_a_stream_without_length_is_refused_with_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="does not say how many there are") as error:
        trained(tmp_path / "out", "{_target_: mod.Endless}")
    assert "named.Streamed, data: {_target_: this, …}, length: …" in error.value.instead
