"""Text to ids and back: bytes as they are, or a tokenizer of the library `tokenizers`."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrun.engine.errors import ArgumentError, FlowrunError, RecipeError, refuse_as
from flowrun.engine.runtime.process.own_process import bound_work
from flowrun.launcher.data.corpus.special_tokens import SpecialTokens
from flowrun.launcher.data.corpus.text import Text
from flowrun.launcher.data.corpus.tokenizer import (
    TOKENIZER,
    find_beginning,
    load_tokenizer,
    vocabulary_of,
)
from flowrun.launcher.model.targets import new_name
from flowrun.launcher.recipe.recipe_errors import CommandLineError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

KEY = "data.tokenizer"
BYTES = "bytes"  # in place of a tokenizer's path
_MARK = "a question"  # stands for one in a chat template
Message = Mapping[str, str]  # {role: user or assistant, content: …}


class ByteCodec:
    """An id is a byte of UTF-8.  size: ids are below it.  ends: ids that end a text."""

    size = 256
    ends: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Refuse: bytes have no chat template."""
        raise _no_template("ids are bytes", messages)

    def decoder(self, before: list[int]) -> Callable[[int], str]:
        """Return a function from the next id to the text that it completes; "" where it is a part
        of a character.

        before: ids that come before the first.  Bytes that are no UTF-8 become U+FFFD.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda byte: decoder.decode(bytes([byte]))


class TokenizerCodec:
    """The ids of a tokenizer of transformers."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, size: int, ends: frozenset[int]) -> None:
        self.tokenizer, self.size, self.ends = tokenizer, size, ends
        self.backend = tokenizer.backend_tokenizer
        self._beginning = len(find_beginning(tokenizer))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with those that the tokenizer puts at its beginning."""
        ids: list[int] = self.backend.encode(text).ids
        while len(ids) > self._beginning and ids[-1] in self.ends:  # it is to be continued
            ids.pop()
        return ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation, up to where the assistant answers.

        Raises RecipeError where there is no chat template.
        """
        if not self.tokenizer.chat_template:
            raise _no_template("the tokenizer has none", messages)
        special = SpecialTokens(self.tokenizer)
        quoted = special.quote(list(messages))  # somebody may type the letters of a token
        try:
            with bound_work("the chat template"):
                written = self.tokenizer.apply_chat_template(
                    quoted, tokenize=False, add_generation_prompt=True
                )
        except ValueError as error:
            raise RecipeError(KEY, f"{error}.") from error
        text, letters = special.unquote(str(written))
        return special.encode([text], [letters])[0].ids

    def last_question(self, ids: list[int]) -> str:
        """Return the last question of a conversation, which ends where the assistant answers; ""
        where the chat template does not show it.
        """
        if not self.tokenizer.chat_template:
            return ""
        asked = [{"role": "user", "content": _MARK}]
        written = self.tokenizer.apply_chat_template(
            asked, tokenize=False, add_generation_prompt=True
        )
        before, _, after = str(written).rpartition(_MARK)
        special = (token.content for token in SpecialTokens(self.tokenizer).tokens.values())
        opening = before[max((0, *map(before.rfind, special))) :]
        text, after = self.backend.decode(ids, skip_special_tokens=False).rstrip(), after.rstrip()
        _, opened, question = text.removesuffix(after).rpartition(opening)
        return question if opened and text.endswith(after) else ""

    def decoder(self, before: list[int]) -> Callable[[int], str]:
        """See ByteCodec.decoder."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(ids=before, skip_special_tokens=True)
        return lambda token: stream.step(self.backend, token) or ""


Codec = ByteCodec | TokenizerCodec


def _no_template(why: str, messages: Sequence[Message]) -> RecipeError:
    problem = f"{len(messages)} messages need a chat template, and {why}."
    return RecipeError(KEY, problem, "Leave out --chat; --prompt is then text to go on from.")


def codec_of(data: Mapping[str, object], given: str | None = None) -> Codec:
    """Return the codec of a recipe's section `data`: a tokenizer, or bytes.

    given: a path, or "bytes", that goes before.  Raises RecipeError where nothing says what text
    the ids are.
    """
    if named := given or data.get("tokenizer"):
        return ByteCodec() if named == BYTES else read_tokenizer(Path(str(named)))
    if is_bytes(data):
        return ByteCodec()
    raise RecipeError(
        KEY,
        f"nothing says what text the ids of {data.get('_target_')} are.",
        f"--tokenizer FOLDER, a file {TOKENIZER}, or --tokenizer {BYTES} says it.",
    )


def is_bytes(data: Mapping[str, object]) -> bool:
    """Return True if a data set's ids are the bytes of text."""
    target = new_name(str(data.get("_target_")))
    return target == f"{Text.__module__}.{Text.__name__}" and not data.get("tokenizer")


def read_tokenizer(path: Path) -> TokenizerCodec:
    """Read a tokenizer from tokenizer.json, or from a folder that has it.  Raises RecipeError."""
    instead = f"--tokenizer FOLDER names one; --tokenizer {BYTES} takes ids as bytes."

    def refuse(error: Exception) -> FlowrunError:
        match error:
            case ImportError():
                needs = "this needs the package transformers."
                return RecipeError(KEY, needs, "pip install 'flowrun[text]'")
            case ArgumentError():
                more = "\n".join(filter(None, (error.instead, instead)))
                return CommandLineError(str(path), error.problem, more)
        reason = " ".join(str(error).split())
        return CommandLineError(str(path), f"not a tokenizer: {reason}", instead)

    with refuse_as(refuse):  # the library raises no class of its own
        found = load_tokenizer(str(path))
    ends = {*_generation_ends(path.expanduser())}
    if found.eos_token_id is not None:
        ends.add(found.eos_token_id)
    return TokenizerCodec(found, vocabulary_of(found), frozenset(ends))


def make_byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose ids are bytes, for programs that know no other kind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # A byte that is no character of its own stands for one above 255 there, in the same order.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = iter(byte for byte in range(256) if chr(byte) not in letters)
    ids = {letter: ord(letter) if ord(letter) < 256 else next(others) for letter in letters}
    tokenizer: Any = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer  # type: ignore[no-any-return]


def _generation_ends(folder: Path) -> list[int]:
    """Return more ids that end a text: those of a model's generation config."""
    with suppress(OSError, ValueError, AttributeError):
        said = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        ids = said.get("eos_token_id")
        return [each for each in (ids if isinstance(ids, list) else [ids]) if type(each) is int]
    return []
