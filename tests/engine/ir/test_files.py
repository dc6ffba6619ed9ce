import errno
from pathlib import Path

import pytest

from flowrun.engine.ir.files import (
    make,
    name_file,
    open_again,
    open_more,
    replace_text,
    replacing,
    replacing_files,
)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file that links point to."""
    file = tmp_path / "precious"
    file.write_text("mine")
    return file


def test_a_new_file_takes_the_place_of_a_link(tmp_path: Path, precious: Path) -> None:
    link = tmp_path / "new"
    link.symlink_to(precious)
    with open(make(link), "w") as opened:
        opened.write("other")
    assert (link.read_text(), link.is_symlink(), precious.read_text()) == ("other", False, "mine")


@pytest.mark.parametrize("opens", [open_more, open_again])
def test_a_file_that_is_a_link_is_not_opened_for_more(
    tmp_path: Path, precious: Path, opens: object
) -> None:
    link = tmp_path / "log"
    link.symlink_to(precious)
    with pytest.raises(OSError, match="log"):
        opens(link)  # type: ignore[operator]
    assert precious.read_text() == "mine"


def test_a_replaced_text_is_no_link_any_more(tmp_path: Path, precious: Path) -> None:
    link = tmp_path / "text"
    link.symlink_to(precious)
    replace_text(link, "né")
    assert (link.read_text("utf-8"), precious.read_text()) == ("né", "mine")


def test_an_error_leaves_what_was_there(tmp_path: Path, precious: Path) -> None:
    with pytest.raises(ZeroDivisionError), replacing(precious) as opened:
        opened.write(b"half")
        1 / 0  # noqa: B018
    assert precious.read_text() == "mine" and list(tmp_path.iterdir()) == [precious]


def test_a_full_disk_is_named_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    refused = pytest.raises(OSError, match=r"No space left on device: '.*metrics.jsonl'")
    with refused, name_file(file), open("/dev/full", "w") as full:
        full.write("x")


def test_a_library_writes_to_a_folder_without_following_its_links(
    tmp_path: Path, precious: Path
) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").symlink_to(precious)
    with replacing_files(folder) as made:
        (made / "config.json").write_text("{}")
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    assert ((folder / "config.json").read_text(), precious.read_text()) == ("{}", "mine")


def test_what_names_its_file_keeps_that_name(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="of its own"), name_file(tmp_path):
        raise OSError(errno.EIO, "no", "of its own")
