"""Weights on disk: `weights.safetensors` in the run's folder, from any layout, is the state_dict of
the trained model: every name of it, those that forward does not read and all names of a tied weight
included.  Moving averages (optim.ema) make such a file too, `ema.safetensors`.

Ranks of one host write their regions into the one file (tensor_file.py).  Where there are several
hosts each rank writes a file of its shards, which says what slices of which tensors they are; the
first host joins those of all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from flowrun.engine.actors.plan import Plan
from flowrun.engine.capture.joint_graph import LOSS
from flowrun.engine.errors import RecipeError, RunError
from flowrun.engine.ir.files import PARTIAL
from flowrun.engine.ir.graph import Variable
from flowrun.engine.ir.placement import Shape
from flowrun.engine.runtime.rank.shard_file import CODES, open_shards, write_shards
from flowrun.engine.runtime.rank.shards import Shard
from flowrun.launcher.store.checkpoint import AVERAGES, WEIGHTS, About
from flowrun.launcher.store.tensor_file import Contents, TensorFile, write_whole
from flowrun.models.lora import AdaptedWeights

FILE = WEIGHTS
LOSS_FILE = "loss.safetensors"  # of a loss that is a module with parameters or buffers
_SHARDS = "weights.rank*.safetensors"  # * is five digits
_EMA = "ema/"
_STEPS, _ABOUT, _ADAPTERS = "steps", "about", "adapters"  # of a file's header


def check(contents: Contents, names: Mapping[str, str]) -> None:
    """Check before training that a file can hold the tensors.  Raises RecipeError."""
    for name, tensor in names.items():
        dtype = contents[tensor][1]
        if dtype not in CODES:
            raise RecipeError(
                "train.save",
                f"{name} is of {dtype}, which a safetensors file cannot hold.",
                f"train.save=false leaves {FILE} out; checkpoints (train.save_every) hold it.",
            )


def plan_files(folder: Path, contents: Contents, about: About) -> list[TensorFile]:
    """Lay out the files of weights that a run leaves in `folder`.

    contents: of the saved tensors, averages as ema/NAME.
    """
    out = [file_of(folder / FILE, contents, of_model(about.names), about.step, about.adapters)]
    if of_loss := {n.removeprefix(LOSS): t for n, t in about.names.items() if n.startswith(LOSS)}:
        out.append(file_of(folder / LOSS_FILE, contents, of_loss, about.step))
    if any(name.startswith(_EMA) for name in contents):
        averaged = averaged_names(contents, of_model(about.names))
        out.append(file_of(folder / AVERAGES, contents, averaged, about.step, about.adapters))
    return out


def averaged_names(contents: Contents, names: Mapping[str, str]) -> dict[str, str]:
    """Return name of a state_dict -> moving average of the tensor, or else the tensor."""
    return {
        name: _EMA + tensor if _EMA + tensor in contents else tensor
        for name, tensor in names.items()
    }


def of_model(names: Mapping[str, str]) -> dict[str, str]:
    """Drop the names of what the loss holds."""
    return {name: tensor for name, tensor in names.items() if not name.startswith(LOSS)}


def file_of(
    path: Path,
    contents: Contents,
    names: Mapping[str, str],
    steps: int,
    adapters: AdaptedWeights | None = None,
) -> TensorFile:
    metadata = {"format": "pt", _STEPS: str(steps)}
    if adapters:
        metadata[_ADAPTERS] = json.dumps(asdict(adapters))
    return TensorFile.of(path, names, contents, metadata)


def steps_of(file: Path) -> int:
    """Steps that the weights of a file were trained for; -1 if it does not say.

    Raises RunError for a file that is no safetensors file.
    """
    with _header(file) as metadata:
        return int(metadata.get(_STEPS, -1))


def adapters_of(file: Path) -> AdaptedWeights | None:
    """Return the adapters among the weights of a file; None: there are none.  Raises RunError."""
    with _header(file) as metadata:
        text = metadata.get(_ADAPTERS)
        return AdaptedWeights.of_json(json.loads(text)) if text else None


@contextmanager
def _header(file: Path) -> Iterator[Mapping[str, str]]:
    """Yield the strings of a file's header; an error about them is one about the file."""
    try:
        with safe_open(file, "pt") as opened:
            yield opened.metadata() or {}
    except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(str(file), f"it is damaged: {error}.") from error


def saved_variables(plan: Plan) -> list[Variable]:
    """Return the variables that are written: parameters, buffers and moving averages."""
    return [v for v in plan.variables.values() if v.kind != "state" or v.name.startswith(_EMA)]


def averages(plan: Plan) -> dict[str, str]:
    """Parameter -> its moving average, for those that have one."""
    return {v.of: v.name for v in plan.variables.values() if v.of and v.name.startswith(_EMA)}


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Read logical values of a run's weights, those of a loss with LOSS before their names."""
    file = folder / LOSS_FILE
    of_loss = load_file(file) if file.exists() else {}
    return load_file(folder / FILE) | {LOSS + name: value for name, value in of_loss.items()}


# ---- several hosts -------------------------------------------------------------------------------


def save_shards(folder: Path, rank: int, shards: Iterable[Shard], about: About) -> Path:
    """Write a rank's part of the values, with the logical shape and the slices of each tensor;
    return the file.
    """
    header = {_ABOUT: json.dumps(asdict(about))}
    file = _shard_file(folder, rank)
    partial = file.with_name(file.name + PARTIAL)
    write_shards(partial, list(shards), header)
    partial.replace(file)
    return file


def drop_shards(folder: Path) -> None:
    """Remove the shards of an earlier run, or of a host whose shards the first has joined."""
    for file in [*folder.glob(_SHARDS.replace("*", "[0-9]" * 5))]:
        file.unlink(missing_ok=True)  # another host may see the same folder


def join_shards(folder: Path, num_ranks: int) -> None:
    """Join the shards of all ranks to one file; one shard after another is in memory, and the
    shards go.  Raises RunError for a rank that has none.
    """
    found = [_shard_file(folder, rank) for rank in range(num_ranks)]
    contents: dict[str, tuple[Shape, torch.dtype]] = {}
    for file in found:
        with open_shards(file) as opened:
            about = About.of_mapping(json.loads(opened.metadata[_ABOUT]))
            contents |= {each.name: (each.shape, each.dtype) for each in opened.shards}
    write_whole(plan_files(folder, contents, about), _shards_of(found))
    for file in found:
        file.unlink()


def _shards_of(files: Iterable[Path]) -> Iterator[Shard]:
    for file in files:
        with open_shards(file) as opened:
            for each in opened.shards:
                yield Shard(each.name, each.shape, each.slices, opened.value(each))


def _shard_file(folder: Path, rank: int) -> Path:
    return folder / _SHARDS.replace("*", f"{rank:05d}")
