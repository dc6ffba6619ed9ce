import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.files import replacing_files
from flowrun.launcher.urls import object_store
from flowrun.launcher.urls.object_store import ObjectStore, StoreError, is_url
from flowrun.launcher.urls.url_cache import on_disk
from support.runs.store_server import access, request, s3_server


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture(params=["memory", "file"])
def store(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> ObjectStore:
    monkeypatch.setattr(object_store, "_WAITS_S", (0.0, 0.0))
    folder = tmp_path_factory.mktemp("there") / "store"
    return ObjectStore.open(f"{request.param}://{folder}", "train.store")


@pytest.mark.parametrize(
    ("text", "found"),
    [("s3://b/x", True), ("memory://x", True), ("/a/b", False), ("s3:/b", False), ("s3://", False)],
)
def test_a_url_is_no_path(text: str, found: bool) -> None:
    assert is_url(text) is found


def test_what_is_put_is_got(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    store.put("in/a", tmp_path / "a")
    store.write("b", b"de")
    assert {name: about["size"] for name, about in store.find().items()} == {"in/a": 3, "b": 2}
    store.get("in/a", tmp_path / "new" / "a")
    assert (tmp_path / "new" / "a").read_bytes() == b"abc"
    store.remove(["in/a", "absent"])
    assert store.find().keys() == {"b"}


def test_what_fails_is_tried_again_and_half_of_a_file_counts_as_nothing(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("a", b"abcd")
    tried: list[str] = []

    def cut(path: str, to: str) -> None:
        tried.append(path)
        Path(to).write_bytes(b"abcd"[: len(tried)])

    monkeypatch.setattr(store.driver, "get_file", cut)
    with pytest.raises(StoreError, match="not all of the 4 bytes of a have arrived"):
        store.get("a", tmp_path / "a")
    assert len(tried) == 3 and [*tmp_path.iterdir()] == []
    store.get("a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"abcd"


def test_a_file_that_cannot_be_replaced_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_WAITS_S", ())
    store = ObjectStore.open(f"file://{tmp_path}/store", "x")
    store.write("a", b"old")
    (tmp_path / "a").write_bytes(bytes(2000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # as a disk that is full
    try:
        for act in (lambda: store.put("a", tmp_path / "a"), lambda: store.write("a", bytes(2000))):
            with pytest.raises(StoreError, match="File too large"):
                act()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.read("a") == "old" and store.find().keys() == {"a"}


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    code = (
        "import os\nfrom flowrun.launcher.urls.object_store import ObjectStore\n"
        f"store = ObjectStore.open('file://{tmp_path}/store', 'x')\n"
        "store._make('a', lambda path: os.kill(os.getpid(), 9))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    store = ObjectStore.open(f"file://{tmp_path}/store", "x")
    with replacing_files(tmp_path / "store") as made:  # another one is at work
        assert len([*(tmp_path / "store").iterdir()]) == 2
        store.write("a", b"")
        assert {*(tmp_path / "store").iterdir()} == {made, tmp_path / "store" / "a"}


def test_what_is_refused_is_not_tried_again(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def refuse(path: str, content: bytes) -> None:
        tried.append(path)
        raise PermissionError("Forbidden")

    monkeypatch.setattr(store.driver, "pipe_file", refuse)
    with pytest.raises(RecipeError) as caught, store.refusing("train.store"):
        store.write("a", b"")
    assert len(tried) == 1
    assert "cannot be used: PermissionError: Forbidden." in str(caught.value)
    assert "give the driver credentials for it: fsspec says how." in str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("foo://x", "foo://x cannot be opened: Protocol not known: foo."),
        ("gs://x", "gs://x cannot be opened: Please install gcsfs to access Google Storage."),
    ],
)
def test_a_url_without_a_driver_is_refused_at_its_key(url: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        ObjectStore.open(url, "data.path")
    assert caught.value.where == "data.path" and caught.value.problem == said
    assert "install flowrun[stores] and the driver: s3fs, gcsfs" in caught.value.instead


def test_a_copy_is_got_once_and_again_where_it_has_changed(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[str] = []
    get = type(store.driver).get_file

    def count(self: object, path: str, to: str) -> None:
        got.append(path)
        get(self, path, to)

    monkeypatch.setattr(type(store.driver), "get_file", count)
    store.write("corpus/a.txt", b"abc")
    url = f"{store.url}/corpus/a.txt"
    assert [on_disk(url, "data.path").read_bytes() for _ in range(2)] == [b"abc"] * 2
    assert on_disk(url, "data.path").name == "a.txt" and len(got) == 1
    store.write("corpus/a.txt", b"abd")
    assert on_disk(url, "data.path").read_bytes() == b"abd" and len(got) == 2
    folder = on_disk(f"{store.url}/corpus", "data.path")
    assert (folder / "a.txt").read_bytes() == b"abd"
    store.write("corpus/b.txt", b"e")
    store.remove(["corpus/a.txt"])
    folder = on_disk(f"{store.url}/corpus", "data.path")
    assert [file.name for file in folder.glob("*.txt")] == ["b.txt"]
    with pytest.raises(RecipeError, match="there is no object at"):
        on_disk(f"{store.url}/none", "data.path")
    assert on_disk("~/x", "data.path") == Path.home() / "x"


@pytest.mark.parametrize(
    ("changes", "url", "said"),
    [
        ({}, "s3://none/x", "FileNotFoundError: The specified bucket does not exist."),
        ({"AWS_ACCESS_KEY_ID": ""}, "s3://bucket/x", "NoCredentialsError: Unable to locate"),
        ({"AWS_SECRET_ACCESS_KEY": "y"}, "s3://bucket/x", "PermissionError: The AWS Access Key Id"),
    ],
    ids=["bucket", "no credentials", "wrong credentials"],
)
def test_a_bucket_that_is_refused_is_said_at_its_key(
    changes: dict[str, str], url: str, said: str, server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (access(server) | changes).items():
        monkeypatch.setenv(name, value)
        if not value:
            monkeypatch.delenv(name)
    if "AWS_SECRET_ACCESS_KEY" in changes:
        request(server, "POST", "/moto-api/reset-auth", b"0")  # from now on they are looked at
    with pytest.raises(RecipeError) as caught:
        ObjectStore.open(url, "train.store")
    assert caught.value.problem.startswith(f"{url} cannot be used: {said}")
    assert "for it: s3fs says how." in caught.value.instead


def test_a_run_without_a_url_imports_no_driver() -> None:
    code = (
        "import sys, torch; before = 'fsspec' in sys.modules\n"
        "import flowrun.launcher.run; assert before or 'fsspec' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", ["../../out", "a/../../../out", "/etc/out"])
def test_an_object_whose_name_leads_out_of_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    store = ObjectStore.open(f"memory://{tmp_path}/names", "where")
    store.driver.store[f"{store.root}/{name}"] = store.driver.open(f"{store.root}/x", "wb")
    with pytest.raises(StoreError, match="has no place in a folder"):
        store.find()
