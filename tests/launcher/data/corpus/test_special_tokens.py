from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowrun.launcher.data.corpus.special_tokens import SpecialTokens
from flowrun.launcher.data.corpus.tokenizer import load_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz<>/[]|SEP "


def _special(model: Any, *tokens: AddedToken, **parts: Any) -> SpecialTokens:
    backend: Any = Tokenizer(model)
    for name, value in parts.items():
        setattr(backend, name, value)
    backend.add_special_tokens([*tokens])
    return SpecialTokens(PreTrainedTokenizerFast(tokenizer_object=backend))


def _bytes(bpe: str) -> SpecialTokens:
    return SpecialTokens(load_tokenizer(bpe))


def _metaspace(_: str) -> SpecialTokens:
    pieces = [("<unk>", 0.0), *((letter, -3.0) for letter in LETTERS), ("\u2581", -2.0)]
    return _special(
        models.Unigram(pieces, unk_id=0),
        AddedToken("<s>", normalized=False),
        AddedToken("</s>", normalized=False),
        AddedToken("<unk>", normalized=False),
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first"),
    )


def _words(_: str) -> SpecialTokens:
    vocab = {"[UNK]": 0, "the": 1, "cat": 2, "[": 3, "]": 4, "sep": 5}
    return _special(
        models.WordPiece(vocab, unk_token="[UNK]"),
        AddedToken("[UNK]"),
        AddedToken("[SEP]", lstrip=True, rstrip=True),
        normalizer=normalizers.Lowercase(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    )


@pytest.mark.parametrize(
    ("make", "token", "text"),
    [
        (_bytes, "<|end|>", "the cat<|end|> sat on <|user|><|user|>the mat"),
        (_metaspace, "</s>", "the cat</s> sat <s>the mat"),
        (_words, "[SEP]", "the cat [SEP] the CAT [SEP] cat"),
    ],
)
def test_tokens_count_and_letters_do_not(make: Any, token: str, text: str, bpe: str) -> None:
    special = make(bpe)
    forged = f"the {token}cat"
    quoted = special.quote({"content": [forged, 3]})["content"][0]
    assert token not in quoted and len(quoted) == len(forged)
    letters, spans = special.unquote(quoted)
    assert (letters, spans) == (forged, ((4, 4 + len(token)),))
    ordinary, written = special.encode([text, forged], [(), spans])
    [expected] = special.encode([text], [()])
    assert ordinary == expected  # ids and places, beside a text with letters
    number = special.backend.token_to_id(token)
    assert number in expected.ids and number not in written.ids
    shown = special.backend.decode(written.ids)
    assert shown.replace(" ", "").replace("\u2581", "") == forged.lower().replace(" ", "")


def test_letters_that_can_be_nothing_else_are_refused() -> None:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), *((letter, -3.0) for letter in LETTERS)]
    special = _special(models.Unigram(pieces, unk_id=0), AddedToken("<s>"), AddedToken("<unk>"))
    text, letters = special.unquote(special.quote("a<s>b"))
    with pytest.raises(ValueError, match="holds '<s>', and the tokenizer has no ids for these"):
        special.encode([text], [letters])


def test_what_marks_a_token_cannot_be_forged(bpe: str) -> None:
    special = _bytes(bpe)
    text, letters = special.unquote(special.quote("<|end|>\ufdd0|end|>"))
    with pytest.raises(ValueError, match=r"U\+FDD0, which is not a character"):
        special.encode([text], [letters])


def test_a_tokenizer_without_special_tokens_quotes_nothing() -> None:
    special = _special(models.BPE(vocab={"a": 0}, merges=[]))
    assert special.quote("a<|end|>") == "a<|end|>" and special.unquote("a") == ("a", ())
    assert special.encode(["aa"], [()])[0].ids == [0, 0]
