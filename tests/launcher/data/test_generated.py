from typing import Any

import numpy as np
import pytest
import torch

from flowrun.launcher.data.clusters import FeatureClusters, ImageClusters
from flowrun.launcher.data.corpus.masked import Masked
from flowrun.launcher.data.corpus.text import Text
from flowrun.launcher.data.images import Photographs
from flowrun.launcher.data.steps import TwoViews


@pytest.mark.parametrize(
    ("data", "field", "shape"),
    [
        (ImageClusters(5, 40, 16, 0.5), "images", (3, 16, 16)),
        (FeatureClusters(5, 40, 64, 0.5), "features", (64,)),
    ],
    ids=["images", "features"],
)
def test_items_of_a_class_are_nearer_to_each_other_than_to_others(
    data: Any, field: str, shape: tuple[int, ...]
) -> None:
    items, labels = (torch.stack([data[k][name] for k in range(40)]) for name in (field, "labels"))
    assert items.shape == (40, *shape) and labels.tolist() == [k % 5 for k in range(40)]
    distances = torch.cdist(items.flatten(1), items.flatten(1)).fill_diagonal_(torch.inf)
    assert torch.equal(labels[distances.argmin(1)], labels)


def masked(share: float = 0.25) -> Masked:
    return Masked(Text(length=32, max_bytes=20_000), 256, 256, share)


def test_every_sample_has_as_many_masked_positions() -> None:
    data, plain = masked(), Text(length=32, max_bytes=20_000)
    hidden = 0
    for k in range(100):
        item, tokens = data[k], plain[k]["tokens"]
        assert item["positions"].shape == (8,) and len(set(item["positions"].tolist())) == 8
        assert torch.equal(item["targets"], tokens[item["positions"]])
        untouched = torch.ones(32, dtype=torch.bool).scatter_(0, item["positions"], False)
        assert torch.equal(item["tokens"][untouched], tokens[untouched])
        hidden += int((item["tokens"] == 256).sum())
    assert 0.75 < hidden / 800 < 0.85


def test_photographs_are_windows_of_their_quarter() -> None:
    data = Photographs(samples=16, size=32)
    item = data[9]
    assert item["images"].shape == (3, 32, 32) and int(item["labels"]) == 1
    assert not torch.equal(data[1]["images"], item["images"])


@pytest.mark.parametrize(
    "data",
    [Photographs(samples=16), ImageClusters(classes=5, samples=16, size=8)],
    ids=lambda data: type(data).__name__,
)
def test_labels_of_images_need_no_images(data: Photographs | ImageClusters) -> None:
    method = getattr(data, data.unprepared["labels"])
    assert [method(k).item() for k in range(16)] == [data[k]["labels"].item() for k in range(16)]


def test_two_views_of_a_sample_hide_other_values() -> None:
    views = TwoViews(FeatureClusters(2, 4, 64), "features")
    one, other = views[1]["features"], views[1]["features"]
    assert one.shape == (2, 64) and torch.equal(one, other)
    assert not torch.equal(one[0], one[1]) and 0 < (one == 0).float().mean() < 0.5
    drawn = [views.hide(views.read(1), np.random.default_rng(k))["features"] for k in (0, 1)]
    assert not torch.equal(*drawn)
