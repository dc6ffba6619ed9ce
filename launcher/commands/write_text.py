"""`flowrun sample`: text from a run, a checkpoint of it, or a folder of Hugging Face's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrun.engine.errors import FlowrunError
from flowrun.engine.ir.files import open_more
from flowrun.launcher.commands.load_run import LoadedRun, load_run, text_run
from flowrun.launcher.job.job import Job
from flowrun.launcher.model.build import instantiate_data
from flowrun.launcher.model.hugging_face.convert_models import CONFIG
from flowrun.launcher.model.hugging_face.load_folder import load_text_model
from flowrun.launcher.recipe.recipe_errors import CommandLineError, PlacedError
from flowrun.launcher.report.record import Record
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.run_files import RECIPE, SAMPLES
from flowrun.launcher.store.run_tokenizer import text_of
from flowrun.launcher.terminal import doing
from flowrun.launcher.text import codec as codecs
from flowrun.launcher.text.codec import Codec, Message
from flowrun.launcher.text.generate import Continuation, Drawing, generate, write_all
from flowrun.launcher.text.prompts import Prompt, WrittenText
from flowrun.launcher.text.text_model import TextModel, text_model
from flowrun.models.losses import IGNORED

_TARGETS = "targets"
_QUICK_BYTES = 200e6  # of weights: about ten seconds of a core
_PROMPT = 24  # tokens
_LONGEST = 400  # characters of a question
_IN_ORDER = 64  # texts that are written in any order
_SHORT = Drawing(tokens=160)


def _ignore(note: str) -> None:
    """Nobody reads it."""


@dataclass(frozen=True)
class TextWriter:
    """A model that writes text.  codec: of its ids.  note: takes a line where it does not read all
    that it is given.
    """

    model: TextModel
    codec: Codec
    note: Callable[[str], None] = _ignore

    def continue_text(self, prompt: str, drawing: Drawing) -> Iterator[str]:
        """Return pieces of text that follow the prompt, as they are made."""
        ids = self._encode(prompt)
        self._note_cut("prompt", ids)
        return generate(self.model, Continuation(self.codec, ids, drawing))

    def continue_all(
        self, prompts: Sequence[Prompt], drawing: Drawing, chat: bool = False
    ) -> Iterator[WrittenText]:
        """Return what follows each prompt, in their order, as it is written; many are at once.

        chat: each prompt is a question of its own.  Raises RecipeError for a prompt of more tokens
        than the model reads.
        """
        doing.doing(f"reading {len(prompts):,} prompts")
        encoded = [self._encode_whole(prompt, chat) for prompt in prompts]
        return self._write_in_order(prompts, encoded, drawing)

    def _write_in_order(
        self, prompts: Sequence[Prompt], encoded: Sequence[list[int]], drawing: Drawing
    ) -> Iterator[WrittenText]:
        for start in range(0, len(prompts), _IN_ORDER):
            some = slice(start, start + _IN_ORDER)
            texts = [Continuation(self.codec, ids, drawing) for ids in encoded[some]]
            for ended in write_all(self.model, texts):
                doing.doing(f"{start + ended:,} of {len(prompts):,} texts are written")
            doing.clear()
            for prompt, text in zip(prompts[some], texts, strict=True):
                yield WrittenText(prompt.text, text.text, text.stopped_by)

    def _encode(self, prompt: str) -> list[int]:
        return self.codec.encode(prompt) or self.codec.encode("\n")

    def _encode_whole(self, prompt: Prompt, chat: bool) -> list[int]:
        asked: Message = {"role": "user", "content": prompt.text}
        ids = self.codec.encode_chat([asked]) if chat else self._encode(prompt.text)
        if len(ids) > (window := self.model.window):
            problem = f"it is {len(ids):,} tokens, and the model reads {window:,} at once."
            raise PlacedError(prompt.place, "", problem, "Shorten it.")
        return ids

    def answer(self, questions: Iterable[str], drawing: Drawing) -> Iterator[Iterator[str]]:
        """Yield the pieces of an answer to each question, which knows the questions before.

        Each answer is to be read to its end before the next.  Raises RecipeError where there is no
        chat template.
        """
        messages: list[Message] = []
        for question in questions:
            messages.append({"role": "user", "content": question})
            answer = Continuation(self.codec, self._encode_window(messages, drawing), drawing)
            yield generate(self.model, answer)
            messages.append({"role": "assistant", "content": answer.text})

    def _encode_window(self, messages: list[Message], drawing: Drawing) -> list[int]:
        """Return the ids of a conversation, and remove from it the oldest questions with their
        answers, as many as the answer to the last one needs: `drawing.tokens`, at most half of the
        window.
        """
        window, whole = self.model.window, len(messages)
        ids = self.codec.encode_chat(messages)
        length = len(ids)
        while len(ids) > window - min(drawing.tokens, window // 2) and len(messages) > 1:
            del messages[:2]
            ids = self.codec.encode_chat(messages)
        if left_out := whole - len(messages):
            self.note(
                f"the conversation is {length:,} tokens, and the model reads {window:,} at once: "
                f"the {left_out} oldest messages are left out"
            )
        self._note_cut("question", ids)
        return ids

    def _note_cut(self, what: str, ids: Sequence[int]) -> None:
        if len(ids) > (window := self.model.window):
            self.note(f"the {what} is {len(ids):,} tokens, of which the last {window:,} are read")


def open_writer(
    source: Path,
    step: int | None = None,
    best: bool = False,
    tokenizer: str | None = None,
    note: Callable[[str], None] = _ignore,
) -> TextWriter:
    """Return the writer of a run, of a checkpoint of it, or of a folder of Hugging Face's.

    source: the folder.  step, best: which weights of a run.  tokenizer: a path, or "bytes", in
    place of the one that the source names.  note: see TextWriter.  Raises RecipeError.
    """
    if (source / RECIPE).is_file():
        run = text_run(load_run(source, step, best))
        return TextWriter(_model_of(run), codecs.codec_of(run.recipe.data, tokenizer), note)
    if (source / CONFIG).is_file():
        model = load_text_model(source)
        written = text_model(model, {}, None, f"{source} ({type(model).__name__})")
        return TextWriter(written, codecs.codec_of({}, tokenizer or str(source.absolute())), note)
    neither = f"it has neither {RECIPE}, of a run, nor {CONFIG}, of Hugging Face's."
    problem = neither if source.is_dir() else "there is no such folder."
    where = "A run says at its end where everything of it is."
    raise CommandLineError(str(source), problem, where)


def show_text(record: Record) -> None:
    """Show what a model that was trained on text writes; the run is complete even if it cannot."""
    try:
        found = write_after(record.job, record.folder)
        if found:
            line = {"step": record.reached, "prompt": found[0], "text": found[1]}
            with open(open_more(record.folder / SAMPLES), "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    except Exception as error:  # of the user's model, maybe
        why = error.problem if isinstance(error, FlowrunError) else repr(error)
        record.note(f"no sample of text (eval.sample=false leaves it out): {why}")
        return
    if found and record.progress:
        record.progress.show_sample(*found)


def write_after(job: Job, folder: Path) -> tuple[str, str] | None:
    """Return the beginning of a held-out text, or the question of a conversation, and what the
    trained model writes after it; None where the run has no text, or no weights on this host.

    folder: of the run, which is complete.  A model too large to be quick writes nothing: the second
    text then says how to have it.  Raises RecipeError for a model that writes no text.
    """
    data, file = text_of(job.recipe.data), folder / weights.FILE
    if not (data.get("tokenizer") or codecs.is_bytes(data)) or not file.is_file():
        return None
    if file.stat().st_size > _QUICK_BYTES:
        return "", f"flowrun sample {folder} shows it"
    writer = open_writer(folder)
    fed = job.materials.task.inputs
    field = fed.get(writer.model.argument) or next(iter(fed.values()))
    held_out = job.materials.evaluation_sampler
    sampler = held_out if held_out.held_out else job.materials.sampler
    batch = sampler(0, 0, slice(0, 1))
    rows = (batch[name].flatten(0, -2)[0].tolist() for name in (field, _TARGETS) if name in batch)
    ids, targets = [*rows, []][:2]  # of a pair the first
    asked = next((k for k, target in enumerate(targets, 1) if target != IGNORED), 0)
    decode = writer.codec.decoder([])
    if asked > 1:  # what comes before an answer is not trained on
        text, codec = "".join(map(decode, ids[:asked])), writer.codec
        asks = codec.last_question(ids[:asked]) if isinstance(codec, codecs.TokenizerCodec) else ""
        shown = f"> {(asks or text).strip()[:_LONGEST]}\n"
        answer = Continuation(codec, ids[:asked], _SHORT)
        return shown, "".join(generate(writer.model, answer))
    prompt = "".join(decode(each) for each in ids[: max(1, min(_PROMPT, len(ids) // 2))])
    return prompt, "".join(writer.continue_text(prompt, _SHORT))


def _model_of(run: LoadedRun) -> TextModel:
    """Return the model of a run.  Raises RecipeError for a model that writes no text."""
    recipe = run.recipe
    window = recipe.data.get("length")
    if not isinstance(window, int):  # the most tokens that training read at once
        sample = instantiate_data(recipe)[0]
        window = max((value.shape[-1] for value in sample.values() if value.dim()), default=0) or 1
    return text_model(run.model, recipe.task.inputs, window, str(recipe.model["_target_"]))
