from pathlib import Path

import pytest
from transformers import AutoTokenizer

from flowrun.launcher.commands.tokenizer_folder import train_tokenizer

MESSAGES = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "the cat?\n"},
    {"role": "assistant", "content": " on the mat\n"},
    {"role": "user", "content": "the dog?"},
    {"role": "assistant", "content": "on the log"},
]


@pytest.mark.parametrize("text", ["  the cat\n\tsat", "\x00\U0001f642 日本 é", "", "<|end|>"])
def test_every_text_comes_back(bpe: str, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bpe)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_one_id_each(bpe: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bpe)
    ids = tokenizer.encode("<|end|><|user|><|assistant|><|system|>")
    assert ids == [0, 1, 2, 3] and tokenizer.eos_token_id == tokenizer.pad_token_id == 0


def test_the_chat_template_marks_what_the_assistant_says_and_its_end(bpe: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bpe)
    found = tokenizer.apply_chat_template(
        MESSAGES, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = zip(found["input_ids"], found["assistant_masks"], strict=True)
    expected = " on the mat\n<|end|>on the log<|end|>"
    assert tokenizer.decode([k for k, mark in marked if mark]) == expected


def test_a_prompt_ends_where_the_assistant_begins(bpe: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bpe)
    prompt, whole = (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        for messages, asks in ((MESSAGES[:2], True), (MESSAGES, False))
    )
    assert prompt.endswith("<|end|><|assistant|>") and whole.startswith(prompt)


def test_training_twice_makes_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"the cat sat \xff on the mat\n" * 9)
    for name in ("one", "two"):
        assert train_tokenizer([tmp_path / "a.txt"], 280, tmp_path / name) <= 280
    one, two = (sorted((tmp_path / name).iterdir()) for name in ("one", "two"))
    assert [file.read_bytes() for file in one] == [file.read_bytes() for file in two]
