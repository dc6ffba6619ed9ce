import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrun.engine.errors import ArgumentError, RecipeError
from flowrun.launcher.data.images import ImageFolder
from flowrun.launcher.data.sampler import Sampler
from flowrun.launcher.data.transforms import MEAN, STD, import_torchvision, seed_draws, transform
from flowrun.launcher.model.targets import make_object

needs_torchvision = pytest.mark.skipif(not find_spec("torchvision"), reason="no torchvision")
needs_timm = pytest.mark.skipif(not find_spec("timm"), reason="no timm")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Three red and three blue images of unlike sizes."""
    from PIL import Image

    for name, colour in {"red": (255, 0, 0), "blue": (0, 0, 255)}.items():
        (tmp_path / name).mkdir()
        for k in range(3):
            Image.new("RGB", (40 + 9 * k, 50), colour).save(tmp_path / name / f"{k}.png")
    (tmp_path / "red" / "notes.txt").write_text("no image")
    return str(tmp_path)


def noise() -> Any:
    """An image in which no two pixels are alike."""
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (48, 40, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def v2(*names: str, **arguments: Any) -> list[Any]:
    import_torchvision()
    from torchvision.transforms import v2 as transforms

    return [getattr(transforms, name)(**arguments) for name in names]


@needs_torchvision
def test_a_folder_is_a_class_and_its_images_are_of_one_size(folder: str) -> None:
    data = ImageFolder(folder, size=28)
    assert data.classes == ["blue", "red"] and len(data) == 6
    for item in (data[k] for k in range(6)):
        assert item["images"].shape == (3, 28, 28) and item["images"].dtype == torch.float32
        assert type(item["images"]) is Tensor
        blue, red = item["images"][2].mean(), item["images"][0].mean()
        assert (red > blue) == bool(item["labels"])


@needs_torchvision
def test_labels_of_a_folder_need_no_decoding(folder: str) -> None:
    data = ImageFolder(folder, size=28)
    method = getattr(data, data.unprepared["labels"])
    assert [method(k).item() for k in range(6)] == [data[k]["labels"].item() for k in range(6)]


@needs_torchvision
def test_evaluation_cuts_out_the_middle(folder: str) -> None:
    made = ImageFolder(folder, size=28).augment((noise(), 1), None)["images"]
    scaled = noise().resize((32, 38), resample=2)
    middle = torch.from_numpy(np.array(scaled)[5:33, 2:30]).permute(2, 0, 1) / 255
    expected = (middle - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    torch.testing.assert_close(made, expected)


@needs_torchvision
@pytest.mark.parametrize(
    "given",
    [
        None,
        ("RandAugment",),
        ("RandomHorizontalFlip", "TrivialAugmentWide"),
        ("ToImage", "RandomPhotometricDistort"),
    ],
    ids=str,
)
def test_draws_are_a_function_of_the_generator(folder: str, given: tuple[str, ...] | None) -> None:
    own = {} if given is None else {"transforms": v2(*given), "eval_transforms": []}
    data = ImageFolder(folder, size=28, **own)
    one, again, *others = (
        data.augment((noise(), 1), np.random.default_rng(seed))["images"]
        for seed in (3, 3, *range(4, 12))
    )
    assert torch.equal(one, again) and not all(torch.equal(one, other) for other in others)


@needs_torchvision
def test_a_sample_is_transformed_alike_in_any_rows_and_anew_in_each_epoch(folder: str) -> None:
    data = ImageFolder(folder, 28, transforms=v2("RandomResizedCrop", size=28), eval_transforms=[])
    data.decode = lambda sample: (noise(), sample[1])  # type: ignore[method-assign]
    sampler = Sampler(data=data, seed=5, batch_size=4, micro_batches=1, held_out=5)
    whole = sampler(1, 0, slice(0, 4))["images"]
    assert torch.equal(whole[1:3], sampler(1, 0, slice(1, 3))["images"])
    assert len({float(image.sum()) for image in whole}) == 4  # of one sample, in four epochs
    assert not torch.equal(whole, replace(sampler, seed=6)(1, 0, slice(0, 4))["images"])


def test_the_generators_of_the_process_stay_as_they_were() -> None:
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.random())

    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1)
    expected = [draw() for _ in range(2)]
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1)
    first = draw()
    with seed_draws(2**62 + 7):
        inside = draw()
    with seed_draws(2**62 + 7):
        assert draw() == inside
    assert [first, draw()] == expected


def test_threads_that_draw_do_not_disturb_each_other() -> None:
    def draw(seed: int) -> list[float]:
        with seed_draws(seed):
            return [float(torch.rand(())) + random.random() for _ in range(50)]

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(draw, [*range(8)] * 4)] == [draw(seed) for seed in [*range(8)] * 4]


@needs_torchvision
def test_what_is_a_float_tensor_already_is_left_as_it_is() -> None:
    import_torchvision()
    assert transform(noise(), [lambda image: torch.ones(3, 2, 2)]).tolist() == [[[1.0] * 2] * 2] * 3


def made_folder(path: str, **given: Any) -> Any:
    """A folder of images as a recipe names it."""
    target = "flowrun.launcher.data.images.ImageFolder"
    return make_object({"_target_": target, "path": path, **given}, "data")


@needs_timm
@needs_torchvision
def test_timm_makes_the_transforms(folder: str) -> None:
    target = {"_target_": "timm.data.create_transform", "input_size": 32}
    training = {**target, "is_training": True, "auto_augment": "rand-m9-mstd0.5"}
    data = made_folder(folder, transforms=[training], eval_transforms=[target])
    one, again = (data.augment((noise(), 1), np.random.default_rng(3))["images"] for _ in range(2))
    assert torch.equal(one, again) and one.shape == data[0]["images"].shape == (3, 32, 32)


@needs_torchvision
def test_a_transform_that_is_not_there_is_named_with_its_key(folder: str) -> None:
    names = ("RandomHorizontalFlip", "RandomCropp")
    transforms = [{"_target_": f"torchvision.transforms.v2.{name}"} for name in names]
    with pytest.raises(RecipeError, match=r"data.transforms\[1\]._target_(.*\n)*.*RandomCrop"):
        made_folder(folder, transforms=transforms)


@needs_torchvision
def test_folders_without_images_are_refused(tmp_path: Path, folder: str) -> None:
    with pytest.raises(ArgumentError, match="there is no folder"):
        ImageFolder(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="give both transforms and eval_transforms"):
        ImageFolder(folder, transforms=[])
    (tmp_path / "green").mkdir()
    with pytest.raises(FileNotFoundError, match="no valid file for the classes green"):
        ImageFolder(str(tmp_path))
