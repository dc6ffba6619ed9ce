"""A safetensors file of the shards of one process: its header says which slices of which tensors
they are, so that a reader takes what it needs of it.

A value of a dtype that safetensors does not know is stored as its bytes.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flowrun.engine.errors import RunError
from flowrun.engine.ir.files import make, name_file
from flowrun.engine.ir.placement import Shape, Slices
from flowrun.engine.runtime.rank.shards import Shard

CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_SHARD = "shard/"  # begins the keys of the header's metadata that describe shards
_PIECE = 1 << 22  # bytes that are summed and written while they are in the cache


class Written(NamedTuple):
    """The size of a file, in bytes, and its CRC-32, when it was written."""

    num_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard in an open file.  key: its name there.  name, shape: of the whole tensor."""

    key: str
    name: str
    shape: Shape
    slices: Slices
    dtype: torch.dtype


def write_shards(file: Path, shards: Sequence[Shard], metadata: Mapping[str, str]) -> Written:
    """Write a file; it is on the disk when this returns.  Raises OSError with the file's name.

    Python's lock is free while bytes are written, so that a thread which writes does not hold up
    one that computes.
    """
    kept = sorted(shards, key=lambda shard: -shard.value.element_size())  # so that all are aligned
    header, checksum, num_bytes = _make_header(kept, metadata), 0, 0
    with name_file(file), io.FileIO(make(file), "wb") as opened:
        for data in (memoryview(header), *(bytes_of(shard.value) for shard in kept)):
            for start in range(0, len(data), _PIECE):
                piece = data[start : start + _PIECE]
                checksum, num_bytes = zlib.crc32(piece, checksum), num_bytes + len(piece)
                while piece:
                    piece = piece[opened.write(piece) :]
        os.fsync(opened.fileno())
    return Written(num_bytes, checksum)


def bytes_of(value: Tensor) -> memoryview:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _make_header(shards: Sequence[Shard], given: Mapping[str, str]) -> bytes:
    metadata = dict(given)
    entries: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for shard in shards:
        value = shard.value
        start, end = end, end + value.nbytes
        place = ", ".join(f"{first}:{first + length}" for first, length in shard.slices)
        key = f"{shard.name}[{place}]"
        code, shape = CODES.get(value.dtype), tuple(value.shape)
        entries[key] = {
            "dtype": code or "U8",
            "shape": shape if code else (value.nbytes,),
            "data_offsets": (start, end),
        }
        dtype = str(value.dtype).removeprefix("torch.")
        metadata[_SHARD + key] = json.dumps([shard.name, shard.shape, shard.slices, dtype])
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# ---- reading -------------------------------------------------------------------------------------


class ShardFile:
    """An open file of shards.  metadata: strings of the header.  shards: what it holds."""

    def __init__(self, opened: safe_open) -> None:
        self._opened = opened
        self.metadata: Mapping[str, str] = opened.metadata() or {}
        self.shards = [
            _parse(key.removeprefix(_SHARD), text)
            for key, text in self.metadata.items()
            if key.startswith(_SHARD)
        ]

    def value(self, shard: StoredShard) -> Tensor:
        """Return a shard; its bytes are read from the disk as they are looked at."""
        value: Tensor = self._opened.get_tensor(shard.key)
        if value.dtype == shard.dtype:
            return value
        return value.view(shard.dtype).view([length for _, length in shard.slices])


@contextmanager
def open_shards(file: Path) -> Iterator[ShardFile]:
    """Open a file of shards.  Raises RunError if it is none."""
    try:
        opened = safe_open(file, "pt")
    except FileNotFoundError:
        raise RunError(str(file), "it is missing.") from None
    except (SafetensorError, OSError) as error:
        raise RunError(str(file), f"it is damaged: {type(error).__name__}: {error}.") from error
    with opened:
        yield ShardFile(opened)


def _parse(key: str, text: str) -> StoredShard:
    name, shape, slices, dtype = json.loads(text)
    region = tuple((start, length) for start, length in slices)
    return StoredShard(key, name, tuple(shape), region, getattr(torch, dtype))
