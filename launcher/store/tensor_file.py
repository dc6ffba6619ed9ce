"""A safetensors file that is written region by region, by one process or by several at once.

Where a tensor lies follows from names, shapes and types, so that each region is written by the
process that has it, and none holds more than that.  The file has another name until all of it
is on disk.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, product
from operator import mul
from pathlib import Path

import torch

from flowrun.engine.ir.files import PARTIAL, make, name_file, open_again, sync
from flowrun.engine.ir.placement import Shape, Slices
from flowrun.engine.runtime.rank.shard_file import CODES, bytes_of
from flowrun.engine.runtime.rank.shards import Shard

Contents = Mapping[str, tuple[Shape, torch.dtype]]  # logical, by name of the tensor


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The layout of a file: the place of everything in it.

    path: of the file, once it is complete.  header: its first bytes.  starts: tensor -> offsets of
    its first byte, one for each of its names.  num_bytes: size of the file.
    """

    path: Path
    header: bytes
    starts: Mapping[str, Sequence[int]]
    num_bytes: int

    @staticmethod
    def of(
        path: Path, names: Mapping[str, str], contents: Contents, metadata: Mapping[str, str]
    ) -> TensorFile:
        """Lay out a file at `path`.

        names: name in the file -> name among the contents.  A tensor with two names is written
        twice, so that torch and others load it by either.
        """
        entries: dict[str, object] = {"__metadata__": dict(metadata)}
        places, end = defaultdict(list), 0
        for name in sorted(names, key=lambda name: (-contents[names[name]][1].itemsize, name)):
            shape, dtype = contents[names[name]]
            start, end = end, end + math.prod(shape) * dtype.itemsize
            entries[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": (start, end)}
            places[names[name]].append(start)
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that tensors are aligned
        header = len(text).to_bytes(8, "little") + text
        starts = {
            tensor: [len(header) + start for start in found] for tensor, found in places.items()
        }
        return TensorFile(path, header, starts, len(header) + end)

    @property
    def partial(self) -> Path:
        """The file while it is being written."""
        return self.path.with_name(self.path.name + PARTIAL)

    def begin(self) -> None:
        """Regions may be written, by any process of this host.  One does this, once."""
        with name_file(self.partial):
            handle = make(self.partial)  # in place of what a killed run left
            try:
                os.truncate(handle, self.num_bytes)
                self._write(handle, memoryview(self.header), 0)
            finally:
                os.close(handle)

    def complete(self) -> None:
        """All regions have been written: from now on the file is there.  One does this, once."""
        sync(self.partial)
        self.partial.replace(self.path)
        sync(self.path.parent)

    @contextmanager
    def open(self) -> Iterator[int]:
        handle = open_again(self.partial)
        try:
            yield handle
        finally:
            os.close(handle)

    def put(self, handle: int, shard: Shard) -> None:
        """Write a region under each name of its tensor; nothing if the file has none."""
        starts = self.starts.get(shard.name, ())
        if not starts or not shard.value.numel():
            return
        data, size = bytes_of(shard.value), shard.value.itemsize
        length, offsets = runs(shard.shape, shard.slices)
        for k, offset in enumerate(offsets):
            piece = data[k * length * size : (k + 1) * length * size]
            for start in starts:
                self._write(handle, piece, start + offset * size)

    def _write(self, handle: int, data: memoryview, offset: int) -> None:
        """Raises OSError, with the name of the file, if the disk refuses."""
        with name_file(self.partial):
            while data:  # Linux takes at most 2 GiB at once
                written = os.pwrite(handle, data, offset)
                data, offset = data[written:], offset + written


def write(files: Sequence[TensorFile], shards: Iterable[Shard]) -> None:
    """Write regions, one after another, to each of the files, begun, that have their tensors."""
    with ExitStack() as stack:
        opened = [(file, stack.enter_context(file.open())) for file in files]
        for shard in shards:
            for file, handle in opened:
                file.put(handle, shard)
            del shard  # before the next is made


def write_whole(files: Sequence[TensorFile], shards: Iterable[Shard]) -> None:
    """The same, and from beginning to end: this process has all regions."""
    for file in files:
        file.begin()
    write(files, shards)
    for file in files:
        file.complete()


def runs(shape: Shape, slices: Slices) -> tuple[int, Iterator[int]]:
    """Split a region, not empty, into contiguous runs: (length of each, offsets), in elements."""
    strides = [1, *accumulate(reversed(shape[1:]), mul)][::-1]
    whole = 0  # dims at the end that the region has all of
    while whole < len(shape) and slices[-1 - whole] == (0, shape[-1 - whole]):
        whole += 1
    outer = max(0, len(shape) - whole - 1)  # dims before the last that is cut
    length = math.prod(size for _, size in slices[outer:])
    firsts = [
        [place * stride for place in range(start, start + size)]
        for (start, size), stride in zip(slices[:outer], strides, strict=False)
    ]
    inner = slices[outer][0] * strides[outer] if shape else 0
    return length, (inner + sum(place) for place in product(*firsts))
