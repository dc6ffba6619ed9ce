"""Weights that training starts from: `model.weights`, read into the model by its own names.

A safetensors file (such as a run leaves), a file of torch.save, or a folder of Hugging Face's
(model.safetensors or pytorch_model.bin, in one file or several with an index).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from flowrun.engine.errors import RecipeError, refuse_as
from flowrun.launcher.model.adapters import base_names
from flowrun.launcher.model.hugging_face.convert_models import KEY, drop_needless, rename_to_ours
from flowrun.launcher.model.initial import named_tensors
from flowrun.launcher.urls.url_cache import on_disk

_IN_FOLDER = ("model.safetensors", "pytorch_model.bin", "weights.safetensors")
_SHOWN = 4  # names in an error


def weights_of(model: nn.Module, path: str) -> dict[str, Tensor]:
    """Values of a file or folder, by the model's names for its parameters and buffers; pages of
    the files, which are read when somebody looks at them.

    Raises RecipeError if a name is missing or unexpected, or a shape is another.
    """
    where = on_disk(path, KEY)
    found = rename_to_ours(model, where, read(where))
    state = model.state_dict(keep_vars=True)
    names_of_base = base_names(model)
    adapters = {name: state[name] for name in {*state} - {*names_of_base.values()}}
    if not adapters.keys() & found.keys():  # of the base alone: adapters begin anew
        found = {names_of_base.get(name, name): value for name, value in found.items()}
        _check_names(model, {k: v for k, v in state.items() if k not in adapters}, found, path)
    else:
        _check_names(model, state, found, path)
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    return {names[id(state[name])]: value for name, value in found.items() if name in state}


def read(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, or of the files of a folder, by name.  Raises RecipeError."""
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise RecipeError(KEY, f"there is no file or folder {path}.", "A path is relative to here.")

    def refuse(error: Exception) -> RecipeError:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return RecipeError(KEY, f"{path} cannot be read: {reason}")

    with refuse_as(refuse):  # opcodes of a damaged pickle make whatever they say
        found = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
        )
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        raise RecipeError(KEY, f"{path} holds something else than names and tensors.")
    return dict(found)


def _read_folder(folder: Path) -> dict[str, Tensor]:
    for name in _IN_FOLDER:
        if (folder / name).is_file():
            return read(folder / name)
        index = folder / f"{name}.index.json"
        if index.is_file():
            return {k: value for file in _files_of(index) for k, value in read(file).items()}
    raise RecipeError(
        KEY, f"{folder} has no weights.", f"It should have {', '.join(_IN_FOLDER)} or their index."
    )


def _files_of(index: Path) -> list[Path]:
    """Return the files that an index names, all in its folder.  Raises RecipeError."""
    try:
        names = {*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        if not names or any(Path(name).name != name for name in names):
            raise ValueError("its weight_map names no files of the folder")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise RecipeError(KEY, f"{index} cannot be read: {what}") from error
    return [index.with_name(name) for name in sorted(names)]


def _check_names(
    model: nn.Module, state: Mapping[str, Tensor], found: Mapping[str, Tensor], path: str
) -> None:
    there = {id(state[name]) for name in found if name in state}
    problems = {
        "are missing": [n for n, x in state.items() if id(x) not in there],  # tied: one name does
        "are not the model's": drop_needless(model, [name for name in found if name not in state]),
        "have another shape": [
            f"{name} is {tuple(found[name].shape)} there and {tuple(value.shape)} here"
            for name, value in state.items()
            if name in found and found[name].shape != value.shape
        ],
    }
    lines = [
        f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{' …' if names[_SHOWN:] else ''}"
        for what, names in problems.items()
        if names
    ]
    if lines:
        raise RecipeError(
            KEY,
            "\n".join([f"{path} is not of this model:", *lines]),
            "The names are those of the model's state_dict().",
        )
