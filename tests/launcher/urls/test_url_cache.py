"""hf://ORG/NAME: what the hub has, offline, from a cache of the hub's layout."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from flowrun.engine.errors import RecipeError
from flowrun.launcher.urls.url_cache import on_disk
from support.runs.command import Command, losses, run_folder
from support.samples.small_tokenizer import save_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def keep(hub: Path, name: str, folder: Path) -> None:
    """Put a folder into a cache of the hub, as huggingface_hub does: blobs, and links to them."""
    repo = hub / name.replace("/", "--")
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "blobs").mkdir()
    for file in (each for each in folder.rglob("*") if each.is_file()):
        blob = repo / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        link = repo / "snapshots" / COMMIT / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)


def test_a_folder_or_a_file_of_the_hub_is_found_without_a_network(tmp_path: Path) -> None:
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text("{}")
    keep(tmp_path / "home" / "hub", "models--org/gpt", tmp_path / "gpt")
    keep(tmp_path / "home" / "hub", "datasets--org/gpt", tmp_path / "gpt")
    names = ("gpt", f"gpt@{COMMIT}/config.json", "none", "gpt/none.json")
    urls = [*(f"hf://org/{name}" for name in names), "hf://datasets/org/gpt"]
    code = (
        "from flowrun.engine.errors import RecipeError\n"
        "from flowrun.launcher.urls.url_cache import on_disk\n"
        f"for url in {urls}:\n"
        "    try:\n        print(on_disk(url, 'x'))\n"
        "    except RecipeError as error:\n        print(error.problem)\n"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    said = subprocess.check_output([sys.executable, "-c", code], env=offline, text=True)
    found = tmp_path / "home" / "hub" / "models--org--gpt" / "snapshots" / COMMIT
    folder, file, absent, without, data = said.splitlines()
    assert (folder, file) == (str(found), str(found / "config.json"))
    assert absent.startswith("hf://org/none cannot be had of the hub: Cannot find")
    assert without == f"hf://org/gpt/none.json cannot be had of the hub: {found} has no none.json."
    assert data == str(found).replace("models--", "datasets--")


@pytest.mark.thorough
@pytest.mark.processes
def test_data_tokenizer_and_weights_of_the_hub_are_those_of_folders(place: Path) -> None:
    save_tokenizer(place / "gpt")
    rows = [{"text": f"the cat sat on the mat {k} times"} for k in range(60)]
    for split in ("train", "test"):
        (place / "rows" / "data").mkdir(parents=True, exist_ok=True)
        file = place / "rows" / "data" / f"{split}-00000-of-00001.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    net = ("model.depth=1", "model.width=16", "model.heads=2", "model.vocabulary=288")
    run = ("recipe=gpt_dp", "data=text_rows", "data.split=train", "data.length=8", *net)
    short = (*run, "train.steps=2", "train.batch_size=8", "eval.batches=0", "launch=virtual")
    disk = ("data.path=rows", "data.tokenizer=gpt")
    first = Command(place, *short, *disk, run_folder(place / "first")).end()
    assert first.status == 0, first.err
    (place / "first" / "weights.safetensors").rename(place / "gpt" / "weights.safetensors")
    keep(place / "home" / "hub", "datasets--org/rows", place / "rows")
    keep(place / "home" / "hub", "models--org/gpt", place / "gpt")
    hub = (
        "data.path=hf://datasets/org/rows",
        "data.tokenizer=hf://org/gpt",
        f"model.weights=hf://org/gpt@{COMMIT}/weights.safetensors",
    )
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "home")}
    words = (*short, *hub, run_folder(place / "hub"))
    second = Command(place, *words, variables=offline, fresh=True)
    third = Command(
        place, *short, *disk, "model.weights=gpt/weights.safetensors", run_folder(place / "third")
    )
    assert (second.end().status, third.end().status) == (0, 0), second.end().err
    assert losses(place / "hub") == losses(place / "third") != losses(place / "first")
    assert (place / "hub" / "tokenizer" / "tokenizer.json").is_file()  # not a link
    absent = (*short, *disk, "model.weights=hf://org/none", run_folder(place / "none"))
    ended = Command(place, *absent, variables=offline, fresh=True).end()
    assert ended.status == 2, ended.err
    assert "hf://org/none cannot be had of the hub: Cannot find" in ended.err


def test_a_name_that_the_hub_cannot_have_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"hf://gpt2 cannot be had of the hub: .*\n  Write hf://"):
        on_disk("hf://gpt2", "model.weights")
