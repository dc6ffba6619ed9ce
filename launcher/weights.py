"""Weights on disk: `weights.safetensors` in the run's folder, from any layout, is the state_dict of
the trained model: every name of it, those that forward does not read and all names of a tied weight
included.  Moving averages (optim.ema) make such a file too, `ema.safetensors`.

Each rank writes its shards to a file that says which slices of which tensors they are; files of all
ranks make one.  Where hosts share no disk: python -m flowrun.launcher.weights FOLDER OTHER_FOLDER …
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flowrun.engine.graph import Variable
from flowrun.engine.plan import Plan
from flowrun.engine.runtime.shards import Shard
from flowrun.launcher.checkpoint import About

FILE = "weights.safetensors"
AVERAGES = "ema.safetensors"
_EMA = "ema/"
_STEPS, _RANKS, _ABOUT, _SHARD = "steps", "num_ranks", "about", "shard/"  # metadata of a file


def save(folder: Path, values: Mapping[str, torch.Tensor], about: About) -> None:
    """Write logical values, those named ema/… too, by the names of the model's state_dict."""
    write(folder / FILE, values, about.names, about.step)
    if any(name.startswith(_EMA) for name in values):
        averaged = {
            name: _EMA + tensor if _EMA + tensor in values else tensor
            for name, tensor in about.names.items()
        }
        write(folder / AVERAGES, values, averaged, about.step)


def write(
    file: Path, values: Mapping[str, torch.Tensor], names: Mapping[str, str], steps: int
) -> None:
    """One file.  names: in the file -> among the values; a tensor with two names is written twice,
    so that torch and others load it by any.
    """
    state: dict[str, torch.Tensor] = {}
    seen: set[str] = set()
    for name, tensor in names.items():
        value = values[tensor].contiguous()
        state[name] = value.clone() if tensor in seen else value
        seen.add(tensor)
    save_file(state, file, {"format": "pt", _STEPS: str(steps)})


def steps_of(file: Path) -> int:
    """Steps that the weights of a file were trained for; -1 if it does not say."""
    with safe_open(file, "pt") as opened:
        return int((opened.metadata() or {}).get(_STEPS, -1))


def saved(plan: Plan) -> list[Variable]:
    """What is written: parameters, buffers and moving averages."""
    return [v for v in plan.graph.variables if v.kind != "state" or v.name.startswith(_EMA)]


def averages(plan: Plan) -> dict[str, str]:
    """Parameter -> its moving average, for those that have one."""
    return {v.of: v.name for v in plan.graph.variables if v.name.startswith(_EMA)}


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Read logical values."""
    return load_file(folder / FILE)


def save_shards(
    folder: Path, rank: int, num_ranks: int, shards: Iterable[Shard], about: About
) -> None:
    """A rank writes its part of the values, and of each tensor its logical shape and slices."""
    told = {_RANKS: str(num_ranks), _ABOUT: json.dumps(asdict(about))}
    values = {}
    for shard in shards:
        values[shard.name] = shard.value.detach().cpu().contiguous()
        told[_SHARD + shard.name] = json.dumps([shard.shape, shard.slices])
    save_file(values, _shard_file(folder, rank), told)


def has_all(folder: Path, num_ranks: int) -> bool:
    """True if the shards of all ranks lie in a folder."""
    return all(_shard_file(folder, rank).exists() for rank in range(num_ranks))


def join_shards(folders: Sequence[Path], num_ranks: int) -> Path:
    """Join the shards of all ranks, from any of the folders, to one file in the first of them.

    The shards go.  Raises FileNotFoundError for a rank that has none.
    """
    files = [_find(folders, rank) for rank in range(num_ranks)]
    values: dict[str, torch.Tensor] = {}
    for file in reversed(files):  # of copies that are unlike, the first rank's stays
        with safe_open(file, "pt") as shards:
            told = shards.metadata()
            for name in shards.keys():  # noqa: SIM118  (not a mapping)
                shape, slices = json.loads(told[_SHARD + name])
                part = shards.get_tensor(name)
                view = values.setdefault(name, torch.empty(shape, dtype=part.dtype))
                for dim, (start, length) in enumerate(slices):
                    view = view.narrow(dim, start, length)
                view.copy_(part)
    save(folders[0], values, About(**json.loads(told[_ABOUT])))
    for file in files:
        file.unlink()
    return folders[0] / FILE


def _find(folders: Iterable[Path], rank: int) -> Path:
    for folder in folders:
        if _shard_file(folder, rank).exists():
            return _shard_file(folder, rank)
    raise FileNotFoundError(f"no folder has the shards of rank {rank}: {_shard_file(Path(), rank)}")


def _shard_file(folder: Path, rank: int) -> Path:
    return folder / f"weights.rank{rank:05d}.safetensors"


def main(arguments: Sequence[str]) -> int:
    """Join the shards that lie in several folders, one for each host."""
    folders = [Path(text) for text in arguments]
    here = sorted(file for folder in folders for file in folder.glob("weights.rank*.safetensors"))
    if not here:
        print("python -m flowrun.launcher.weights FOLDER …: no weights.rank*.safetensors there.")
        return 2
    with safe_open(here[0], "pt") as shards:
        num_ranks = int(shards.metadata()[_RANKS])
    try:
        print(join_shards(folders, num_ranks))
    except FileNotFoundError as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
