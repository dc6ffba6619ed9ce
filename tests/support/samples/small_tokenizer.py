"""A tokenizer of a few words, as a folder of transformers has it."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEXT = ["the cat sat on the mat", "the dog sat on the log", "naïve café, 日本語"]


def save_tokenizer(folder: Path, vocabulary: int = 280) -> Tokenizer:
    """Train a byte-level BPE whose text ends with <end>; write it, and return it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<end>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    whole.chat_template = CHAT
    whole.save_pretrained(folder)
    return tokenizer
