"""`flowrun sample`: text from a run, a checkpoint of it, or a folder of Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from flowrun.engine.errors import FlowrunError
from flowrun.launcher.commands.load_run import LoadedRun, load_run
from flowrun.launcher.job.job import Job
from flowrun.launcher.model.build import instantiate_data
from flowrun.launcher.model.hugging_face.convert_models import CONFIG
from flowrun.launcher.model.hugging_face.load_folder import load_text_model
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.report.record import Record
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.checkpoint import RECIPE
from flowrun.launcher.text.codec import (
    BYTES,
    ByteCodec,
    Codec,
    Message,
    codec_of,
    is_bytes,
    read_tokenizer,
)
from flowrun.launcher.text.generate import Drawing, generate
from flowrun.launcher.text.text_model import TextModel, text_model

_QUICK_BYTES = 200e6  # of weights: about ten seconds of a core
_PROMPT = 24  # tokens
_SHORT = Drawing(tokens=160)


def sample(
    source: Path,
    prompt: str,
    drawing: Drawing,
    *,
    step: int | None = None,
    best: bool = False,
    tokenizer: str | None = None,
) -> Iterator[str]:
    """Return pieces of text that follow the prompt, as they are made.

    source, step, best, tokenizer: see `open_source`.  drawing: how tokens are chosen.
    """
    return go_on(*open_source(source, step, best, tokenizer), prompt, drawing)


def _ignore(note: str) -> None:
    """Nobody reads it."""


def go_on(
    model: TextModel,
    codec: Codec,
    prompt: str,
    drawing: Drawing,
    note: Callable[[str], None] = _ignore,
) -> Iterator[str]:
    """Return pieces of text that follow the prompt.

    model, codec: see `open_source`.  drawing: how tokens are chosen.  note: takes a line where the
    model does not read all of the prompt.
    """
    ids = codec.encode(prompt) or codec.encode("\n")
    _note_cut("prompt", ids, model, note)
    return generate(model, codec, ids, drawing)


def _note_cut(what: str, ids: Sequence[int], model: TextModel, note: Callable[[str], None]) -> None:
    if len(ids) > model.window:
        note(f"the {what} is {len(ids):,} tokens, of which the last {model.window:,} are read")


def talk(
    model: TextModel,
    codec: Codec,
    questions: Iterable[str],
    drawing: Drawing,
    note: Callable[[str], None] = _ignore,
) -> Iterator[Iterator[str]]:
    """Yield the pieces of an answer to each question, which knows the questions before.

    model, codec: see `open_source`.  drawing: how tokens are chosen.  note: takes a line where the
    model does not read all of the conversation.  Each answer is to be read to its end before the
    next.  Raises RecipeError where there is no chat template.
    """
    messages: list[Message] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer: list[str] = []

        def pieces(prompt: list[int], answer: list[str] = answer) -> Iterator[str]:
            for piece in generate(model, codec, prompt, drawing):
                answer.append(piece)
                yield piece

        yield pieces(_encode_window(model, codec, messages, drawing, note))
        messages.append({"role": "assistant", "content": "".join(answer)})


def _encode_window(
    model: TextModel,
    codec: Codec,
    messages: list[Message],
    drawing: Drawing,
    note: Callable[[str], None],
) -> list[int]:
    """Return the ids of a conversation, and remove from it the oldest questions with their answers,
    as many as the answer to the last one needs: `drawing.tokens`, at most half of the window.

    model, codec, note: see `talk`.  messages: the conversation.
    """
    room = model.window - min(drawing.tokens, model.window // 2)
    whole, ids = len(messages), codec.encode_chat(messages)
    length = len(ids)
    while len(ids) > room and len(messages) > 1:
        del messages[:2]
        ids = codec.encode_chat(messages)
    if pairs := (whole - len(messages)) // 2:
        oldest = (
            f"{pairs} oldest questions and their answers"
            if pairs > 1
            else ("oldest question and its answer")
        )
        note(
            f"the conversation is {length:,} tokens, and the model reads {model.window:,} at once: "
            f"the {oldest} are left out"
        )
    _note_cut("question", ids, model, note)
    return ids


def open_source(
    source: Path, step: int | None = None, best: bool = False, tokenizer: str | None = None
) -> tuple[TextModel, Codec]:
    """Return the model of a run, of a checkpoint of it, or of a folder of Hugging Face's, and what
    its ids are.

    source: the folder.  step, best: which weights of a run.  tokenizer: a path, or "bytes", in
    place of the one that the source names.  Raises RecipeError.
    """
    if (source / RECIPE).is_file():
        return of_run(load_run(source, step, best), tokenizer)
    if (source / CONFIG).is_file():
        return _of_folder(source, tokenizer)
    neither = f"it has neither {RECIPE}, of a run, nor {CONFIG}, of Hugging Face's."
    problem = neither if source.is_dir() else "there is no such folder."
    where = "A run says at its end where everything of it is."
    raise CommandLineError(str(source), problem, where)


def show_sample(record: Record) -> None:
    """Show what a model that was trained on text writes; the run is complete even if it cannot."""
    try:
        found = sample_after(record.job, record.folder)
    except Exception as error:  # of the user's model, maybe
        why = error.problem if isinstance(error, FlowrunError) else repr(error)
        record.note(f"no sample of text (eval.sample=false leaves it out): {why}")
        return
    if found and record.progress:
        record.progress.show_sample(*found)


def sample_after(job: Job, folder: Path) -> tuple[str, str] | None:
    """Return the beginning of a held-out text and how the trained model goes on; None where the run
    has no text, or no weights on this host.

    folder: of the run, which is complete.  A model too large to be quick writes nothing: the second
    text then says how to have it.  Raises RecipeError for a model that writes no text.
    """
    recipe, file = job.recipe, folder / weights.FILE
    if not (recipe.data.get("tokenizer") or is_bytes(recipe.data)) or not file.is_file():
        return None
    if file.stat().st_size > _QUICK_BYTES:
        return "", f"flowrun sample {folder} shows it"
    model, codec = of_run(load_run(folder))
    fed = recipe.task.inputs.get(model.argument, model.argument)
    held_out = job.materials.evaluation_sampler
    sampler = held_out if held_out.held_out else job.materials.sampler
    ids = sampler(0, 0, slice(0, 1))[fed][0].tolist()
    decode = codec.decoder([])
    prompt = "".join(decode(each) for each in ids[: max(1, min(_PROMPT, len(ids) // 2))])
    return prompt, "".join(go_on(model, codec, prompt, _SHORT))


def of_run(run: LoadedRun, tokenizer: str | None = None) -> tuple[TextModel, Codec]:
    """Return the model of a run, and what its ids are.

    Raises RecipeError for a model that writes no text.
    """
    recipe, name = run.recipe, str(run.recipe.model["_target_"])
    model = text_model(run.model, recipe.task.inputs, _window_of(recipe), name)
    return model, codec_of(recipe.data, tokenizer)


def _window_of(recipe: Recipe) -> int:
    """Return the most tokens that training read at once: the length of a sample."""
    length = recipe.data.get("length")
    if isinstance(length, int):
        return length
    sample = instantiate_data(recipe)[0]
    return max((len(value) for value in sample.values() if value.dim() == 1), default=0) or 1


def _of_folder(folder: Path, tokenizer: str | None) -> tuple[TextModel, Codec]:
    """Return the model of a folder of Hugging Face's, and its tokenizer."""
    model = load_text_model(folder)
    written = text_model(model, {}, None, f"{folder} ({type(model).__name__})")
    if tokenizer == BYTES:
        return written, ByteCodec()
    return written, read_tokenizer(Path(tokenizer) if tokenizer else folder)
