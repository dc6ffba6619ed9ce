import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flowrun.engine.errors import ArgumentError, RunError
from flowrun.engine.ir.own_files import cache_folder
from flowrun.launcher.job.forked import run_in_forks
from flowrun.launcher.urls.object_store import ObjectStore
from flowrun.launcher.urls.ranged_file import RangedFile, find_ranged
from support.runs.store_server import access, s3_server

CONTENT = bytes(range(250)) * 4


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"memory://{tmp_path}/a.bin"


def kept() -> dict[str, int]:
    """Bytes of the blocks of the cache, the longest unused first, by their numbers."""
    blocks = sorted(cache_folder().glob("blocks/*-*"), key=lambda file: file.stat().st_mtime_ns)
    return {file.name.rpartition("-")[2]: file.stat().st_size for file in blocks}


def ranged(url: str, cache_bytes: int = 300, block_bytes: int = 100) -> RangedFile:
    ObjectStore.connect(url, "x").write("", CONTENT[:-30])
    (found,) = find_ranged(url).values()
    return RangedFile(url, found.size, found.tag, cache_bytes, block_bytes)


@pytest.mark.parametrize("cache_bytes", [0, 99, 100, 300, 10_000])
def test_ranges_are_those_of_the_object_and_the_cache_stays_bounded(
    url: str, cache_bytes: int
) -> None:
    file, random = ranged(url, cache_bytes), np.random.default_rng(0)
    for length in (1, 7, 100, 450):
        starts = random.integers(0, file.size - length + 1, 20).tolist()
        found = file.gather(starts, length)
        assert [row.tobytes() for row in found] == [CONTENT[k : k + length] for k in starts]
        assert sum(kept().values()) <= cache_bytes
    assert len(kept()) == min(cache_bytes // 100, 10)


def test_the_longest_unused_block_goes_first(url: str) -> None:
    file = ranged(url)
    for number in (0, 1, 2):
        file.gather([100 * number], 1)
        (block,) = cache_folder().glob(f"blocks/*-100-{number}")
        os.utime(block, (number, number))
    file.gather([0], 1)
    file.gather([300], 1)
    assert [*kept()] == ["2", "0", "3"]


def test_a_damaged_block_is_fetched_again(url: str) -> None:
    file = ranged(url)
    file.gather([0], 1)
    (block,) = cache_folder().glob("blocks/*-*")
    block.write_bytes(CONTENT[1:3])
    assert file.gather([5], 3).tobytes() == CONTENT[5:8]
    assert kept() == {"0": 100}


def test_it_reads_as_a_file_does(url: str) -> None:
    file, there = ranged(url).open(), io.BytesIO(CONTENT[:-30])
    for offset, whence, count in ((5, 0, 210), (10, 1, 3), (-40, 2, 100), (2000, 0, 5), (0, 0, -1)):
        assert file.seek(offset, whence) == there.seek(offset, whence)
        assert file.read(count) == there.read(count) and file.tell() == there.tell()


def test_an_object_that_changes_meanwhile_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    (found,) = find_ranged(f"file://{tmp_path}/a.bin").values()
    file = RangedFile(found.url, found.size, found.tag, 0, 100)
    file.gather([0], 1)
    os.utime(tmp_path / "a.bin", (1, 1))
    with pytest.raises(RunError, match=r"a\.bin\n  the object has changed since the run began"):
        file.gather([0], 1)


def test_a_url_without_an_object_is_an_error(url: str) -> None:
    with pytest.raises(ArgumentError, match=r"path: there is no object at memory://.*a\.bin"):
        find_ranged(url)


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server() as port:
        yield port


def test_forks_of_a_reader_read_and_fill_one_cache(
    url: str, server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in access(server).items():
        monkeypatch.setenv(name, value)
    file = ranged("s3://bucket/ranges/a.bin", cache_bytes=500)
    assert file.gather([150], 100).tobytes() == CONTENT[150:250]

    def read(first: int) -> list[bytes]:
        starts = [*range(first, 900, 77)]
        return [row.tobytes() for row in file.gather(starts, 60)]

    firsts = (0, 20, 40)
    found = run_in_forks([lambda first=first: read(first) for first in firsts])
    expected = [[CONTENT[k : k + 60] for k in range(first, 900, 77)] for first in firsts]
    assert found == expected and len(kept()) <= 5
    ObjectStore.open("s3://bucket/ranges", "x").write("a.bin", CONTENT[30:])
    with pytest.raises(RunError, match="the object has changed"):
        RangedFile(file.url, file.size, file.tag, 0, 70).gather([0], 1)
