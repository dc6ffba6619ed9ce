"""Chat and instruction data: what the assistant says is trained on, what it reads is not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from string import Formatter
from typing import TYPE_CHECKING, Any

from flowrun.engine.errors import ArgumentError
from flowrun.engine.runtime.process.own_process import bound_work
from flowrun.launcher.data.corpus.answers import AnsweredDocuments, AnsweredText, tokenise_rows
from flowrun.launcher.data.corpus.row_source import Fields, RowSource, check_text, field_of
from flowrun.launcher.data.corpus.special_tokens import SpecialTokens, TextSpans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ASSISTANT = "assistant"
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Chat(AnsweredDocuments):
    """Conversations by the tokenizer's own chat template: {tokens (T,), targets (T,)}, int64.

    path, split: rows (row_source.py).  tokenizer: a folder with a chat template.
    messages: field with a list of {role, content}.  length, long, pack,
    most_documents: see AnsweredDocuments.
    An answer is what the template marks by {% generation %}; in a template without such marks,
    what follows the prompt of a message of the role `assistant`, its end included.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str,
        length: int = 1024,
        messages: str = "messages",
        split: str | None = None,
        long: str | None = None,
        pack: bool = False,
        most_documents: int | None = None,
    ) -> None:
        source = RowSource(path, split)

        def write(row: Fields, special: SpecialTokens) -> AnsweredText:
            said = _read_messages(row, messages)
            with bound_work(f"the chat template of {tokenizer}"):
                return render_chat(said, special, tokenizer)

        documents = tokenise_rows(
            source, tokenizer, f"chat, quoted: {messages}", write, begin=False
        )
        super().__init__(documents, length, long, pack, most_documents)


class Instructions(AnsweredDocuments):
    """Prompts with answers: {tokens (T,), targets (T,)}, int64.

    path, split: rows (row_source.py).  tokenizer: a folder whose config names an end-of-text token,
    which ends each answer.
    A document begins as the tokenizer begins a text.
    prompt, answer: text with fields of a row in braces, {year!s} for one that is a number.
    length, long, pack, most_documents: see AnsweredDocuments.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str,
        length: int = 1024,
        prompt: str = "{prompt}\n",
        answer: str = "{answer}",
        split: str | None = None,
        long: str | None = None,
        pack: bool = False,
        most_documents: int | None = None,
    ) -> None:
        source = RowSource(path, split)
        names = [_fields_of("prompt", prompt), _fields_of("answer", answer)]

        def write(row: Fields, special: SpecialTokens) -> AnsweredText:
            end = special.tokenizer.eos_token
            if end is None:
                raise ArgumentError(
                    "tokenizer",
                    f"{tokenizer} names no end-of-text token: no answer would end.",
                    "Give a folder whose tokenizer_config.json has eos_token.",
                )
            for name, as_text in chain(*names):
                _check_field(row, name, as_text)
            asked, said = (form.format_map(special.quote(row)) for form in (prompt, answer))
            text, letters = special.unquote(f"{asked}{said}{end}")
            return AnsweredText(text, ((len(asked), len(text)),), letters)

        settings = f"instructions, quoted: {prompt!r} {answer!r}"
        documents = tokenise_rows(source, tokenizer, settings, write)
        super().__init__(documents, length, long, pack, most_documents)


def _fields_of(key: str, form: str) -> list[tuple[str, bool]]:
    """Return the fields that a form names, and whether each is made text.  key: of the form."""
    try:
        parts = [*Formatter().parse(form)]
    except ValueError as error:
        raise ArgumentError(key, f"{form!r}: {error}.", "Write {{ for a brace.") from None
    for _, name, _, conversion in parts:
        if name is not None and conversion not in (None, "s"):
            raise ArgumentError(
                key,
                f"{form!r}: !{conversion} is not taken.",
                f"Write {{{name}!s}} to make {name!r} text.",
            )
    return [(name, conversion == "s") for _, name, _, conversion in parts if name is not None]


def _check_field(row: Fields, name: str, as_text: bool) -> None:
    """Raise ValueError unless a row has text at a name of a form, such as {meta[title]}."""
    value = field_of(row, re.split(r"[.\[]", name)[0])
    if "." in name or "[" in name:
        try:
            value, _ = Formatter().get_field(name, (), row)
        except (LookupError, AttributeError, TypeError):
            raise ValueError(f"there is no {name!r} in it") from None
    if value is None:
        raise ValueError(f"{name!r} is null")
    if as_text and not isinstance(value, (dict, list)):
        return
    try:
        check_text(value, name)
    except ValueError as error:
        raise ValueError(f"{error}; {{{name}!s}} writes a number as text") from None


def _read_messages(row: Fields, name: str) -> list[Fields]:
    """Return the conversation in a field of a row.  Raise ValueError for what is none."""
    if name not in row:
        raise ValueError(
            f"there is no {name!r} in it; it has {', '.join(row)}: name the field of the "
            "conversation by data.messages"
        )
    said = field_of(row, name)
    if not isinstance(said, list) or not said:
        raise ValueError(f"{name!r} must be a list of {{role, content}}, not {str(said)[:40]!r}")
    for number, message in enumerate(said, 1):
        _check_message(message, f"message {number} of {name!r}")
    return said


def _check_message(message: object, place: str) -> None:
    """Raise ValueError unless a message says who speaks, and what, or calls tools."""
    if not isinstance(message, dict):
        raise ValueError(f"{place} is not a {{role, content}}: {str(message)[:40]!r}")
    for key in ("role", "content"):
        value = message.get(key)
        if isinstance(value, str):
            continue
        if key == "content" and (message.get("tool_calls") or isinstance(value, list)):
            continue  # the template says how it is written
        said = "is null" if key in message else f"is missing; it has {', '.join(message)}"
        instead = ""
        if {"from", "value"} <= message.keys():
            instead = ": write from as role (user, assistant or system), and value as content"
        why = said if value is None else f"is not text: {str(value)[:40]}"
        raise ValueError(f"{place}: {key} {why}{instead}")


def render_chat(messages: Sequence[Fields], special: SpecialTokens, name: str) -> AnsweredText:
    """Return a conversation as the tokenizer's template writes it, with the places of answers.

    What messages hold of special tokens are letters.  name: of the tokenizer, for errors.  Raise
    ValueError for one without a template, and for a template that writes the first messages in
    another way when more follow, and marks no answers.
    """
    written, spans = _write(special.quote(list(messages)), special.tokenizer, name)
    text, letters = special.unquote(written)
    return AnsweredText(text, spans, letters)


def _write(
    messages: list[Fields], tokenizer: PreTrainedTokenizerFast, name: str
) -> tuple[str, TextSpans]:
    """Return a conversation as text, and the places of answers."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise ArgumentError(
            "tokenizer",
            f"{name} has no chat template, or several and none that is called default.",
            "Give a folder with chat_template.jinja, or name one of several so.",
        ) from error
    if _MARKED.search(template):
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template  # typed as if it gave a text alone
        texts, spans = render(
            [messages],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
        return texts[0], tuple((start, end) for start, end in spans[0])
    whole, answers = _render(tokenizer, messages), []
    for k, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            asked = _render(tokenizer, messages[:k], prompt=True) if k else _prompt(tokenizer)
            said = _render(tokenizer, messages[: k + 1])
            if not (said.startswith(asked) and whole.startswith(said)):
                raise ArgumentError(
                    "tokenizer",
                    f"the chat template of {name} writes a message in another way when more "
                    "follow.",
                    "Mark in it what the assistant says by {% generation %} and "
                    "{% endgeneration %}.",
                )
            answers.append((len(asked), len(said)))
    return whole, tuple(answers)


def _prompt(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return what a template writes in front of an answer alone."""
    before: list[Fields] = [{"role": "user", "content": ""}]
    return _render(tokenizer, before, prompt=True).removeprefix(_render(tokenizer, before))


def _render(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Fields], prompt: bool = False
) -> str:
    given: Any = list(messages)  # typed as if a message held text alone
    return str(tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=prompt))
