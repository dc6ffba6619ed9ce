"""Files move between hosts that share no folder."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flowrun.engine.errors import RunError
from flowrun.launcher.ranks.rank_events import FileWritten, WeightsWritten
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.store.checkpoint import About, Checkpoint, complete, find_all, partial_folder
from flowrun.launcher.supervise.hosts import token
from flowrun.launcher.supervise.hosts.door import Door
from flowrun.launcher.supervise.hosts.endpoint import listen
from flowrun.launcher.supervise.hosts.moves import Moves
from flowrun.launcher.supervise.hosts.other_folder import FileServer, OtherFolder, open_folder
from flowrun.launcher.supervise.life.events import Company, FromHost, HostGone

RANKS = ("rank_00000.safetensors", "rank_00001.safetensors")


def written(name: str) -> tuple[int, int]:
    return len(name), zlib.crc32(name.encode())


def save(folder: Path, step: int) -> Checkpoint:
    """A checkpoint whose files hold their names."""
    partial = partial_folder(folder, step)
    partial.mkdir(parents=True)
    for name in RANKS:
        (partial / name).write_text(name)
    files = {name: written(name) for name in RANKS}
    (folder / "metrics.jsonl").write_text("{}\n")
    return complete(partial, About(step, 0, 1, {}, files=files), "name: x\n")


def with_door(
    tmp_path: Path, act: Callable[[str, FileServer], Awaitable[None]], served: str = "there"
) -> None:
    """Act while a launcher serves the files of a folder behind a door."""

    async def live() -> None:
        files = FileServer(tmp_path / served, 5.0)
        door = Door(files, 5.0)
        door.token = "known"
        door.open(listen("127.0.0.1"))
        try:
            await act(door.at, files)
        finally:
            await door.close(0.1)

    asyncio.run(live())


async def fetch(door: str, to: Path, step: int, known: str = "known") -> Checkpoint | None:
    async with open_folder(door, known, 5.0) as other:
        return await other.fetch_checkpoint(to, step, lines=True)


def test_a_checkpoint_is_fetched_whole_and_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here, fetched = save(tmp_path / "there", 4), tmp_path / "here", list[str]()
    mine = partial_folder(here, 4)
    mine.mkdir(parents=True)
    (mine / RANKS[1]).write_text(RANKS[1])  # this host's own rank wrote it
    get = OtherFolder.get

    async def note(self: OtherFolder, name: str, to: Path, *written: tuple[int, int]) -> bool:
        fetched.append(to.name)
        return await get(self, name, to, *written)

    monkeypatch.setattr(OtherFolder, "get", note)

    async def act(door: str, files: FileServer) -> None:
        for _ in range(2):
            assert (came := await fetch(door, here, 4)) and came.damage() == ""
        assert came.text() == there.text()
        assert await fetch(door, here, 5) is None

    with_door(tmp_path, act)
    assert sorted(set(fetched)) == ["metrics.jsonl", RANKS[0], "recipe.yaml", "restarts.jsonl"]
    assert [kept.step for kept in find_all(here)] == [4]


def test_a_file_that_has_changed_does_not_count(tmp_path: Path) -> None:
    (save(tmp_path / "there", 4).folder / RANKS[0]).write_text("x" * len(RANKS[0]))

    async def act(door: str, files: FileServer) -> None:
        with pytest.raises(RunError, match="has changed on its way"):
            await fetch(door, tmp_path / "here", 4)

    with_door(tmp_path, act)
    assert find_all(tmp_path / "here") == []


def test_a_checkpoint_that_is_read_is_known_to_its_host(tmp_path: Path) -> None:
    save(tmp_path / "there", 4)

    async def act(door: str, files: FileServer) -> None:
        async with open_folder(door, "known", 5.0) as other:
            assert await other.read("checkpoints/step_00000004/checkpoint.json")
            assert set(files.reading) == {4}
        while files.reading:
            await asyncio.sleep(0)

    with_door(tmp_path, act)


@pytest.mark.parametrize("name", ["../secret", ".token", "checkpoints/step_00000004/../../x"])
def test_other_files_are_not_served(tmp_path: Path, name: str) -> None:
    (tmp_path / "there").mkdir()

    async def act(door: str, files: FileServer) -> None:
        with pytest.raises(RunError):
            async with open_folder(door, "known", 5.0) as other:
                await other.read(name)
        with pytest.raises(RunError):
            await fetch(door, tmp_path / "here", 4, known="another")

    with_door(tmp_path, act)


def test_what_ranks_of_another_folder_write_counts_once_it_is_here(tmp_path: Path) -> None:
    """The events of the file's host come then, and it waits until it is fetched."""
    came: asyncio.Queue[Notice] = asyncio.Queue()
    weights, shard = WeightsWritten(1, "weights.rank00001.safetensors"), RANKS[1]
    event = FileWritten(4, shard, written(shard))

    async def act(door: str, files: FileServer) -> None:
        met = Company(names=("a", "b"), doors=("", door), sees=(True, False), epoch=1)
        first = Moves(tmp_path / "here", files, 5.0, came.put_nowait)
        second = Moves(tmp_path / "there", files, 5.0, came.put_nowait)
        first.met, second.met = met, replace(met, number=1)
        for each in (event, weights):
            second.owe(each)
            assert first.takes(FromHost(1, each))
        assert not first.takes(FromHost(1, HostGone(2, "")))
        assert not Moves(tmp_path, files, 5.0, came.put_nowait).takes(FromHost(1, event))
        await files.settle(lambda: False)
        await first.settle(5.0)
        second.owe(event)
        second.stop()  # that round is over, and its first host may be lost
        assert not files.owed
        assert {came.get_nowait(), came.get_nowait()} == {FromHost(1, e) for e in (event, weights)}

    there = partial_folder(tmp_path / "there", 4)
    there.mkdir(parents=True)
    (there / shard).write_text(shard)
    (tmp_path / "there" / weights.name).write_text("w")
    (tmp_path / "here").mkdir()
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setenv(token.TOKEN, "known")
        with_door(tmp_path, act)
    assert (partial_folder(tmp_path / "here", 4) / shard).read_text() == shard
    assert (tmp_path / "here" / weights.name).read_text() == "w"


def test_hosts_that_see_a_folder_know_it_by_one_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    names = [token.name_folder(tmp_path / each) for each in ("run", "link", "other")]
    assert names[0] == names[1] != names[2]
