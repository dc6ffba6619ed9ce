"""Special tokens in text: those of a template are ids, those that a message holds are letters.

A message may hold the letters of a special token, such as `<|end|>`.  As the id they would end an
answer, or begin one that nobody gave.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast

TextSpans = tuple[tuple[int, int], ...]  # (start, end) in characters
# They stand for the first character of a special token, so that all others keep their places:
_QUOTES = 0xD8F0  # in letters, until a template has written them; no text that is encoded has these
_MARKS = 0xFDD0  # in a token, when it is encoded; Unicode says that these are no characters


@dataclass(frozen=True)
class EncodedText:
    """The ids of a text.  places: (start, end) of each, in characters."""

    ids: list[int]
    places: list[tuple[int, int]]


class SpecialTokens:
    """The special tokens of a tokenizer, and how text is encoded that holds their letters.

    tokenizer: a loaded one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.backend: Tokenizer = tokenizer.backend_tokenizer
        added = self.backend.get_added_tokens_decoder().items()
        self.tokens = {k: each for k, each in added if each.special and each.content}
        contents = sorted((each.content for each in self.tokens.values()), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, contents)) or r"(?!)")
        self._firsts = sorted({content[0] for content in contents})
        self._marking: Tokenizer | None = None

    def quote(self, value: Any) -> Any:
        """Return a value of JSON whose text has special tokens quoted."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._sign(_QUOTES, match[0]), value)
        if isinstance(value, Mapping):
            return {key: self.quote(each) for key, each in value.items()}
        return [self.quote(each) for each in value] if isinstance(value, list) else value

    def unquote(self, text: str) -> tuple[str, TextSpans]:
        """Return a text without quotes, and the places of what was quoted."""
        places = []
        for k, first in enumerate(self._firsts):
            quote = chr(_QUOTES + k)
            places += [place for place, letter in enumerate(text) if letter == quote]
            text = text.replace(quote, first)
        matches = (self._pattern.match(text, place) for place in sorted(places))
        return text, tuple(each.span() for each in matches if each)

    def encode(
        self, texts: Sequence[str], letters: Sequence[TextSpans], places: Sequence[str] = ()
    ) -> list[EncodedText]:
        """Return the ids of texts, in which all special tokens count but those at `letters`.

        Raise ValueError, which begins with the text's place, for a tokenizer that has no other ids
        for such letters.
        """
        if not any(letters):
            encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
            return [EncodedText(each.ids, each.offsets) for each in encodings]
        places = places or [""] * len(texts)
        marked = [*map(self._mark, texts, letters, places)]
        if self._marking is None:
            self._marking = self._make_marking()
        encodings = self._marking.encode_batch(marked, add_special_tokens=False)
        ids = {
            self._marking.token_to_id(self._sign(_MARKS, token.content)): k
            for k, token in self.tokens.items()
        }
        for text, spans, each, place in zip(texts, letters, encodings, places, strict=True):
            self._check(text, spans, each, place)
        return [EncodedText([ids.get(k, k) for k in each.ids], each.offsets) for each in encodings]

    def _mark(self, text: str, letters: TextSpans, place: str) -> str:
        """Mark the special tokens of a text, except those at `letters`."""
        for k in range(len(self._firsts)):
            if chr(_MARKS + k) in text:
                raise ValueError(
                    f"{place}the text holds U+{_MARKS + k:X}, which is not a character"
                )
        starts = {start for start, _ in letters}

        def sign(match: re.Match[str]) -> str:
            return match[0] if match.start() in starts else self._sign(_MARKS, match[0])

        return self._pattern.sub(sign, text)

    def _sign(self, base: int, token: str) -> str:
        return chr(base + self._firsts.index(token[0])) + token[1:]

    def _make_marking(self) -> Tokenizer:
        """Make a tokenizer to which special tokens are letters, and marked ones are tokens."""
        from tokenizers import AddedToken, Tokenizer

        marking: Any = Tokenizer.from_str(self.backend.to_str())
        marking.post_processor = None
        marking.encode_special_tokens = True
        marking.add_tokens(
            [
                AddedToken(
                    self._sign(_MARKS, token.content),
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=False,
                )
                for token in self.tokens.values()
            ]
        )
        return marking  # type: ignore[no-any-return]

    def _check(self, text: str, letters: TextSpans, encoding: Encoding, place: str) -> None:
        """Raise ValueError if letters became the special token after all."""
        for k, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            token = self.tokens.get(k)
            if token and (start, end) in letters:
                raise ValueError(
                    f"{place}the text holds {text[start:end]!r}, and the tokenizer has no ids for "
                    "these letters but its special token: take them out"
                )
