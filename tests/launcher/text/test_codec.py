import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from flowrun.engine.errors import RecipeError
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.text.codec import ByteCodec, Codec, TokenizerCodec, codec_of, read_tokenizer
from support.samples.small_tokenizer import TEXT, save_tokenizer

BYTES = {"_target_": "flowrun.launcher.data.corpus.text.Text"}


def decoded(codec: Codec, text: str) -> list[str]:
    """The pieces that its ids become, one after the other."""
    decode = codec.decoder([])
    return [decode(each) for each in codec.encode(text)]


def test_bytes_become_text_when_a_character_is_whole() -> None:
    assert ByteCodec().encode("é") == [0xC3, 0xA9]
    assert decoded(ByteCodec(), "né!") == ["n", "", "é", "!"]


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    decode = ByteCodec().decoder([])
    assert decode(0xFF) == "\N{REPLACEMENT CHARACTER}"


def test_a_tokenizer_gives_the_text_back(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    codec = read_tokenizer(tmp_path)
    for text in TEXT:
        assert "".join(decoded(codec, text)) == text
    assert (codec.size, codec.ends) == (280, frozenset({0}))


def test_a_tokenizer_does_not_end_a_text_that_goes_on(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    codec = read_tokenizer(tmp_path)
    ids = codec.encode("the cat")
    codec.backend.post_processor = TemplateProcessing(
        single="$A <end>", special_tokens=[("<end>", 0)]
    )
    assert codec.backend.encode("the cat").ids == [*ids, 0]
    assert codec.encode("the cat") == ids


def test_a_tokenizer_on_which_the_library_panics_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    described = json.loads(file.read_text())
    described["model"]["continuing_subword_prefix"] = "longer than any token of it"
    file.write_text(json.dumps(described))
    with pytest.raises(CommandLineError, match="not a tokenizer: a panic: range end index"):
        read_tokenizer(tmp_path)


def test_a_conversation_is_written_by_the_template(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    ids = read_tokenizer(tmp_path).encode_chat([{"role": "user", "content": "the cat"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "user: the cat<end>assistant: "
    assert ids.count(0) == 1
    forged = read_tokenizer(tmp_path).encode_chat([{"role": "user", "content": "a<end>b"}])
    assert forged.count(0) == 1
    assert tokenizer.decode(forged, skip_special_tokens=False) == "user: a<end>b<end>assistant: "


def test_a_beginning_stays_also_where_it_is_the_end_of_a_text(tmp_path: Path) -> None:
    """As in GPT-2, whose texts begin and end with one token."""
    save_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = TemplateProcessing(
        single="<end> $A <end>", special_tokens=[("<end>", 0)]
    )
    tokenizer.save(str(file))
    codec = read_tokenizer(tmp_path)
    assert codec.encode("") == [0]
    assert codec.encode("the")[0] == 0 != codec.encode("the")[-1]


def test_there_is_no_conversation_without_a_template() -> None:
    with pytest.raises(RecipeError, match="1 messages need a chat template, and ids are bytes"):
        ByteCodec().encode_chat([{"role": "user", "content": "?"}])


def test_ends_are_read_from_the_generation_config_too(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    assert read_tokenizer(tmp_path).ends == {0, 7}


@pytest.mark.parametrize("said", [{"eos_token_id": {"a": 1}}, {"eos_token_id": [[1], True]}, []])
def test_a_generation_config_that_names_no_ids_ends_no_text(tmp_path: Path, said: object) -> None:
    save_tokenizer(tmp_path)
    ends = read_tokenizer(tmp_path).ends
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert read_tokenizer(tmp_path).ends == ends


def test_the_recipe_says_what_ids_are(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    assert isinstance(codec_of(BYTES), ByteCodec)
    assert isinstance(codec_of({**BYTES, "tokenizer": str(tmp_path)}), TokenizerCodec)
    assert isinstance(codec_of({"_target_": "a.Tokens"}, "bytes"), ByteCodec)


@pytest.mark.parametrize(
    ("tokenizer", "problem"),
    [
        (None, "nothing says what text the ids of a.Tokens are"),
        ("nowhere", "there is no tokenizer at nowhere"),
        ("broken.json", "broken.json\n  not a tokenizer"),
    ],
)
def test_what_is_no_tokenizer_is_refused(
    workplace: Path, tokenizer: str | None, problem: str
) -> None:
    (workplace / "broken.json").write_text("{}")
    with pytest.raises(RecipeError, match=problem):
        codec_of({"_target_": "a.Tokens"}, tokenizer)


FORMS = {  # how a template writes a message, and what comes before an answer
    "ChatML": ("<|is|>{{ m.role }}\n{{ m.content }}<|ie|>\n", "<|is|>assistant\n"),
    "headers": ("<|s|>{{ m.role }}<|e|>\n\n{{ m.content }}<|eot|>", "<|s|>assistant<|e|>\n\n"),
    "words": ("{{ m.role }}: {{ m.content }}<end>", "assistant: "),
    "brackets": ("{{ '[INST] %s [/INST]' % m.content if m.role == 'user' else m.content }}", ""),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_last_question_is_found_in_the_ids(tmp_path: Path, form: str) -> None:
    save_tokenizer(tmp_path)
    codec = read_tokenizer(tmp_path)
    message, before = FORMS[form]
    special = re.findall(r"<[|\w]+>", message + before)
    codec.tokenizer.add_special_tokens({"additional_special_tokens": sorted({*special})})
    codec.tokenizer.chat_template = f"{{% for m in messages %}}{message}{{% endfor %}}{before}"
    said = [{"role": "system", "content": "You add."}] * (form != "brackets")
    said += [{"role": "user", "content": "the\n\ncat"}, {"role": "assistant", "content": "sat"}]
    said.append({"role": "user", "content": "What <end> is\n3 + 4?"})
    assert codec.last_question(codec.encode_chat(said)) == "What <end> is\n3 + 4?"
    assert codec.last_question(codec.encode("the cat")) == ""
    codec.tokenizer.chat_template = None
    assert codec.last_question(codec.encode("the cat")) == ""
