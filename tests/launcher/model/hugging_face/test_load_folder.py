import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.write_text import open_writer
from flowrun.launcher.model.hugging_face.load_folder import load_text_model
from flowrun.launcher.model.pretrained import read, weights_of
from flowrun.models.llama import Llama
from support.nets.small_llama import small_llama
from support.samples.small_tokenizer import save_tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    small_llama(vocab_size=300).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def change(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))


def only(name: str, content: bytes) -> Callable[[Path], object]:
    """Return what replaces the weights by a file."""

    def damage(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(content)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a cut config": lambda folder: (folder / "config.json").write_text('{"model_type": "lla'),
    "a config that is a list": lambda folder: (folder / "config.json").write_text("[]"),
    "a size that is a word": lambda folder: change(folder, hidden_size="wide"),
    "a size without end": lambda folder: change(folder, hidden_size=10**7),
    "layers without end": lambda folder: change(folder, num_hidden_layers=10**9),
    "an unknown model": lambda folder: change(folder, model_type="nobody"),
    "code of its own": lambda folder: change(
        folder, model_type="x", auto_map={"AutoConfig": "evil.Evil"}
    ),
    "cut weights": lambda folder: (folder / WEIGHTS).write_bytes(
        (folder / WEIGHTS).read_bytes()[:200]
    ),
    "empty weights": lambda folder: (folder / WEIGHTS).write_bytes(b""),
    "a cut pickle": only("pytorch_model.bin", b"PK\x03\x04 and no more"),
    "an odd pickle": only("pytorch_model.bin", b"\x80\x02}q\x00."),
    "a pickle that calls": only("pytorch_model.bin", b"cos\nsystem\n(S'touch ran'\ntR."),
    "an empty index": only(INDEX, b""),
    "an index without a map": only(INDEX, b"{}"),
    "an index of other folders": only(INDEX, b'{"weight_map": {"a": "../b.safetensors"}}'),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_one_error_at_the_folder(
    name: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrun.launcher.model.hugging_face.load_folder._MOST_S", 0.5)
    folder = tmp_path / "model"
    folder.mkdir()
    for file in whole.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    DAMAGES[name](folder)
    with pytest.raises(RecipeError) as refused:
        open_writer(folder)
    assert str(folder) in refused.value.where and not (tmp_path / "ran").exists()
    if "pickle" in name or "index" in name or "weights" in name:
        with pytest.raises(RecipeError, match=r"cannot be read|has no weights|something else"):
            read(folder)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (
            "vocab_size",
            600,
            r"have lm_head\.weight as \(300, 16\), and config\.json as \(600, 16\)",
        ),
        ("num_hidden_layers", 2, r"lack model\.layers\.1\.input_layernorm\.weight, which config"),
    ],
)
def test_no_weight_is_drawn_at_random(
    key: str, value: int, reason: str, whole: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    change(folder, **{key: value})
    with pytest.raises(RecipeError, match=reason):
        load_text_model(folder)


def test_a_whole_folder_is_read(whole: Path) -> None:
    found = load_text_model(whole)
    assert torch.equal(found.lm_head.weight, read(whole)["lm_head.weight"])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "content", ["[]", '{"model_type": "lla', '{"model_type": "llama", "hidden_size": "x"}']
)
def test_a_damaged_config_beside_weights_is_one_error(
    whole: Path, tmp_path: Path, content: str
) -> None:
    (tmp_path / WEIGHTS).write_bytes((whole / WEIGHTS).read_bytes())
    (tmp_path / "config.json").write_text(content)
    ours = Llama(vocabulary=300, depth=1, heads=2, key_heads=2, width=16, inner=16)
    with pytest.raises(RecipeError, match=r"config\.json cannot be read"):
        weights_of(ours, str(tmp_path))
