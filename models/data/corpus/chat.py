"""Chat and instruction data: what the assistant says is trained on, what it reads is not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flowrun.models.data.corpus.answers import AnsweredDocuments, AnsweredText, tokenise_rows
from flowrun.models.data.corpus.row_source import RowSource, field_of
from flowrun.models.data.corpus.special_tokens import SpecialTokens, TextSpans

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

        def write(row: dict[str, Any], special: SpecialTokens) -> AnsweredText:
            return render_chat(field_of(row, messages), special, tokenizer)

        made = tokenise_rows(source, tokenizer, f"chat, quoted: {messages}", write)
        super().__init__(made, length, long, pack, most_documents)


class Instructions(AnsweredDocuments):
    """Prompts with answers: {tokens (T,), targets (T,)}, int64.

    path, split: rows (row_source.py).  tokenizer: a folder whose config names an end-of-text token,
    which ends each answer.
    prompt, answer: text with fields of a row in braces.  length, long, pack,
    most_documents: see AnsweredDocuments.
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

        def write(row: dict[str, Any], special: SpecialTokens) -> AnsweredText:
            end = special.tokenizer.eos_token
            if end is None:
                raise ValueError(
                    f"{tokenizer} names no end-of-text token: no answer would end; give a folder "
                    "whose tokenizer_config.json has eos_token"
                )
            asked, said = (_fill(form, special.quote(row)) for form in (prompt, answer))
            text, letters = special.unquote(f"{asked}{said}{end}")
            return AnsweredText(text, ((len(asked), len(text)),), letters)

        settings = f"instructions, quoted: {prompt!r} {answer!r}"
        made = tokenise_rows(source, tokenizer, settings, write)
        super().__init__(made, length, long, pack, most_documents)


def _fill(form: str, row: dict[str, Any]) -> str:
    try:
        return form.format_map(row)
    except KeyError as error:
        field_of(row, str(error.args[0]))
        raise


def render_chat(
    messages: Sequence[dict[str, Any]], special: SpecialTokens, name: str
) -> AnsweredText:
    """Return a conversation as the tokenizer's template writes it, with the places of answers.

    messages: {role, content} of each.  special: of the loaded tokenizer; what messages hold of them
    are letters.  name: of the tokenizer, for errors.  Raise ValueError for one without a template,
    and for a template that writes the first messages in another way when more follow, and marks no
    answers.
    """
    written, spans = _write(special.quote(list(messages)), special.tokenizer, name)
    text, letters = special.unquote(written)
    return AnsweredText(text, spans, letters)


def _write(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, name: str
) -> tuple[str, TextSpans]:
    """Return a conversation as text, and the places of answers."""
    if not tokenizer.chat_template:
        raise ValueError(f"{name} has no chat template: give a folder with chat_template.jinja")
    if _MARKED.search(tokenizer.chat_template):
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template  # typed as if it gave a text alone
        texts, spans = render(
            [messages],
            chat_template=tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
        return texts[0], tuple((start, end) for start, end in spans[0])
    whole, found = _render(tokenizer, messages), []
    for k, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            asked = _render(tokenizer, messages[:k], prompt=True) if k else _prompt(tokenizer)
            said = _render(tokenizer, messages[: k + 1])
            if not (said.startswith(asked) and whole.startswith(said)):
                raise ValueError(
                    f"the chat template of {name} writes a message in another way when more "
                    "follow: mark in it what the assistant says by {% generation %} and "
                    "{% endgeneration %}"
                )
            found.append((len(asked), len(said)))
    return whole, tuple(found)


def _prompt(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return what a template writes in front of an answer alone."""
    before = [{"role": "user", "content": ""}]
    return _render(tokenizer, before, prompt=True).removeprefix(_render(tokenizer, before))


def _render(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[dict[str, Any]], prompt: bool = False
) -> str:
    found = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=prompt
    )
    return str(found)
