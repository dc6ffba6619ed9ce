from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, Subset, default_collate

from flowrun.launcher.data.clicks import ClickLog, Clicks
from flowrun.launcher.data.clusters import FeatureClusters, ImageClusters
from flowrun.launcher.data.collate import batch_of
from flowrun.launcher.data.corpus.masked import Masked
from flowrun.launcher.data.corpus.text import Text
from flowrun.launcher.data.corpus.tokens import Tokens, write_tokens
from flowrun.launcher.data.digits import Digits
from flowrun.launcher.data.huggingface import HuggingFace
from flowrun.launcher.data.images import Photographs
from flowrun.launcher.data.stacked import Rows, StackedDataset


def tokens(folder: Path) -> Tokens:
    write_tokens(folder / "t.bin", [range(700)])
    return Tokens(str(folder / "t.bin"), length=30)


def click_log(folder: Path) -> ClickLog:
    rows = "".join(f"{k % 2},{'abc'[k % 3]},{k}\n" for k in range(20))
    (folder / "log.csv").write_text("click,site,price\n" + rows)
    return ClickLog(str(folder / "log.csv"), "click", ["site"], ["price"], ids=20)


def hugging_face(folder: Path) -> HuggingFace:
    datasets = pytest.importorskip("datasets", reason="the extra `huggingface` is not installed")
    columns = {
        "ids": [[k, k + 1] for k in range(20)],
        "label": list(range(20)),
        "score": [k / 3 for k in range(20)],
    }
    table = datasets.table.InMemoryTable(pytest.importorskip("pyarrow").table(columns))
    datasets.Dataset(table, fingerprint="rows").save_to_disk(folder / "saved")
    return HuggingFace(str(folder / "saved"))


MADE: dict[type, Callable[[Path], StackedDataset]] = {
    Clicks: lambda _: Clicks(samples=50),
    ClickLog: click_log,
    FeatureClusters: lambda _: FeatureClusters(3, 20, 5),
    ImageClusters: lambda _: ImageClusters(3, 20, 33, 0.3),
    Digits: lambda _: Digits(),
    HuggingFace: hugging_face,
    Masked: lambda _: Masked(Text(length=32, max_bytes=2000), 256, 256),
    Text: lambda _: Text(length=7, max_bytes=2000),
    Tokens: tokens,
}


@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)
def test_a_batch_is_its_items_stacked(kind: type, tmp_path: Path) -> None:
    data = MADE[kind](tmp_path)
    for chosen in ([4], [len(data) - 1, 0, 7, 7, 2]):
        one_by_one = default_collate([data[index] for index in chosen])
        at_once = batch_of(data, torch.tensor(chosen))
        assert list(at_once) == list(one_by_one)
        for field, expected in one_by_one.items():
            assert at_once[field].dtype == expected.dtype
            assert torch.equal(at_once[field], expected), field


@pytest.mark.parametrize("kind", [Clicks, ImageClusters, Text, Masked], ids=lambda k: k.__name__)
def test_an_index_outside_ends_a_loop_over_items(kind: type, tmp_path: Path) -> None:
    data = MADE[kind](tmp_path)
    assert len(list(data)) == len(data)  # type: ignore[call-overload]
    with pytest.raises(IndexError):
        data[-1]


def test_an_image_is_a_pattern_of_its_class_one_of_its_own_and_noise() -> None:
    """As it has been since the first run: losses of recipes are compared over years."""

    def large(draws: np.random.Generator) -> Tensor:
        coarse = torch.from_numpy(draws.standard_normal((1, 3, 6, 6), dtype=np.float32))
        return F.interpolate(coarse, (20, 20), mode="bilinear", align_corners=False)[0]

    own = np.random.default_rng((2, 1, 8))
    noise = torch.from_numpy(own.standard_normal((3, 20, 20), dtype=np.float32))
    expected = large(np.random.default_rng((2, 0, 8 % 3))) + 0.4 * (large(own) + 0.3 * noise)
    assert torch.equal(ImageClusters(3, 20, 20, 0.4, seed=2)[8]["images"], expected)


def test_rows_of_unlike_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="'x': 3, 'y': 2"):
        Rows(x=torch.zeros(3), y=torch.zeros(2))


def test_torchs_own_way_is_used_where_a_data_set_has_it() -> None:
    class Many(Dataset[dict[str, Tensor]]):
        def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
            return [{"x": torch.tensor(index)} for index in indices]

    for data in (Many(), Subset(Many(), range(10))):  # type: ignore[arg-type]
        assert batch_of(data, torch.tensor([3, 1]))["x"].tolist() == [3, 1]


def test_one_by_one_is_as_good_where_a_data_set_has_neither() -> None:
    batch = batch_of(Photographs(16), torch.tensor([9, 2]))
    assert batch["labels"].tolist() == [1, 2] and batch["images"].shape == (2, 3, 32, 32)
