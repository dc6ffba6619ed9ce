"""The recipes of docs/how_to/data.md make the data sets that they tell of."""

import re
from pathlib import Path

import pytest

from flowrun.launcher.data.corpus.tokens import write_tokens
from flowrun.launcher.job.job import Job
from flowrun.launcher.model.build import instantiate_data
from flowrun.launcher.recipe.compose import load
from support.nets.vision import is_installed

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "how_to" / "data.md").read_text()
USUAL = "defaults: [/model: mlp, /optim: sgd, /launch: virtual]\n"


def images(folder: Path) -> None:
    if not is_installed():
        pytest.skip("torchvision and timm are not installed")
    from PIL import Image

    for name in ("cat", "dog"):
        (folder / "images" / name).mkdir(parents=True)
        Image.new("RGB", (40, 50)).save(folder / "images" / name / "1.png")


def tokens(folder: Path) -> None:
    write_tokens(folder / "train.bin", [range(3000)])


def clicks(folder: Path) -> None:
    (folder / "log.csv").write_text("clicked,site,user,ad,price\n1,a,b,c,2\n0,a,b,d,3\n")


def saved(folder: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `huggingface` is not installed")
    made = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 4]]})
    datasets.DatasetDict({"train": made}).save_to_disk(folder / "saved")


FIELDS = {
    "Token files": (tokens, {"tokens", "targets"}),
    "Image folders": (images, {"images", "labels"}),
    "Click logs": (clicks, {"ids", "numbers", "clicks"}),
    "Hugging Face": (saved, {"tokens"}),
}


@pytest.mark.parametrize("section", list(FIELDS))
def test_a_recipe_of_the_page_makes_its_data(section: str, tmp_path: Path) -> None:
    write, fields = FIELDS[section]
    write(tmp_path)
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    given = ["recipe=snippet.yaml", "train.batch_size=2", "eval.batches=0"]
    snippets = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert snippets
    for snippet in snippets:
        whole = snippet if "defaults:" in snippet else USUAL + snippet
        (tmp_path / "snippet.yaml").write_text(whole)
        assert set(instantiate_data(load(given))[0]) == fields
        if "/model:" in snippet:
            Job(load(given), values=False)  # what the model reads is there
