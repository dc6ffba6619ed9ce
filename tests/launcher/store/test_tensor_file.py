import errno
import json
import math
import os
import weakref
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from flowrun.engine.ir.placement import Shape, Slices
from flowrun.engine.runtime.rank.shards import Shard, make_whole_shard
from flowrun.engine.runtime.transport.transport import cut
from flowrun.launcher.store.checkpoint import prepare
from flowrun.launcher.store.tensor_file import CODES, TensorFile, runs, write, write_whole

TOLD = {"format": "pt", "steps": "7"}


def value_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Some bytes, all of them unlike their neighbours (of bool: bits)."""
    count = math.prod(shape) * dtype.itemsize
    given = torch.arange(count, dtype=torch.int64) % (2 if dtype is torch.bool else 251)
    return given.to(torch.uint8).view(dtype).view(shape)


VALUES = {
    **{f"of {code}": value_of(dtype, 3, 4) for dtype, code in CODES.items()},
    "a scalar": value_of(torch.float32),
    "nothing": value_of(torch.float32, 0, 4),
    "an odd number of bytes": value_of(torch.int8, 5),
    "größer": value_of(torch.bfloat16, 4, 3, 2),
}
NAMES = {**dict.fromkeys(VALUES, ""), "tied": "größer"}
NAMES = {name: tensor or name for name, tensor in NAMES.items()}


def file_at(path: Path) -> TensorFile:
    """All the values, one of them under two names."""
    contents = {name: (tuple(value.shape), value.dtype) for name, value in VALUES.items()}
    return TensorFile.of(path, NAMES, contents, TOLD)


def halves() -> Iterator[Shard]:
    """Each value in two regions, cut along its last dim."""
    for name, value in VALUES.items():
        if not value.dim():
            yield make_whole_shard(name, value)
            continue
        size = value.shape[-1]
        for start, length in ((0, size // 2), (size // 2, size - size // 2)):
            slices = (*((0, n) for n in value.shape[:-1]), (start, length))
            yield Shard(name, tuple(value.shape), slices, cut(value, slices))


def parsed(file: Path) -> tuple[Any, bytes]:
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def test_it_is_the_file_that_safetensors_writes(tmp_path: Path) -> None:
    values = {name: VALUES[tensor].clone() for name, tensor in NAMES.items()}
    save_file(values, tmp_path / "a", TOLD)
    write_whole([file_at(tmp_path / "b")], halves())
    a, b = load_file(tmp_path / "a"), load_file(tmp_path / "b")
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape)
        assert torch.equal(a[name].view(-1).view(torch.uint8), b[name].view(-1).view(torch.uint8))


def test_of_usual_types_it_is_so_to_the_byte(tmp_path: Path) -> None:
    usual = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    values = {name: value for name, value in VALUES.items() if value.dtype in usual}
    contents = {name: (tuple(value.shape), value.dtype) for name, value in values.items()}
    save_file(values, tmp_path / "a", TOLD)
    file = TensorFile.of(tmp_path / "b", {name: name for name in values}, contents, TOLD)
    write_whole([file], (shard for shard in halves() if shard.name in values))
    assert parsed(tmp_path / "a") == parsed(tmp_path / "b")


def test_there_is_no_file_before_it_is_complete(tmp_path: Path) -> None:
    file = file_at(tmp_path / "weights")
    file.begin()
    write([file], halves())
    assert not file.path.exists()
    file.complete()
    assert [left.name for left in tmp_path.iterdir()] == ["weights"]


def test_what_a_killed_run_left_goes(tmp_path: Path) -> None:
    file = file_at(tmp_path / "weights.safetensors")
    file.begin()
    prepare(tmp_path, resumed=False)
    assert not list(tmp_path.iterdir())
    file.partial.write_bytes(b"\xff" * 2 * file.num_bytes)
    write_whole([file], halves())
    assert file.path.stat().st_size == file.num_bytes
    assert load_file(file.path).keys() == NAMES.keys()


def test_a_region_goes_before_the_next_is_made(tmp_path: Path) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def made() -> Iterator[Shard]:
        nonlocal most
        for shard in halves():
            alive.add(value := shard.value.clone())
            most = max(most, len(alive))
            shard = Shard(shard.name, shard.shape, shard.slices, value)
            del value
            yield shard
            del shard

    write_whole([file_at(tmp_path / "weights"), file_at(tmp_path / "ema")], made())
    assert most == 1


def test_a_disk_that_refuses_is_an_error_with_the_name_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = file_at(tmp_path / "weights")
    file.begin()
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OSError, match=r"No space left on device: '.*/weights\.partial'"):
        write([file], halves())


def test_a_disk_that_takes_little_at_once_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, offset: whole(handle, data[:3], offset))
    write_whole([file_at(tmp_path / "a")], halves())
    monkeypatch.undo()
    write_whole([file_at(tmp_path / "b")], halves())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# ---- how a region lies in its tensor -------------------------------------------------------------


@st.composite
def regions(draw: st.DrawFn) -> tuple[Shape, Slices]:
    """Of tensors with up to 4 dims, none of them empty."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    lengths = [draw(st.integers(1, n - start)) for n, start in zip(shape, starts, strict=True)]
    return shape, tuple(zip(starts, lengths, strict=True))


@given(regions())
def test_the_runs_of_a_region_are_its_elements_in_order(region: tuple[Shape, Slices]) -> None:
    shape, slices = region
    places = torch.arange(math.prod(shape)).view(shape)
    length, offsets = runs(shape, slices)
    found = [offset + k for offset, k in product(offsets, range(length))]
    assert found == cut(places, slices).flatten().tolist()


def test_rows_of_a_matrix_are_one_run() -> None:
    length, offsets = runs((4, 6, 5), ((1, 2), (0, 6), (0, 5)))
    assert (length, list(offsets)) == (60, [30])
