import io
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flowrun.engine.errors import RecipeError, RunError
from flowrun.launcher.commands.load_run import load_run
from flowrun.launcher.commands.write_text import open_writer, write_after
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from flowrun.launcher.store.checkpoint import find_all
from flowrun.launcher.terminal.console import printable
from flowrun.launcher.text.generate import Continuation, Drawing, generate
from support.nets.small_llama import small_llama
from support.runs.saved_run import TINY, save_run
from support.runs.workplace import End
from support.samples.small_tokenizer import save_tokenizer

SHORT = Drawing(tokens=12, temperature=0)


def text(source: Path, prompt: str = "def ", **options: Any) -> str:
    return "".join(open_writer(source, **options).continue_text(prompt, SHORT))


def test_a_run_writes_as_its_model_does(workplace: Path) -> None:
    folder = save_run(workplace / "run")
    ids = list(b"def ")
    model = load_run(folder).model
    for _ in range(12):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids[-8:]]))[0, -1].argmax()))
    expected = bytes(ids[4:]).decode(errors="replace")  # its last character may be a part
    assert text(folder) == expected.removesuffix("\N{REPLACEMENT CHARACTER}")


def test_a_checkpoint_that_was_copied_elsewhere_writes(workplace: Path) -> None:
    alone = ("launch=virtual", "placement.axes.data=1", "engine.check_capture=false")
    steps = ("train.steps=2", "train.save_every=1", "train.keep=0", "eval.sample=false")
    run(load([*TINY, *alone, *steps]), workplace / "run")
    [first, _] = find_all(workplace / "run")
    shutil.copytree(first.folder, workplace / "kept")
    written = text(workplace / "run", step=1)
    assert text(workplace / "kept") == text(first.folder) == written != text(workplace / "run")
    with pytest.raises(RecipeError, match="kept is a checkpoint, of 1 steps, and not a run"):
        text(workplace / "kept", step=2)
    (workplace / "run" / "weights.safetensors").write_bytes(b"cut")  # which a step does not need
    assert text(workplace / "run", step=1) == written
    with pytest.raises(RunError, match="it is damaged"):
        text(workplace / "run")
    (workplace / "kept" / "rank00000.safetensors").unlink()
    with pytest.raises(RecipeError, match=r"this checkpoint is not whole: .*it is missing"):
        text(workplace / "kept")


def test_a_mixture_of_experts_writes(workplace: Path) -> None:
    folder = save_run(
        workplace / "run", "recipe=moe_ep", "model.depth=2", "model.width=16", "data.length=8"
    )
    assert text(folder)


def llama(folder: Path) -> Path:
    """A folder of Hugging Face's, with a tokenizer of fewer ids than it has logits."""
    torch.manual_seed(0)
    small_llama(eos_token_id=None, bos_token_id=None).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def test_a_folder_of_hugging_face_writes(workplace: Path) -> None:
    folder = llama(workplace / "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    there = torch.tensor([tokenizer("the cat").input_ids])
    few = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": [*range(280, 320)]}
    with torch.no_grad():
        made = model.generate(there, **few)
    expected = tokenizer.decode(made[0].tolist(), clean_up_tokenization_spaces=False)
    assert "the cat" + text(folder, "the cat") == expected


def test_the_command_prints_prompt_and_text(workplace: Path, end: End) -> None:
    folder = save_run(workplace / "run")
    words = ("--prompt", "def ", "--tokens", "12", "--temperature", "0")
    assert end("sample", str(folder), *words)[:2] == (0, f"def {printable(text(folder))}\n")


def test_an_answer_knows_the_questions_before(
    workplace: Path, end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = llama(workplace / "llama")
    writer = open_writer(folder)
    answers = ["".join(answer) for answer in writer.answer(["the cat", "the dog"], SHORT)]
    ids = writer.codec.encode_chat(
        [
            {"role": "user", "content": "the cat"},
            {"role": "assistant", "content": answers[0]},
            {"role": "user", "content": "the dog"},
        ]
    )
    assert answers[1] == "".join(generate(writer.model, Continuation(writer.codec, ids, SHORT)))
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n\nthe dog\n"))
    asked = zip(("the cat", "the dog"), answers, strict=True)
    shown = "".join(f"> {question}\n{printable(answer)}\n" for question, answer in asked)
    words = ("--chat", "--tokens", "12", "--temperature", "0")
    assert end("sample", str(folder), *words)[:2] == (0, shown)
    alone = end("sample", str(folder), *words, "--prompt", "the cat")[1]
    assert shown.startswith(alone) and alone.startswith("> the cat\n")


def test_the_command_answers_a_file(workplace: Path, end: End) -> None:
    folder = str(llama(workplace / "llama"))
    asked = ["the cat", "the dog sat", "the"]
    (workplace / "asked.txt").write_text("\n".join(asked))
    words = ("--chat", "--tokens", "6", "--temperature", "0")
    end("sample", folder, *words, "--prompts", "asked.txt", "--to", "out.jsonl")
    lines = (workplace / "out.jsonl").read_text().splitlines()
    for question, line in zip(asked, lines, strict=True):
        alone = end("sample", folder, *words, "--prompt", question, "--format", "json")
        assert alone == (0, f"{line}\n", "")
        assert json.loads(line)["prompt"] == question
    written = [
        f"> {each}\n{printable(json.loads(line)['text'])}\n\n"
        for each, line in zip(asked, lines, strict=True)
    ]
    assert end("sample", folder, *words, "--prompts", "asked.txt") == (0, "".join(written), "")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--chat", "--to", "out.jsonl"), "what is typed has no JSON"),
        (("--to", "nowhere/out.jsonl"), "no file can be written there"),
        (
            ("--prompt", "x" * 9, "--format", "json"),
            "it is 9 tokens, and the model reads 8 at once",
        ),
        (("--stop", ""), "an empty text would end every text"),
        (("--top-p", "1.5"), "a sum of probabilities is above 0 and at most 1"),
    ],
)
def test_options_that_give_no_text_are_refused(
    workplace: Path, end: End, words: tuple[str, ...], problem: str
) -> None:
    status, _, error = end("sample", str(save_run(workplace / "run")), *words)
    assert (status, problem in error) == (2, True)


def test_a_chat_longer_than_the_window_leaves_out_whole_messages(workplace: Path) -> None:
    notes: list[str] = []
    writer = open_writer(llama(workplace / "llama"), note=notes.append)
    asked = {"role": "user", "content": "the cat"}
    alone = writer.codec.encode_chat([asked])
    short = replace(writer.model, window=len(alone) + 6)
    drawing = replace(SHORT, tokens=6)
    for answer in replace(writer, model=short).answer(["the cat"] * 2, drawing):
        written = "".join(answer)
    assert written == "".join(generate(short, Continuation(writer.codec, alone, drawing)))
    [line] = notes
    assert line.startswith("the conversation is ") and f"reads {short.window} at once" in line
    assert line.endswith("the 2 oldest messages are left out")


def test_a_prompt_longer_than_the_window_has_a_note(workplace: Path, end: End) -> None:
    folder = save_run(workplace / "run")
    for prompt, note in (("x" * 8, ""), ("x" * 9, "the prompt is 9 tokens")):
        status, _, found = end("sample", str(folder), "--prompt", prompt, "--tokens", "1")
        assert (status, found.count("\n")) == (0, bool(note))
        assert found.startswith(f"note: {note}" if note else "")
    assert "the last 8 are read" in found


def test_the_end_of_a_run_shows_a_held_out_text_and_what_follows(workplace: Path) -> None:
    folder = save_run(workplace / "run")
    job = Job(load([f"recipe={folder / 'recipe.yaml'}"]))
    found = write_after(job, folder)
    assert found
    first = job.materials.evaluation_sampler(0, 0, slice(0, 1))["tokens"][0, :4].tolist()
    assert found[0] == bytes(first).decode(errors="replace")
    assert len(found[1]) > 20


def test_the_end_of_a_chat_run_shows_a_question_and_its_answer(workplace: Path) -> None:
    save_tokenizer(workplace / "words")
    said = [{"role": "system", "content": "the mat"}, {"role": "user", "content": "the cat sat"}]
    said.append({"role": "assistant", "content": "on the log"})
    (workplace / "chat.jsonl").write_text(f"{json.dumps({'messages': said})}\n" * 99)
    data = ("data.length=64", "data.path=chat.jsonl", "data.tokenizer=words")
    model = ("model.vocabulary=280", "model.depth=1", "model.width=16", "model.heads=2")
    folder = save_run(workplace / "run", "recipe=gpt_dp", "data=chat", *data, *model)
    job = Job(load([f"recipe={folder / 'recipe.yaml'}"]))
    writer = open_writer(folder)
    ids = writer.codec.encode_chat(said[:2])[:-1]  # the space begins the answer's first token
    answer = "".join(generate(writer.model, Continuation(writer.codec, ids, Drawing(tokens=160))))
    assert write_after(job, folder) == ("> the cat sat\n", answer)


@pytest.mark.parametrize("kept", ["recipe.yaml", "weights.safetensors"])
def test_there_is_no_sample_without_text_or_weights(workplace: Path, kept: str) -> None:
    text_run = save_run(workplace / "text")
    images = save_run(workplace / "images", "recipe=mlp_hybrid")
    source = images if kept == "weights.safetensors" else text_run
    job = Job(load([f"recipe={source / 'recipe.yaml'}"]))
    for file in source.iterdir():
        if file.name != kept:
            file.unlink()
    assert write_after(job, source) is None


def test_a_large_model_is_left_to_the_command(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrun.launcher.commands.write_text._QUICK_BYTES", 1e3)
    folder = save_run(workplace / "run")
    job = Job(load([f"recipe={folder / 'recipe.yaml'}"]))
    assert write_after(job, folder) == ("", f"flowrun sample {folder} shows it")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda folder: None, "there is no such folder"),
        (lambda folder: folder.mkdir(), "it has neither recipe.yaml, of a run, nor config.json"),
        (
            lambda folder: save_run(
                folder,
                *TINY[:1],
                "data={_target_: flowrun.launcher.data.corpus.tokens.Tokens, path: x, length: 8}",
            ),
            "nothing says what text the ids of",
        ),
        (lambda folder: save_run(folder, "recipe=mlp_hybrid"), "MLP writes no text: none of"),
    ],
    ids=["nothing", "empty", "ids", "images"],
)
def test_what_writes_no_text_is_refused(workplace: Path, make, problem: str) -> None:  # type: ignore[no-untyped-def]
    make(workplace / "source")
    with pytest.raises(RecipeError, match=problem):
        text(workplace / "source")


def test_weights_of_another_model_are_refused(workplace: Path) -> None:
    folder = save_run(workplace / "run")
    file = folder / "recipe.yaml"
    file.write_text(file.read_text().replace("width: 16", "width: 32"))
    with pytest.raises(RecipeError, match=r"has not the weights of step 3: .*size mismatch"):
        text(folder)


def test_without_transformers_a_folder_says_what_to_install(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workplace / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RecipeError, match=r"flowrun\[text\]"):
        text(workplace)
