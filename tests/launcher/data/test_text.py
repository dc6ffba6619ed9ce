from pathlib import Path

import pytest
import torch

from flowrun.launcher.data.corpus.text import Text
from flowrun.launcher.data.digits import Digits


def test_targets_are_one_byte_ahead(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abcdefgh")
    item = Text(str(tmp_path / "a.txt"), length=3)[1]
    assert bytes(item["tokens"].tolist()) == b"def" and bytes(item["targets"].tolist()) == b"efg"


def test_a_folder_is_read_in_sorted_order_up_to_its_cap(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_bytes(b"3456")
    (tmp_path / "a.txt").write_bytes(b"012")
    assert bytes(Text(str(tmp_path), length=2, max_bytes=5).stream) == b"01234"


@pytest.mark.parametrize(("size", "windows"), [(7, 2), (6, 1), (4, 1)])
def test_windows_do_not_overlap(tmp_path: Path, size: int, windows: int) -> None:
    (tmp_path / "a").write_bytes(bytes(size))
    assert len(Text(str(tmp_path / "a"), length=3)) == windows


def test_ids_of_bytes_are_below_256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abcdef")
    made = Text(str(tmp_path / "a"), length=3)
    assert (made.vocabulary, made.ids_digest) == (256, "bytes")


def test_too_short_a_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"3 bytes of .* do not fill a window"):
        Text(str(tmp_path / "a"), length=3)


def test_the_default_text_is_the_standard_library() -> None:
    text = Text(length=64, max_bytes=100_000)
    assert len(text) == 1562 and bytes(text.stream).count(b"import ") > 10


def test_digits_are_the_same_each_time() -> None:
    first, second = Digits(), Digits()
    assert len(first) == 1797 and first[0]["images"].shape == (64,)
    images = first.fields["images"]
    assert torch.equal(images, second.fields["images"]) and 0 <= images.min() <= images.max() <= 1
