from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrun.launcher.data.corpus.answers import AnsweredDocuments
from flowrun.launcher.data.corpus.chat import Instructions
from flowrun.launcher.data.corpus.documents import Documents
from flowrun.launcher.data.corpus.packed import DocumentSamples, cut_documents
from flowrun.launcher.data.corpus.text_rows import TextRows
from flowrun.launcher.data.mixture import DataMixture
from support.samples.row_files import write_rows as write

LENGTH = 12
SIZES = st.lists(st.integers(2, LENGTH + 1), min_size=1, max_size=30)


def make_documents(sizes: list[int], answers: bool = True) -> Documents:
    """Make documents of so many ids, each with ids that no other one has; the last is an answer."""
    ends = np.cumsum(sizes)
    marks = np.zeros(ends[-1], bool)
    marks[ends - 1] = True
    return Documents(
        ids=np.arange(1, ends[-1] + 1).astype("<u2"),
        answers=marks if answers else None,
        starts=np.concatenate([[0], ends]),
        vocabulary=1000,
        ids_digest="",
        end=0,
        notes=(),
    )


def pieces_of(item: dict[str, Tensor]) -> list[tuple[list[int], list[int]]]:
    """Return tokens and targets of each document of a packed sample, padding left out."""
    found, start = [], 0
    for size in item["documents"].tolist():
        inside = slice(start, start + size)
        assert item["positions"][inside].tolist() == [*range(size)]
        tokens, targets = (item[name][inside].tolist() for name in ("tokens", "targets"))
        used = sum(token != 0 for token in tokens)
        assert not any(tokens[used:]) and all(target == -100 for target in targets[used:])
        if used:
            found.append((tokens[:used], targets[:used]))
        start += size
    assert start == len(item["tokens"])
    return found


@given(SIZES, st.sampled_from([None, 1, 2, 5]))
def test_each_document_is_there_once_as_it_is_alone(sizes: list[int], most: int | None) -> None:
    documents = make_documents(sizes)
    alone = AnsweredDocuments(documents, LENGTH, None)
    packed = AnsweredDocuments(documents, LENGTH, None, pack=True, most_documents=most)
    expected = []
    for size, item in zip(sizes, (alone[k] for k in range(len(alone))), strict=True):
        expected.append([item[name][: size - 1].tolist() for name in ("tokens", "targets")])
    found = [piece for k in range(len(packed)) for piece in pieces_of(packed[k])]
    assert sorted(map(list, found)) == sorted(expected)
    widest = {len(packed[k]["documents"]) for k in range(len(packed))}
    assert len(widest) == 1 and widest.pop() <= (most or len(sizes))


@given(SIZES)
def test_no_two_samples_would_fit_into_one(sizes: list[int]) -> None:
    data = DocumentSamples(
        made := make_documents(sizes), made.starts[:-1], np.array(sizes), LENGTH, True
    )
    used = [sum(len(tokens) for tokens, _ in pieces_of(data[k])) for k in range(len(data))]
    assert all(one + other > LENGTH for k, one in enumerate(used) for other in used[:k])


def test_documents_go_where_they_leave_the_least_room() -> None:
    documents = make_documents([11, 9, 4, 3, 9])  # tokens: 10 8 3 2 8
    data = DocumentSamples(
        documents, documents.starts[:-1], np.diff(documents.starts), LENGTH, True
    )
    lengths = [data[k]["documents"].tolist() for k in range(len(data))]
    assert lengths == [[10, 2], [8, 4], [12, 0]]  # what is left counts to the last
    assert data.notes == (
        "5 documents are packed into 3 samples of 12 tokens, which are 86.1% full; with one "
        "document each they would be 51.7%",
    )


def test_many_samples_at_once_are_those_of_one_by_one() -> None:
    documents = make_documents([5, 7, 3, 13, 2, 6, 4])
    data = AnsweredDocuments(documents, LENGTH, None, pack=True)
    batch = data.stacked(torch.tensor([2, 0, 1]))
    for row, index in enumerate((2, 0, 1)):
        for field, values in data[index].items():
            assert torch.equal(batch[field][row], values) and values.dtype == torch.int64


def test_long_texts_are_cut_into_pieces_that_lose_no_target() -> None:
    documents = make_documents([30, 1, 5], answers=False)
    data = DocumentSamples(documents, *cut_documents(documents, LENGTH), LENGTH, True)
    found = sorted(piece for k in range(len(data)) for piece in pieces_of(data[k]))
    assert [len(tokens) for tokens, _ in found] == [12, 12, 5, 4]
    assert [t for _, targets in found for t in targets] == [*range(2, 31), *range(33, 37)]


def test_rows_of_text_and_instructions_are_packed(tmp_path: Path, bpe: str) -> None:
    path = write(tmp_path, *({"text": "the cat", "q": "the", "a": "dog"} for _ in range(12)))
    plain = TextRows(path, bpe, length=32, pack=True)
    asked = Instructions(path, bpe, 32, prompt="{q}\n", answer="{a}", pack=True)
    for data in (plain, asked):
        assert {*data[0]} == {"tokens", "targets", "positions", "documents"}
        assert len(data) < 12 and "12 documents are packed into" in data.notes[-1]


def test_sources_of_a_mixture_have_as_many_documents(tmp_path: Path, bpe: str) -> None:
    path = write(tmp_path, *({"text": "the cat", "other": "the"} for _ in range(30)))

    def sources(most: int | None) -> dict[str, TextRows]:
        fields = ("text", "other")
        made = {f: TextRows(path, bpe, 32, f, pack=True, most_documents=most) for f in fields}
        return made

    with pytest.raises(ValueError, match="give all one most_documents"):
        DataMixture(sources(None), length=32)
    assert len(DataMixture(sources(6), length=32)[0]["documents"]) == 6


def test_what_cannot_be_packed_is_refused() -> None:
    documents = make_documents([3, 4])
    with pytest.raises(ValueError, match="most_documents: it must be 1 or more, not 0"):
        AnsweredDocuments(documents, LENGTH, None, pack=True, most_documents=0)
    none = make_documents([1, 1], answers=False)
    with pytest.raises(ValueError, match="no document has two ids"):
        DocumentSamples(none, *cut_documents(none, LENGTH), LENGTH, True)
